"""Synchronization of the engine's threads: a monotonic counter for each key.

Threads publish here what they have issued or finished. Every dependency between threads goes through the board, so a
failure can release all waiting threads, and one dictionary shows which thread waits for what. A payload is a device
event that was already recorded (waiting on an unrecorded event is a silent no-op), a plain value, or None for work
that has finished.
"""

import threading
from collections.abc import Hashable
from contextlib import suppress
from typing import Any

from rptrain.engine.errors import Aborted

HISTORY = 4  # payloads kept for each key; at most two iterations are in progress
SKIPPED = object()  # the payload of a number whose work was left out: it gets that of the number before


class Board:
    """Counters that threads publish and wait for.

    A wait for n returns once every number up to n was published; two devices may publish out of order. A number wakes
    only the threads that wait for its key: each of the others would take the interpreter's lock.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._published: dict[Hashable, threading.Condition] = {}  # of keys that were waited for
        self._counts: dict[Hashable, int] = {}
        self._constant: dict[Hashable, Any] = {}
        self._payloads: dict[Hashable, dict[int, Any]] = {}
        self._waiting: dict[str, tuple[Hashable, int]] = {}
        self._aborted = False

    def publish(self, key: Hashable, number: int, payload: Any = None) -> None:
        with self._lock:
            history = self._payloads.setdefault(key, {})
            count = self._counts.setdefault(key, min(number, 0) - 1)
            assert number > count, (key, number, count)
            assert number not in history, (key, number)
            history[number] = payload
            while count + 1 in history:
                count += 1
                if history[count] is SKIPPED:
                    history[count] = history.get(count - 1)
                history.pop(count - HISTORY, None)
            self._counts[key] = count
            self._notify(key)

    def skip(self, key: Hashable, number: int) -> None:
        """Publishes a number whose work is left out. Whoever waits for it gets the payload of the number before."""
        self.publish(key, number, SKIPPED)

    def publish_constant(self, key: Hashable, payload: Any = None) -> None:
        """Publishes every number under `key`, with this payload."""
        with self._lock:
            self._constant[key] = payload
            self._notify(key)

    def wait(self, key: Hashable, number: int) -> Any:
        """Blocks until `number` was published under `key` and returns its payload. Raises Aborted.

        The payload is None if it is no longer kept.
        """
        with self._lock:
            self._await(key, number)
            return self._constant[key] if key in self._constant else self._payloads[key].get(number)

    def reached(self, key: Hashable, number: int, seconds: float) -> bool:
        """Waits for at most this many seconds; whether `number` was published under `key`. Raises Aborted."""
        with self._lock:
            self._await(key, number, seconds)
            return self._reached(key, number)

    def _await(self, key: Hashable, number: int, seconds: float | None = None) -> None:
        """`wait` and `reached`, with the lock held."""
        if not self._reached(key, number):
            name = threading.current_thread().name
            self._waiting[name] = (key, number)
            published = self._published.setdefault(key, threading.Condition(self._lock))
            published.wait_for(lambda: self._aborted or self._reached(key, number), seconds)
            del self._waiting[name]
        if self._aborted:
            raise Aborted

    def ready(self, key: Hashable, number: int) -> bool:
        with self._lock:
            return self._reached(key, number)

    def _notify(self, key: Hashable) -> None:
        if key in self._published:
            self._published[key].notify_all()

    def _reached(self, key: Hashable, number: int) -> bool:
        return key in self._constant or (key in self._counts and self._counts[key] >= number)

    def count(self, key: Hashable) -> int:
        """The count of numbers, from 0 without a gap, that were published under `key`."""
        with self._lock:
            return max(self._counts.get(key, -1), -1) + 1

    def waiting(self) -> dict[str, tuple[Hashable, int]]:
        """The key and number that each blocked thread waits for."""
        with self._lock:
            return dict(self._waiting)

    def abort(self) -> None:
        """Releases every present and future waiter with Aborted."""
        with self._lock:
            self._aborted = True
            for published in self._published.values():
                published.notify_all()
        with suppress(RuntimeError):  # not held, unless a Ctrl-C arrived just as this thread acquired it
            while True:
                self._lock.release()

    @property
    def aborted(self) -> bool:
        return self._aborted
