"""When the next piece of input is handed out."""

import asyncio
from contextlib import suppress

from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.events import Event, Key
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Input

from rptrain.tui.turns import ROUNDS, Readings, Turns, _rest

from .conftest import driven, until

KEYS = [Key("f3", None), *(Key(letter, letter) for letter in "one")]


class Slow(Screen[None]):
    """A screen that opens once its event is set, or after a while."""

    def __init__(self, opens: asyncio.Event) -> None:
        super().__init__()
        self._opens = opens

    def compose(self) -> ComposeResult:
        yield Input()

    async def on_mount(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._opens.wait(), 0.2)


class Opener(App[None]):
    """An app with a slow screen, which opens as soon as a key is handed out before the app took the one before it."""

    BINDINGS = [Binding("f3", "open")]  # noqa: RUF012 (Textual's type)

    def __init__(self) -> None:
        super().__init__()
        self.turns = Turns(self, Readings())
        self._opens = asyncio.Event()
        self._posted: list[Message] = []

    async def on_event(self, event: Event) -> None:
        if self.turns.may_act(event):
            await super().on_event(event)

    def action_open(self) -> None:
        self.push_screen(Slow(self._opens))

    def post_message(self, message: Message) -> bool:
        if message is KEYS[2] and message in self._posted:
            self._opens.set()
        self._posted.append(message)
        return super().post_message(message)


def test_input_does_not_wait_for_a_task_that_never_rests():
    rounds = 0

    async def never_rests() -> None:
        nonlocal rounds
        while rounds < 10 * ROUNDS:
            rounds += 1
            await asyncio.sleep(0)

    async def resting() -> None:
        task = asyncio.create_task(never_rests())
        await _rest()
        assert not task.done()
        await task

    asyncio.run(resting())


def test_input_waits_for_all_that_is_ready_in_the_event_loop():
    """It fails if the loops of asyncio lose the name by which this is known."""

    async def resting() -> None:
        left = 50

        def again() -> None:
            nonlocal left
            left -= 1
            if left:
                asyncio.get_running_loop().call_soon(again)

        again()
        await _rest()
        assert left == 0

    asyncio.run(resting())


@driven
async def test_keys_stay_in_order_while_a_screen_opens():
    async with Opener().run_test() as pilot:
        for key in KEYS:
            pilot.app.post_message(key)
        await until(pilot, lambda: len(pilot.app.screen.query(Input)) == 1)
        await until(pilot, lambda: len(pilot.app.screen.query_one(Input).value) == 3)
        assert pilot.app.screen.query_one(Input).value == "one"
