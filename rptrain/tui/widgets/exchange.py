"""The turns of a conversation, each with the answer of the tuned model and perhaps of the base model."""

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import Container, Vertical
from textual.content import Content
from textual.widgets import Static

from rptrain.tui.services.chat_session import ShownTurn, State
from rptrain.tui.widgets.log_panel import Tail
from rptrain.utils.text import printable


class Exchange(Vertical):
    """A message, and below it the answers: side by side where there is room."""

    def __init__(self, turn: ShownTurn) -> None:
        super().__init__()
        self._shown = (turn, False, False)
        self._drawn: tuple[object, ...] = ()

    def compose(self) -> ComposeResult:
        yield Static("", classes="said", markup=False)
        with Container(classes="answers-of"):
            yield Static("", classes="tuned", markup=False)
            yield Static("", classes="base", markup=False)

    def on_mount(self) -> None:
        self._draw()

    def show(self, turn: ShownTurn, *, with_base: bool, running: bool) -> None:
        self._shown = (turn, bool(turn.base_answer) or (with_base and running), running)
        if self.query(".base"):  # otherwise it is drawn once it has widgets
            self._draw()

    def _draw(self) -> None:
        turn, with_base, running = self._shown
        drawn = (turn.said, turn.answer, turn.base_answer, turn.stopped, with_base, running)
        if drawn == self._drawn:
            return
        self._drawn = drawn
        self.query_one(".said", Static).update(Content.assemble(("> ", "$accent"), (printable(turn.said), "bold")))
        end = " …" if running else " (stopped)" if turn.stopped else ""
        second = with_base and bool(turn.base_answer)
        label = "tuned  " if with_base else ""
        answer = Content.assemble((label, "$muted"), printable(turn.answer), ("" if second else end, "$muted"))
        self.query_one(".tuned", Static).update(answer)
        base = self.query_one(".base", Static)
        base.display = with_base
        base.update(
            Content.assemble(("base   ", "$muted"), printable(turn.base_answer), (end if second else "", "$muted"))
        )


class Transcript(Tail):
    """All turns; the newest stays visible."""

    can_focus = False

    def show(self, turns: Sequence[ShownTurn], *, with_base: bool, state: State) -> None:
        shown = list(self.query(Exchange))
        for exchange in shown[len(turns) :]:
            exchange.remove()
        new = [Exchange(turn) for turn in turns[len(shown) :]]
        if new:
            self.mount(*new)
        for number, (exchange, turn) in enumerate(zip([*shown, *new], turns, strict=False), 1):
            running = state == "answering" and number == len(turns)
            exchange.show(turn, with_base=with_base, running=running)
