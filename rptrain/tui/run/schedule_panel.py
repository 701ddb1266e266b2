"""The schedule of a step: what each device computes when, as planned and as measured, over the same time axis."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from math import ceil, floor

from textual.content import Content
from textual.events import Click
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive

from rptrain.runs.records.lanes import LaneRecord
from rptrain.runs.records.timeline import SlotSpan, StepTimeline
from rptrain.runs.view.process_view import ProcessView
from rptrain.runs.view.run_view import RunView
from rptrain.tui.run.lanes import IDLE, KINDS, NAME
from rptrain.tui.widgets.line_widget import LineWidget
from rptrain.utils.text import clipped, one_line
from rptrain.utils.units import format_percent, format_seconds

WHICH = 8  # characters for "planned" and "actual"
SHARE = 5  # characters for a percentage
SHORTEST = 1.0  # seconds of an axis that shows the current time: records are made four times per second
LONGER = 1.5  # times as long as the step shown: an average that needs a word
OTHER = ("▒", "$foreground")  # a kind of stage of another version
HINT = "t back"


@dataclass(frozen=True)
class ProcessSchedule:
    """The schedule of a process; None for what is not recorded."""

    title: str  # empty if it is the only process
    names: tuple[str, ...]  # of the devices
    doing: tuple[str, ...]  # by device; empty without a current state
    stages: tuple[str, ...]
    planned: StepTimeline | None
    actual: StepTimeline | None
    elapsed: float | None  # seconds since the end of the last step; None if the rows do not begin at such an end
    pace: float | None = None  # seconds per step on average; None if unknown

    @classmethod
    def of(cls, view: ProcessView, *, titled: bool) -> "ProcessSchedule":
        actual, schedule = view.timeline, view.schedule
        planned, stages = None, tuple("".join(view.plan[:1]).partition("|")[0].split())
        if schedule is not None:
            planned = schedule.step if actual is None else schedule.at(actual.iteration)
            stages = schedule.stages
        now = view.now
        is_pair = actual is not None and actual.steps > 1  # it began a step earlier
        ended = None if is_pair else view.progress.step_ended
        elapsed = None if now is None or ended is None else now.time - ended
        return cls(
            view.name if titled else "",
            view.devices,
            tuple(_doing(lane.now) for lane in view.lanes),
            stages,
            planned,
            actual,
            elapsed,
            view.progress.seconds_per_step,
        )

    @classmethod
    def all_of(cls, view: RunView) -> tuple["ProcessSchedule", ...]:
        """The parts of all processes that train the run."""
        titled = view.process_count > 1
        return tuple(cls.of(one, titled=titled) for one in (view, *view.processes))

    @property
    def seconds(self) -> float:
        """The length of the time axis."""
        return max((step.seconds for step in (self.planned, self.actual) if step is not None), default=0.0)


class SchedulePanel(LineWidget):
    """Two rows for each device, the axis, and the stages by number."""

    class Clicked(Message):
        """A click anywhere on the panel."""

    parts: reactive[tuple[ProcessSchedule, ...]] = reactive((), repaint=False)
    _count = 0  # lines, some of which there may be no space for yet

    def watch_parts(self) -> None:
        before = self._count
        self.redraw()
        if self._count != before:
            self.refresh(layout=True)

    def on_click(self, event: Click) -> None:
        event.stop()
        self.post_message(self.Clicked())

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return sum(1 for _ in self._lines(width))

    def lines(self) -> Sequence[Content]:
        lines = list(self._lines(self.size.width))
        self._count = len(lines)
        return lines

    def _lines(self, width: int) -> Iterator[Content]:
        yield _legend(width)
        for part in self.parts:
            yield from part_lines(part, width)


def part_lines(part: ProcessSchedule, width: int) -> Iterator[Content]:
    """The schedule of a process in lines of `width` characters."""
    if part.title:
        yield Content.styled(clipped(one_line(part.title), width), "$muted")
    if part.planned is None and part.actual is None:
        yield Content.styled("No schedule is recorded yet.", "$muted")
        return
    yield from map(Content, _wrapped(list(_summary(part)), width))
    columns = max(width - NAME - WHICH - SHARE - 1, 4)
    for device, name in enumerate(part.names):
        now = part.doing[device] if device < len(part.doing) else ""
        labels = f"{clipped(one_line(name), NAME - 1):<{NAME}}", f"{clipped(one_line(now), NAME - 1):<{NAME}}"
        for label, style, which, step in (
            (labels[0], "bold", "planned", part.planned),
            (labels[1], "$muted", "actual", part.actual),
        ):
            known = step is not None and device < len(step.devices)
            strip = strip_of(step.devices[device], part.seconds, columns, part.stages) if step and known else ()
            share = format_percent(step.busy[device]) if step and device < len(step.busy) else ""
            drawn = sum(len(text) for text, _ in strip)
            yield Content.assemble(
                (label, style),
                (f"{which:<{WHICH}}", "$muted"),
                *strip,
                " " * (columns - drawn),
                (f" {share:>{SHARE}}", "$foreground"),
            )
    yield _axis(part, columns)
    stages = [f"{number} {one_line(stage)}" for number, stage in enumerate(part.stages, 1)]
    yield from (Content.styled(line, "$muted") for line in _wrapped(stages, width))


@lru_cache(maxsize=256)  # a window is drawn several times per second
def strip_of(
    lane: tuple[SlotSpan, ...], seconds: float, columns: int, stages: tuple[str, ...]
) -> Sequence[tuple[str, str]]:
    """A device's window as text with styles, of `columns` characters for `seconds`. A block begins with the number of
    its stage if it is wide enough; idle time is dots.
    """
    shares: list[dict[int, float]] = [defaultdict(float) for _ in range(columns)]
    for one in lane:
        first, last = (max(0.0, min(at / seconds * columns, columns)) for at in (one.start, one.end))
        for cell in range(floor(first), ceil(last)):
            shares[cell][one.slot] += min(last, cell + 1) - max(first, cell)
    owners = [max(share, key=lambda slot: share[slot]) if sum(share.values()) >= 0.5 else None for share in shares]
    strip: list[tuple[str, str]] = []
    for slot, cells in groupby(owners):
        length = sum(1 for _ in cells)
        if slot is None:
            strip.append((IDLE[0] * length, IDLE[1]))
            continue
        stage = stages[slot % len(stages)] if stages else ""
        mark, style = KINDS.get(stage.rstrip("0123456789-"), OTHER)
        label = str(slot % len(stages) + 1) if stages else ""
        if len(label) >= length:
            label = ""
        strip += [(label, f"bold {style}"), (mark * (length - len(label)), style)]
    return [(text, style) for text, style in strip if text]


def _doing(lane: LaneRecord) -> str:
    """What a device does now, in a word."""
    return lane.stage or lane.doing if lane.doing == "computing" else lane.doing


def _summary(part: ProcessSchedule) -> Iterator[str]:
    """The duration of a step and the share in which devices compute, as planned and as measured."""
    planned, actual = part.planned, part.actual
    if planned is not None:
        yield f"planned: {_speed(planned)}"
    if actual is None:
        yield "no step is measured yet"
    else:
        yield f"{'actual' if actual.step is None else f'step {actual.step:,}'}: {_speed(actual)}"
        if part.pace is not None and part.pace > LONGER * actual.seconds_per_step:
            yield f"with what is between steps, they take {format_seconds(part.pace)} on average"


def _speed(step: StepTimeline) -> str:
    shown = "" if step.steps == 1 else f" ({step.steps} steps shown)"
    return f"{format_seconds(step.seconds_per_step)} per step, {format_percent(step.busy_share)} busy{shown}"


def _axis(part: ProcessSchedule, columns: int) -> Content:
    """The ends of the time axis, and the time since the end of the last step."""
    end = format_seconds(part.seconds)
    line = f"0 s{end:>{max(columns - 3, 0)}}"
    if part.elapsed is not None and part.elapsed >= 0 and part.seconds >= SHORTEST:
        at = min(int(part.elapsed / part.seconds * columns), columns - 1)
        return Content.assemble(
            " " * (NAME + WHICH), (line[:at], "$muted"), ("▲", "bold $accent"), (line[at + 1 :], "$muted")
        )
    return Content.styled(" " * (NAME + WHICH) + line, "$muted")


def _legend(width: int) -> Content:
    marks = [part for name, (mark, style) in KINDS.items() for part in ((f"  {mark}", style), (f" {name}", "$muted"))]
    title = Content.assemble(("Schedule of a step", "bold"), *marks, (f"  {IDLE[0]} idle", "$muted"))
    gap = width - title.cell_length - len(HINT)
    return Content.assemble(title, " " * gap, (HINT, "$muted")) if gap > 1 else title


def _wrapped(words: Sequence[str], width: int) -> Iterator[str]:
    line = ""
    for word in words:
        if line and len(line) + 3 + len(word) > width:
            yield line
            line = ""
        line = f"{line} · {word}" if line else word
    if line:
        yield line
