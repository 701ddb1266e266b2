"""The board: waits, payloads, order, release."""

import threading
import time

import pytest

from rptrain.engine.board import HISTORY, Board
from rptrain.engine.errors import Aborted

from ..run_tools import PATIENCE


def test_a_wait_returns_the_payload_of_its_number():
    board = Board()
    board.publish("key", 0, "a")
    board.publish("key", 1, "b")
    assert board.wait("key", 0) == "a"
    assert board.wait("key", 1) == "b"
    assert board.ready("key", 1)
    assert not board.ready("key", 2)
    assert not board.ready("other", 0)


def test_numbers_may_come_out_of_order_but_count_when_all_before_are_there():
    board = Board()
    board.publish("key", 1, "b")
    assert not board.ready("key", 1)
    board.publish("key", 0, "a")
    assert board.wait("key", 1) == "b"
    with pytest.raises(AssertionError):
        board.publish("key", 1)


def test_old_payloads_are_forgotten():
    board = Board()
    for number in range(-1, 10):
        board.publish("key", number, number)
    assert board.wait("key", 9 - HISTORY + 1) == 9 - HISTORY + 1
    assert board.wait("key", 9 - HISTORY) is None


def test_a_number_wakes_only_the_threads_that_wait_for_its_key():
    looked = []

    class Watched(Board):
        def _reached(self, key, number):
            looked.append(key)
            return super()._reached(key, number)

    board = Watched()
    thread = threading.Thread(target=board.wait, args=("a", 0), daemon=True)
    thread.start()
    while not board.waiting():
        pass
    looked.clear()
    board.publish("b", 0)
    time.sleep(0.1)  # a thread that was woken would have looked by then
    assert not looked
    board.publish("a", 0)
    thread.join(PATIENCE)
    assert looked == ["a"]


def test_abort_releases_waiters_and_who_waits_is_shown():
    board, seen = Board(), []

    def wait():
        try:
            board.wait("never", 3)
        except Aborted:
            seen.append("released")

    thread = threading.Thread(target=wait, name="waiter")
    thread.start()
    while board.waiting() != {"waiter": ("never", 3)}:
        pass
    board.abort()
    thread.join()
    assert seen == ["released"]
    with pytest.raises(Aborted):
        board.wait("anything", 0)


def test_abort_frees_a_lock_that_a_signal_left_taken():
    """A KeyboardInterrupt between taking the lock and entering its `with`."""
    board, ended = Board(), []

    def wait() -> None:
        with pytest.raises(Aborted):
            board.wait("a", 0)
        ended.append(True)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    while not board.waiting():
        pass
    board._lock.acquire()
    board.abort()
    thread.join(PATIENCE)
    assert ended


def test_a_constant_key_is_ready_for_every_number_with_one_payload():
    board = Board()
    assert not board.ready("k", -1)
    board.publish_constant("k", 7)
    assert all(board.ready("k", number) and board.wait("k", number) == 7 for number in (-1, 0, 10**6))
