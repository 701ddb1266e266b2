"""The display of training's progress: a bar on a terminal, lines elsewhere."""

from types import TracebackType
from typing import TYPE_CHECKING, Self

from rptrain.runs.event_log import EventLog
from rptrain.runs.events import BestLoaded, Event, Step
from rptrain.utils.text import printable
from rptrain.utils.units import format_duration, format_loss

if TYPE_CHECKING:
    from rich.console import Console


class Progress:
    """Shows the progress of training: a bar on a terminal, lines elsewhere, nothing if `quiet`."""

    def __init__(self, total_steps: int, *, quiet: bool = False, console: "Console | None" = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        self._total = total_steps
        self._first: Step | None = None  # the pace is measured from this step on
        self._quiet = quiet
        self._console = console or Console()
        columns = (BarColumn(bar_width=24), TextColumn("{task.description}", markup=False))
        self._bar = Bar(*columns, console=self._console) if self._console.is_terminal and not quiet else None
        self._task = self._bar.add_task("", total=total_steps) if self._bar else None

    def update(self, step: Step) -> None:
        self._first = self._first or step
        text = describe(step, self._total, self._first)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step.step, description=text)
        else:
            self.note(text)

    def note(self, text: str) -> None:
        """Prints a line, above the bar if there is one. Training continues if the line cannot be printed."""
        if not self._quiet:
            try:
                self._console.print(printable(text), markup=False, highlight=False, emoji=False, soft_wrap=True)
            except OSError:  # the disk is full: a later line may succeed
                return
            except SystemExit:  # rich exits if the output pipe was closed
                self._quiet = True

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()


def record(log: EventLog, progress: Progress, event: Event) -> None:
    """Writes a record. Prints its sentence if it is a warning or an error, or names the best checkpoint."""
    log.write(event)
    if (sentence := event.sentence()) and (event.severity != "info" or isinstance(event, BestLoaded)):
        progress.note(sentence)


def describe(step: Step, total_steps: int, first: Step) -> str:
    """A line about a step, with the remaining time at the pace since the step `first`."""
    parts = [f"step {step.step}/{total_steps}"]
    if step.skipped:
        parts.append("skipped: the gradients were not finite")
    elif step.loss is not None:
        parts.append(f"loss {format_loss(step.loss)}")
    parts.append(f"{step.tokens_per_second:,.0f} tokens/s")
    if step.step > first.step:
        rest = (step.time - first.time) / (step.step - first.step) * (total_steps - step.step)
        parts.append(f"ETA {format_duration(rest)}")
    return "  ".join(parts)
