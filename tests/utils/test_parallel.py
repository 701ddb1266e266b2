"""Many calls on the threads of a pool."""

import threading
import time
from concurrent.futures import Future

import pytest
import torch

from rptrain.utils import parallel
from rptrain.utils.parallel import in_parallel


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_every_item_once_on_several_threads():
    barrier = threading.Barrier(4, timeout=60)
    got = []

    def call(item):
        barrier.wait()
        got.append((item, threading.get_ident()))

    in_parallel(call, range(8), threads=4)
    assert sorted(item for item, _ in got) == list(range(8))
    assert len({thread for _, thread in got}) == 4


def test_operations_of_torch_have_one_thread_each_meanwhile(three_threads):
    counts = []
    in_parallel(lambda _: counts.append(torch.get_num_threads()), range(8))
    assert counts == [1] * 8
    assert torch.get_num_threads() == 3


def test_the_first_error_is_raised_once_all_threads_have_ended(three_threads, monkeypatch):
    """No other call ends before an item was given up."""
    before = {*threading.enumerate()}
    begun, given_up, cancel = [], threading.Event(), Future.cancel

    def noted(future):
        canceled = cancel(future)
        if canceled:  # it had not begun
            given_up.set()
        return canceled

    def call(item):
        begun.append(item)
        if item:
            assert given_up.wait(60)
            time.sleep(0.3)
        raise ValueError(f"item {item}")

    monkeypatch.setattr(Future, "cancel", noted)
    with pytest.raises(ValueError, match="item 0"):
        in_parallel(call, range(50), threads=2)
    assert {*threading.enumerate()} <= before
    assert len(begun) < 50
    assert torch.get_num_threads() == 3


def test_items_are_made_as_they_are_needed(monkeypatch):
    """A model has more pieces than there should be in memory."""
    monkeypatch.setattr(parallel, "ITEMS_AHEAD", 8)
    made, most = [], []

    def items():
        for item in range(50):
            made.append(item)
            yield item

    got = []

    def call(item):
        most.append(len(made) - len(got))
        got.append(item)

    in_parallel(call, items(), threads=2)
    assert sorted(got) == list(range(50)) and max(most) <= 8
