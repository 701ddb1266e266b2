"""Where threads tell each other that something was issued or finished: monotonic counters, one for each key.

Every dependency between threads goes through here, so waiting can be released on failure, and a dump of who waits
for what is one dictionary. A published payload is a device event that was already recorded (waiting on an event
that was not recorded is a silent no-op), or a plain value, or None for work that is finished.
"""

import threading
from collections.abc import Hashable
from contextlib import suppress
from typing import Any

from rptrain.engine.errors import Aborted

HISTORY = 4  # payloads kept for each key; at most two iterations are under way


class Board:
    """A wait for n returns once every number up to n was published; two devices may publish out of order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._counts: dict[Hashable, int] = {}
        self._constant: dict[Hashable, Any] = {}
        self._payloads: dict[Hashable, dict[int, Any]] = {}
        self._waiting: dict[str, tuple[Hashable, int]] = {}
        self._aborted = False

    def publish(self, key: Hashable, number: int, payload: Any = None) -> None:
        with self._changed:
            history = self._payloads.setdefault(key, {})
            count = self._counts.setdefault(key, min(number, 0) - 1)
            assert number > count, (key, number, count)
            assert number not in history, (key, number)
            history[number] = payload
            while count + 1 in history:
                count += 1
                history.pop(count - HISTORY, None)
            self._counts[key] = count
            self._changed.notify_all()

    def publish_constant(self, key: Hashable, payload: Any = None) -> None:
        """Every number counts as published under `key`, with this payload."""
        with self._changed:
            self._constant[key] = payload
            self._changed.notify_all()

    def wait(self, key: Hashable, number: int) -> Any:
        """Blocks until `number` was published under `key` and returns its payload. Raises Aborted.

        The payload is None where it is no longer kept.
        """
        with self._changed:
            if not self._reached(key, number):
                name = threading.current_thread().name
                self._waiting[name] = (key, number)
                self._changed.wait_for(lambda: self._aborted or self._reached(key, number))
                del self._waiting[name]
            if self._aborted:
                raise Aborted
            return self._constant[key] if key in self._constant else self._payloads[key].get(number)

    def ready(self, key: Hashable, number: int) -> bool:
        with self._changed:
            return self._reached(key, number)

    def _reached(self, key: Hashable, number: int) -> bool:
        return key in self._constant or (key in self._counts and self._counts[key] >= number)

    def count(self, key: Hashable) -> int:
        """How many numbers from 0 on were published under `key`, without a gap."""
        with self._changed:
            return max(self._counts.get(key, -1), -1) + 1

    def waiting(self) -> dict[str, tuple[Hashable, int]]:
        """Which thread waits for what, now."""
        with self._changed:
            return dict(self._waiting)

    def abort(self) -> None:
        """Releases every present and future waiter with Aborted."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()
        with suppress(RuntimeError):  # it is not held; but a Ctrl-C that came just as this thread took it left it taken
            while True:
                self._changed.release()

    @property
    def aborted(self) -> bool:
        return self._aborted
