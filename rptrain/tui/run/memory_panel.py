"""Host memory by use, and the state of the optimizer."""

import re
from collections.abc import Iterator

from textual.content import Content
from textual.geometry import Size

from rptrain.runs.view.run_view import RunView
from rptrain.tui.widgets.bars import bar
from rptrain.tui.widgets.line_widget import LineWidget
from rptrain.utils.text import clipped
from rptrain.utils.units import DASH, format_bytes, format_seconds

LEAST = 0.002  # fraction of host memory; smaller parts are omitted
MEASURED = "last measured"
SHORT = {  # of names whose first words alone say too little
    f"Host, {MEASURED}": "Last measured",
    f"Host 0, {MEASURED}": "Last measured",
    "the program and its libraries": "program",
    "rest of the float32 weights": "float32 rest",
    "weights in FP8 for the devices": "FP8 weights",
    "weights in FP8 for the devices, 2 generations": "FP8 weights ×2",
    "weights, 2 generations": "weights ×2",
    "gradients of other processes": "others' gradients",
    "buffers of file-backed weights": "file buffers",
}
_WORKERS = re.compile(r"memory of (\d+ CPU workers)")
LINKS = ("of", "the", "in", "for", "between", "and", "over", "by")  # words that end no name
BAR = "bar"  # in place of a name: the value is a fraction


class MemoryPanel(LineWidget):
    """A panel as tall as its content, the most important first; its container scrolls."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: tuple[tuple[str, str, str], ...] = ()  # name, value, style

    def show(self, view: RunView, *, ended: bool) -> None:
        before, self._parts = len(self._parts), (*_host(view, ended), *_optimizer(view), *_uses(view))
        if len(self._parts) != before:
            self.refresh(layout=True)
        self.redraw()

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self._parts)

    def lines(self) -> Iterator[Content]:
        width = max(self.size.width, 12)
        for name, value, style in self._parts:
            if name == BAR:
                yield bar(float(value), width, style)
            else:
                name = shortened(name, max(width - len(value) - 1, 4))
                yield Content.styled(f"{name}{' ' * (width - len(name) - len(value))}{value}", style)


def shortened(name: str, width: int) -> str:
    """A name, in whole words if it is longer than `width`: a short name, or its first words. Indentation stays."""
    text = name.lstrip()
    indent = name[: len(name) - len(text)]
    width -= len(indent)
    if len(text) > width:
        text = SHORT.get(text, _WORKERS.sub(r"\1", text))
    if len(text) > width:
        text = text.partition(",")[0]
    words = text.split(" ")
    while len(words) > 1 and (len(" ".join(words)) > width or words[-1] in LINKS):
        words.pop()
    return indent + clipped(" ".join(words), width)


def _host(view: RunView, ended: bool) -> Iterator[tuple[str, str, str]]:
    """A fixed number of lines, so that the lines below do not move."""
    last, host = view.recent[-1] if view.recent else None, view.host
    name = "Host 0" if view.process_count > 1 else "Host"  # those of other processes stand above their devices
    if last is not None:
        total = last.process + last.free
        used = format_bytes(last.process)
        yield (f"{name}, {MEASURED}", used, "bold") if ended else (name, f"{used} of {format_bytes(total)}", "bold")
        yield BAR, str(last.process / total if total else 0.0), "$primary"
    else:
        yield f"{name}, as planned", DASH if host is None else format_bytes(host.total), "bold"
        yield BAR, str(host.total / host.limit if host and host.limit else 0.0), "$primary"


def _optimizer(view: RunView) -> Iterator[tuple[str, str, str]]:
    semantics = {None: DASH, 0: "synchronous", 1: "one step late"}
    yield "Optimizer", semantics.get(view.staleness, DASH), "bold"
    if (optimizer := view.optimizer) is not None:
        took = DASH if optimizer.seconds is None else format_seconds(optimizer.seconds)
        yield f"  {optimizer.doing}", "", "$muted"
        yield f"  queue {optimizer.queue}", f"{took} per step", "$muted"
    else:
        pace = view.progress.seconds_per_step
        yield "  idle", "", "$muted"
        yield "  step time", DASH if pace is None else format_seconds(pace), "$muted"
    yield "Saved", f"step {view.results.checkpoints[-1].step:,}" if view.results.checkpoints else DASH, "bold"


def _uses(view: RunView) -> Iterator[tuple[str, str, str]]:
    """The planned uses of host memory."""
    if (host := view.host) is not None:
        yield "Planned, by use", format_bytes(host.total), "bold"
        for name, nbytes in sorted(host.parts, key=lambda part: -part[1]):
            if nbytes < host.total * LEAST:
                break
            yield f"  {name}", format_bytes(nbytes), "$muted"
