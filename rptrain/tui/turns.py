"""The order of input: each key, click and paste acts before the next one is handed out."""

import asyncio
from collections import deque
from typing import Any, cast

from textual.app import App
from textual.events import Event, InputEvent, Paste

ROUNDS = 1000  # of the event loop, at most, between two pieces of input: something may never rest


class Turns:
    """Holds input back until everything that the input before it set off has run, except for what waits for time, a
    thread or another process.

    Textual hands a key to the widget with the focus; from there it goes through the message queue of each parent, and
    bindings run at the end of that way. A key that follows quickly would be handed to the widget that had the focus
    before them.
    """

    def __init__(self, app: App[Any]) -> None:
        self._app = app
        self._held: deque[Event] = deque()
        self._next: Event | None = None  # handed out by `_give`
        self._giving: asyncio.Task[None] | None = None

    def may_act(self, event: Event) -> bool:
        """Whether an event acts now. If not, it is input that is posted to the app again in its turn."""
        if event.is_forwarded or event is self._next or not isinstance(event, InputEvent | Paste):
            return True
        if self._giving is not None:
            self._held.append(event)
            return False
        self._giving = asyncio.create_task(self._give())
        return True

    async def _give(self) -> None:
        try:
            await _rest()
            while self._held:
                self._next = self._held.popleft()
                self._app.post_message(self._next)
                await _rest()
        finally:
            self._next = self._giving = None


async def _rest() -> None:
    """Returns once nothing else is ready to run in this event loop, or after ROUNDS."""
    loop = cast(Any, asyncio.get_running_loop())  # asyncio has no public name for this
    await asyncio.sleep(0)
    for _ in range(ROUNDS):
        if not getattr(loop, "_ready", ()):  # other loops have none: there, input may act too early
            return
        await asyncio.sleep(0)
