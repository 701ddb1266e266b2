"""A run in a few lines: its state, how far it is, how fast, and the numbers of now."""

from collections.abc import Iterator

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from rptrain.runs.view import RunView
from rptrain.tui.bars import bar
from rptrain.tui.words import DASH, count, duration, loss, percent

STATES = {  # a letter that does without colour, and the colour
    "new": ("…", "$muted"),
    "loading": ("…", "$accent"),
    "training": ("▶", "$success"),
    "paused": ("⏸", "$warning"),
    "saving": ("↓", "$accent"),
    "evaluating": ("?", "$accent"),
    "exporting": ("↓", "$accent"),
    "stopped": ("■", "$muted"),
    "failed": ("✗", "$error"),
    "finished": ("✓", "$success"),
    "dead": ("✗", "$error"),
    "replay": ("▷", "$accent"),
}


def state_text(state: str) -> Content:
    letter, style = STATES[state]
    return Content.styled(f"{letter} {state}", f"bold {style}")


class RunHead(Widget):
    """Two lines: state and progress; numbers."""

    lines: reactive[tuple[Content, ...]] = reactive(())

    def render(self) -> Content:
        return Content("\n").join(self.lines)

    def show(self, view: RunView, state: str, note: str = "") -> None:
        self.lines = (self._progress(view, state, note), self._numbers(view))

    def _progress(self, view: RunView, state: str, note: str) -> Content:
        total = view.total_steps
        left = Content.assemble((view.path.name, "bold"), "  ", state_text(state), f"  {note}" if note else "", "  ")
        steps = f"{view.step:,}" if total is None else f"{view.step:,}/{total:,}"
        if state == "replay" or view.ended:
            last, first = view.last_event or 0.0, view.began or 0.0
            when = f"took {duration(last - first)}" if first else ""
        else:
            when = f"{duration(view.eta)} left"
        right = Content.assemble(f" {steps}  ", (f"{when:>12}", "$muted"))
        width = self.size.width - left.cell_length - right.cell_length
        share = view.step / total if total else 0.0
        return Content.assemble(left, bar(share, width, "$primary") if width > 3 else " " * max(width, 0), right)

    def _numbers(self, view: RunView) -> Content:
        parts: list[tuple[str, str]] = []
        width = self.size.width
        for name, value in _numbers(view):
            text = sum(len(part) for part, _ in parts) + len(name) + len(value) + 4
            if text > width:
                break
            parts += [(value, "bold"), (f" {name}", "$muted"), ("   ", "")]
        return Content.assemble(*parts[:-1])


def _numbers(view: RunView) -> Iterator[tuple[str, str]]:
    """The most wanted first."""
    speed = view.steps.last("tokens_per_second")
    yield "loss", loss(view.loss)
    yield "tokens/s", DASH if speed is None else f"{speed:,.0f}"
    yield "of the floor", percent(view.share_of_floor)
    yield "bubble", percent(view.bubble if view.bubble is not None else view.planned_bubble)
    rate = view.steps.last("learning_rate")
    yield "learning rate", DASH if rate is None else f"{rate:.2g}"
    norm = view.steps.last("grad_norm")
    yield "gradient norm", DASH if norm is None else f"{norm:.3g}"
    if view.scores:
        score = view.scores[-1]
        yield score.name.replace("_", " "), percent(score.score)
    if view.skipped:
        yield "steps skipped", str(view.skipped)
    yield "parameters", count(view.parameters)
