"""The order of input: each key, click and paste acts before the next one is handed out."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, cast

from textual.app import App
from textual.events import Event, InputEvent, Paste

ROUNDS = 1000  # of the event loop, at most, between two pieces of input: something may never rest
LONGEST = 10.0  # seconds for which a reading holds input back: a network folder may never answer

Value = TypeVar("Value")


class Readings:
    """What is read for a screen that opens next, or for a list, which takes the input that arrives meanwhile."""

    def __init__(self) -> None:
        self._count = 0
        self._over = asyncio.Event()

    async def read(self, function: Callable[..., Value], *given: Any) -> Value:
        """The result of a function, which runs in a thread."""
        with self.reading():
            return await asyncio.to_thread(function, *given)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Something is read as long as the context lasts."""
        self._count += 1
        self._over.clear()
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._over.set()

    async def end(self) -> None:
        """Waits until nothing is read, or for LONGEST seconds."""
        if self._count:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), LONGEST)


class Turns:
    """Holds input back until everything that the input before it set off has run, except for what waits for time, a
    thread other than that of `Readings`, or another process.

    Textual hands a key to the widget with the focus; from there it goes through the message queue of each parent, and
    bindings run at the end of that way. A key that follows quickly would be handed to the widget that had the focus
    before them.
    """

    def __init__(self, app: App[Any], readings: Readings) -> None:
        self._app, self._readings = app, readings
        self._waiting: deque[Event] = deque()
        self._next: Event | None = None  # handed out by `_give`
        self._taken = asyncio.Event()  # by the app from its queue: the event that was handed out
        self._giving: asyncio.Task[None] | None = None

    def may_act(self, event: Event) -> bool:
        """Whether an event acts now. If not, it is input that is posted to the app again in its turn."""
        if event.is_forwarded or not isinstance(event, InputEvent | Paste):
            return True
        if event is self._next:
            self._taken.set()
            return True
        if self._giving is not None:
            self._waiting.append(event)
            return False
        self._giving = asyncio.create_task(self._give())
        return True

    async def _give(self) -> None:
        try:
            await self._acted()
            while self._waiting:
                self._next = self._waiting.popleft()
                self._taken.clear()
                if not self._app.post_message(self._next):  # it is closing
                    return
                await self._taken.wait()  # the app may wait for a screen that opens, with nothing else to run
                await self._acted()
        finally:
            self._next = self._giving = None

    async def _acted(self) -> None:
        await _rest()
        await self._readings.end()
        await _rest()


async def _rest() -> None:
    """Returns once nothing else is ready to run in this event loop, or after ROUNDS."""
    loop = cast(Any, asyncio.get_running_loop())  # asyncio has no public name for this
    await asyncio.sleep(0)
    for _ in range(ROUNDS):
        if not getattr(loop, "_ready", ()):  # other loops have none: there, input may act too early
            return
        await asyncio.sleep(0)
