"""The head of the Run screen: state, progress, speed and current metrics."""

from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from textual.content import Content

from rptrain.runs.records.events import describe_score
from rptrain.runs.view.process_view import ENDED
from rptrain.runs.view.run_view import RunView
from rptrain.tui.widgets.bars import bar
from rptrain.tui.widgets.line_widget import LineWidget
from rptrain.tui.widgets.run_state import state_text
from rptrain.utils.text import clipped, one_line
from rptrain.utils.units import (
    DASH,
    format_count,
    format_duration,
    format_loss,
    format_percent,
    format_short,
    format_speed,
)

STATE = 12  # characters of the longest state and the gap, so that the bar does not move
LEAST = 8  # width of the bar
WORK = 24  # width of that of a long phase
GAP = 3  # between two numbers
SHORTEST = 12  # maximum width of a name
WIDTHS = {
    "loss": 6,
    "tokens/s": 6,
    "of peak speed": 4,
    "bubble": 4,
    "planned bubble": 4,
    "learning rate": 7,
    "gradient norm": 5,
}


class RunHead(LineWidget):
    """Two lines: state and progress, and metrics."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: tuple[RunView, str, str] | None = None

    def show(self, view: RunView, state: str, note: str = "") -> None:
        self._shown = (view, state, note)
        self.redraw()

    def lines(self) -> Iterator[Content]:
        if self._shown is not None:
            yield self._progress(*self._shown)
            yield self._second(*self._shown[:2])

    def _second(self, view: RunView, state: str) -> Content:
        """The metrics, or a long phase."""
        if state == "starting":
            return _start(view)
        if (now := view.now) is None or (work := now.work) is None or state in (*ENDED, "replay"):
            return self._numbers(view)
        if work.beside:
            return self._numbers(view, one_line(work.text))
        text = clipped(one_line(work.text), self.size.width)
        width = min(self.size.width - cell_len(text) - 1, WORK)
        if work.share is None or width < LEAST:
            return Content(text)
        return Content.assemble(bar(work.share, width, "$primary"), " ", text)

    def _progress(self, view: RunView, state: str, note: str) -> Content:
        total = view.total_steps
        steps = f"{view.step:,}" if total is None else f"{view.step:,}/{total:,}"
        if state == "replay" or (view.ended and state != "starting"):
            took = view.seconds(view.last_event or 0.0)
            when = "" if took is None else f"took {format_duration(took)}"
        elif state in ("paused", "starting"):
            when = ""
        else:
            when = f"{format_duration(view.eta)} left"
        right = Content.assemble(f" {steps}", (f"  {when:>12}", "$muted") if when else "")
        what = Content.assemble("  ", state_text(state), " " * (STATE - len(state)))
        name, space = one_line(view.path.name), self.size.width - what.cell_length - right.cell_length
        note = _fitting(note, space - min(cell_len(name), SHORTEST))
        name = clipped(name, max(space - len(note) - LEAST, SHORTEST))
        width = space - cell_len(name) - len(note)
        share = view.step / total if total else 0.0
        rest = bar(share, width, "$primary") if width >= LEAST else " " * max(width, 0)
        return Content.assemble((name, "bold"), what, note, rest, right)

    def _numbers(self, view: RunView, step: str = "") -> Content:
        """The metrics that fit, before the progress of a step that takes long."""
        parts: list[tuple[str, str]] = []
        step = clipped(step, self.size.width)
        width = self.size.width - (cell_len(step) + GAP if step else 0)
        for name, value in _numbers(view):
            value = f"{value:>{WIDTHS.get(name, 0)}}"
            text = sum(len(part) for part, _ in parts) + len(name) + len(value) + 1
            if text > width:
                continue  # a shorter one may fit
            parts += [(value, "bold"), (f" {name}", "$muted"), (" " * GAP, "")]
        return Content.assemble(*(parts if step else parts[:-1]), step)


def _fitting(note: str, space: int) -> str:
    """The note and a gap, without what is in parentheses at its end or empty if there is too little space."""
    texts = (f"{text}  " for text in (note, note.partition(" (")[0]) if text)
    return next((text for text in texts if len(text) <= space), "")


def _start(view: RunView) -> Content:
    """In place of the numbers of the process before."""
    numbers = "numbers after its first steps"
    text = (
        f"resumes from step {view.results.checkpoints[-1].step:,}; {numbers}" if view.results.checkpoints else numbers
    )
    return Content.styled(text, "$muted")


def _learning_rate(view: RunView) -> str:
    """That of the last step; at the end of a run, where it may have decayed, after the highest one."""
    if (latest := view.latest) is None:
        return DASH
    last = format_short(latest.learning_rate)
    highest = view.steps.derived("learning_rate", _highest) if view.ended else 0.0
    return f"{format_short(highest)} → {last}" if highest > latest.learning_rate else last


def _highest(values: Sequence[float]) -> float:
    """The highest value that is not NaN; 0 without one."""
    return max((value for value in values if value == value), default=0.0)


def _numbers(view: RunView) -> Iterator[tuple[str, str]]:
    """The metrics, the most important first."""
    latest = view.latest
    yield "loss", format_loss(view.loss)
    average = view.average_tokens_per_second
    yield "tokens/s", format_speed(view.tokens_per_second)
    if average is not None:
        yield "tokens/s with the warm-up", format_speed(average)
    best, newest = view.results.best, view.results.scores[-1] if view.results.scores else None
    if best is not None:
        yield f"best validation, step {best.step:,}", format_loss(best.score)
    yield "of peak speed", format_percent(view.share_of_floor)
    bubble = view.bubble
    measured = bubble is not None
    yield "bubble" if measured else "planned bubble", format_percent(bubble if measured else view.planned_bubble)
    yield "learning rate", _learning_rate(view)
    norm = None if latest is None else latest.grad_norm
    yield "gradient norm", DASH if norm is None else format_short(norm)
    if newest is not None and newest is not best:
        yield describe_score(newest.name, newest.score)
    if view.progress.skipped:
        yield "step skipped" if view.progress.skipped == 1 else "steps skipped", f"{view.progress.skipped:,}"
    if view.process_count > 1:
        yield "processes", str(view.process_count)
    yield "parameters", format_count(view.parameters)
