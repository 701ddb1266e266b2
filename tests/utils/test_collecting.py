"""The garbage collector is off, or seldom at work, in a context, and as before after it."""

import gc

import pytest

from rptrain.utils.collecting import seldom_collected, uncollected


def test_it_is_off_and_then_as_before():
    assert gc.isenabled()
    with pytest.raises(KeyError), uncollected():
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def test_what_there_was_before_is_not_searched():
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    with pytest.raises(KeyError), seldom_collected():
        assert gc.get_freeze_count() > frozen + 1000 and gc.isenabled()
        assert all(now > then for now, then in zip(gc.get_threshold(), before, strict=True))
        raise KeyError
    assert gc.get_threshold() == before and gc.get_freeze_count() == frozen == 0
