"""A lane for each device: its recent computations, its current state, memory and links. The devices of several
processes have a line above them for each process.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from textual.content import Content
from textual.events import Click
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive

from rptrain.runs.records.lanes import LaneRecord, Snapshot
from rptrain.runs.view.process_view import ENDED, ProcessView
from rptrain.runs.view.run_view import RunView
from rptrain.runs.view.values import LaneView
from rptrain.tui.widgets.line_widget import LineWidget
from rptrain.tui.widgets.sizes import WIDE
from rptrain.utils.text import clipped, one_line
from rptrain.utils.units import DASH, format_bytes, format_percent

KINDS = {"F": ("▀", "$forward"), "FB": ("█", "$fused"), "B": ("▄", "$backward")}
IDLE = ("·", "$muted")
NAME = 8  # characters of a device's name
NOW = 24  # characters of the state
HINT = "t schedule"
WIDE_NOW = 60  # of the state on a wide screen


@dataclass(frozen=True)
class Group:
    """The lanes of a process."""

    title: str  # empty if it is the only process
    ended: bool  # it failed, or is gone without a final record
    empty: str  # text without lanes
    lanes: tuple[LaneView, ...]
    recent: tuple[Snapshot, ...]
    reserved: int  # lanes that have space, so that the layout does not move

    @classmethod
    def of(cls, view: ProcessView, most: int, state: str, empty: str, *, titled: bool) -> "Group":
        lanes = view.lanes
        reserved = max(len(lanes), 0 if state in ENDED else len(view.devices), 1)
        end = _end(view, state) if titled else ""
        title = f"{view.name} · {end or _host(view)}" if titled else ""
        return cls(title, bool(end), empty, lanes, tuple(view.recent)[-most:], reserved)

    def height(self, detailed: bool) -> int:
        """Lines, with two for each lane if `detailed`."""
        return bool(self.title) + self.reserved * (1 + detailed)


@dataclass(frozen=True)
class Shown:
    """The data of a run that lanes show."""

    groups: tuple[Group, ...]
    gone: bool  # the trainer, without records

    @classmethod
    def of(cls, view: RunView, most: int, state: str, describe: Callable[[ProcessView, str], str]) -> "Shown":
        """Data for lanes from a view; `state` is the view's, or "replay". `describe` says what a process does that has
        no lanes, from its view and its state.
        """
        several = view.process_count > 1
        states = [(one, state if one is view or state == "replay" else one.state) for one in (view, *view.processes)]
        groups = [Group.of(one, most, now, describe(one, now), titled=several) for one, now in states]
        return cls(tuple(groups), state == "dead")

    def height(self, detailed: bool) -> int:
        """Lines, with two for each lane if `detailed`."""
        return sum(group.height(detailed) for group in self.groups)


class Lanes(LineWidget):
    """One line per device, or two on a tall screen. The strip has a character per record and scrolls to the left."""

    class Clicked(Message):
        """A click anywhere on the lanes."""

    shown: reactive[Shown | None] = reactive(None, repaint=False)
    empty: reactive[str] = reactive("")  # text without a run
    detailed: reactive[bool] = reactive(False, layout=True)

    def watch_shown(self, before: Shown | None, after: Shown | None) -> None:
        if (before and before.height(self.detailed)) != (after and after.height(self.detailed)):
            self.refresh(layout=True)
        self.redraw()

    def watch_empty(self) -> None:
        self.redraw()

    def watch_detailed(self) -> None:
        self.redraw()

    def on_click(self, event: Click) -> None:
        event.stop()
        self.post_message(self.Clicked())

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return 1 + (1 if self.shown is None else self.shown.height(self.detailed))

    def lines(self) -> Iterator[Content]:
        yield self._legend("Devices (last known)" if self.shown and self.shown.gone else "Devices")
        if self.shown is None:
            yield Content.styled(self.empty, "$muted")
            return
        for group in self.shown.groups:
            yield from self._group(group)

    def _group(self, group: Group) -> Iterator[Content]:
        lines: list[Content] = []
        if group.title:
            title = clipped(one_line(group.title), self.size.width)
            lines.append(Content.styled(title, "$error" if group.ended else "$muted"))
        for index, lane in enumerate(group.lanes):
            lines.append(self._lane(index, lane, group.recent))
            if self.detailed:
                lines.append(self._details(lane))
        if not group.lanes:
            lines.append(Content.styled(group.empty, "$muted"))
        yield from lines
        yield from [Content("")] * (group.height(self.detailed) - len(lines))

    def _legend(self, title: str) -> Content:
        marks = [
            part for name, (mark, style) in KINDS.items() for part in ((f"   {mark}", style), (f" {name}", "$muted"))
        ]
        legend = Content.assemble((title, "bold"), *marks, (f"   {IDLE[0]} waiting", "$muted"))
        gap = self.size.width - legend.cell_length - len(HINT)
        return Content.assemble(legend, " " * gap, (HINT, "$muted")) if gap > 1 else legend

    def _lane(self, index: int, lane: LaneView, recent: Sequence[Snapshot]) -> Content:
        share = format_percent(lane.busy_share)
        tail = f" {share:>5}" + ("" if self.detailed else f" {_memory(lane):>12}")
        now = WIDE_NOW if self.app.size.width >= WIDE else NOW
        width = max(self.size.width - NAME - now - len(tail), 4)
        kinds = [shot.kinds[index] for shot in recent[-width:] if index < len(shot.kinds)]
        marks = [(KINDS.get(kind, IDLE), sum(1 for _ in same)) for kind, same in groupby(kinds)]
        return Content.assemble(
            (f"{lane.now.device:<{NAME}}", "bold"),
            _now(lane.now, now),
            " " * (width - len(kinds)),
            *((letter * count, style) for (letter, style), count in marks),
            (tail, "$foreground"),
        )

    def _details(self, lane: LaneView) -> Content:
        now = lane.now
        parts = [f"{'':{NAME}}{_memory(lane):<{NOW}}", f"↑ {format_bytes(lane.up)}/s  ↓ {format_bytes(lane.down)}/s"]
        if now.utilisation is not None:
            parts.append(f"used {now.utilisation} %")
        if now.temperature is not None:
            parts.append(f"{now.temperature} °C")
        return Content.styled("   ".join(parts), "$muted")


def _now(lane: LaneRecord, width: int) -> Content:
    """The current state of a device in `width` characters."""
    if lane.doing == "computing" and lane.stage is not None:
        where = f"{lane.stage}" + ("" if lane.micro_batch is None else f" · {lane.micro_batch + 1}")
        text, style = where, KINDS.get(lane.kind or "", IDLE)[1]
    elif lane.doing == "waiting":
        text, style = f"waits: {lane.waiting}", "$warning"
    else:
        text, style = "idle", "$muted"
    text = text if len(text) < width else f"{text[: width - 2]}…"
    return Content.styled(f"{text:<{width}}", style)


def _end(view: ProcessView, state: str) -> str:
    """How a process ended that did not end as it should; empty for others."""
    if view.own_failure is not None:
        return f"failed: {view.own_failure}"
    return "dead" if state == "dead" else ""


def _host(view: ProcessView) -> str:
    """The host memory of a process: in use, or as planned."""
    if (now := view.now) is not None:
        return f"host memory {format_bytes(now.process)} of {format_bytes(now.process + now.free)}"
    return f"host memory {DASH if view.host is None else format_bytes(view.host.total)}, as planned"


def _memory(lane: LaneView) -> str:
    if lane.now.memory is None:
        return "" if lane.limit is None else format_bytes(lane.limit)
    used = format_bytes(lane.now.memory)
    return f"{used.removesuffix(' GiB')}/{format_bytes(lane.limit)}" if lane.limit else used
