"""The turns of a conversation, each with the answer of the tuned model and perhaps of the base model."""

from collections.abc import Sequence
from dataclasses import astuple

from textual.app import ComposeResult
from textual.containers import Container, Vertical
from textual.content import Content
from textual.widgets import Static

from rptrain.tui.chat.session import ShownTurn, State
from rptrain.tui.widgets.tail import Tail
from rptrain.utils.text import printable

WAITING = "waits for the model"


class Exchange(Vertical):
    """A message, and below it the answers: side by side where there is space."""

    def __init__(self, turn: ShownTurn) -> None:
        super().__init__()
        self._shown = (turn, False)
        self._drawn: tuple[object, ...] = ()

    def compose(self) -> ComposeResult:
        yield Static("", classes="said", markup=False)
        with Container(classes="answers-of"):
            yield Static("", classes="tuned", markup=False)
            yield Static("", classes="base", markup=False)

    def on_mount(self) -> None:
        self._draw_if_composed()

    def show(self, turn: ShownTurn, *, running: bool) -> None:
        self._shown = (turn, running)
        self._draw_if_composed()

    def _draw_if_composed(self) -> None:
        """Draws the turn, unless its widgets are not there yet or, while the app closes, no longer."""
        if self.query(".base"):
            self._draw()

    def _draw(self) -> None:
        turn, running = self._shown
        drawn = (running, *astuple(turn))
        if drawn == self._drawn:
            return
        self._drawn = drawn
        self.query_one(".said", Static).update(Content.assemble(("> ", "$accent"), (printable(turn.said), "bold")))
        end = WAITING if turn.waiting else " …" if running else " (stopped)" if turn.stopped else ""
        second = bool(turn.base_answer)
        with_base = second or (turn.base_asked and (running or not turn.stopped))
        label = "tuned  " if with_base else ""
        self.query_one(".tuned", Static).update(_answer(label, turn.answer, "" if second else end))
        base = self.query_one(".base", Static)
        base.display = with_base
        base.update(_answer("base   ", turn.base_answer, end))


def _answer(label: str, text: str, end: str) -> Content:
    """`end`: how the answer is incomplete; empty: it is complete."""
    rest = end if end or text.strip() else "(empty answer)"
    return Content.assemble((label, "$muted"), printable(text), (rest, "$muted"))


class Transcript(Tail):
    """All turns; the newest stays visible."""

    can_focus = False

    def show(self, turns: Sequence[ShownTurn], state: State) -> None:
        shown = list(self.query(Exchange))
        for exchange in shown[len(turns) :]:
            exchange.remove()
        new = [Exchange(turn) for turn in turns[len(shown) :]]
        if new:
            self.mount(*new)
        for number, (exchange, turn) in enumerate(zip([*shown, *new], turns, strict=False), 1):
            exchange.show(turn, running=state == "answering" and number == len(turns))
