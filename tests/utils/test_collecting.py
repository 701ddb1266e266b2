"""The garbage collector is off, or seldom at work, in a context, and as before after it."""

import gc
from contextlib import nullcontext

import pytest

from rptrain.utils.collecting import gc_disabled, gc_rarely


def test_it_is_off_and_then_as_before():
    assert gc.isenabled()
    with pytest.raises(KeyError), gc_disabled():
        with gc_disabled():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


@pytest.mark.parametrize("nested", [False, True])
def test_what_there_was_before_is_not_searched(nested):
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    with gc_rarely() if nested else nullcontext():
        outside, outer = gc.get_threshold(), gc.get_freeze_count()
        objects = [[number] for number in range(2000)]
        with pytest.raises(KeyError), gc_rarely():
            assert gc.get_freeze_count() >= outer + len(objects) and gc.isenabled()
            assert all(now > then for now, then in zip(gc.get_threshold(), before, strict=True))
            raise KeyError
        assert gc.get_threshold() == outside
        assert gc.get_freeze_count() >= outer if outer else gc.get_freeze_count() == 0
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() >= frozen if frozen else gc.get_freeze_count() == 0
