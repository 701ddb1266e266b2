"""The garbage collector is off in a context, and on again after it."""

import gc

import pytest

from rptrain.utils.collecting import uncollected


def test_it_is_off_and_then_as_before():
    assert gc.isenabled()
    with pytest.raises(KeyError), uncollected():
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()
