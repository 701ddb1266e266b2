"""The log of a run, the output of its trainer, or its samples, filtered by a text; the newest line stays visible."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Input, Static

from rptrain.runs.view.values import LogLine
from rptrain.tui.widgets.entry import Entry
from rptrain.tui.widgets.tail import Tail
from rptrain.utils.text import one_line, printable

PARTS = ("log", "output", "samples")
MAX_LINES = 300  # lines
STYLES = {"info": "$foreground", "warning": "$warning", "error": "$error"}


class LogPanel(Vertical):
    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.part = "log"
        self._texts: dict[str, Sequence[Content]] = {part: () for part in PARTS}
        self._wanted = ""  # the text that lines must contain
        self._made_from: dict[str, Any] = {}  # the data that each part was made from

    def compose(self) -> ComposeResult:
        yield Static("", id="log-title")
        yield Entry(placeholder="text to search for; esc: all lines", id="log-search", compact=True)
        with Tail(id="log-body"):
            yield Static("", id="log-text")

    def on_mount(self) -> None:
        self.query_one("#log-search").display = False
        self._draw()

    def search(self) -> None:
        """Asks for the text that the shown lines must contain."""
        entry = self.query_one("#log-search", Input)
        entry.display = True
        entry.focus()

    def end_search(self) -> bool:
        """Shows all lines again. Returns whether a search was active."""
        entry = self.query_one("#log-search", Input)
        if not entry.display:
            return False
        entry.value, entry.display = "", False
        self.query_one(Tail).focus()
        return True

    @on(Input.Changed, "#log-search")
    def _filter(self, event: Input.Changed) -> None:
        event.stop()
        self._wanted = event.value.lower()
        self._draw()
        self.to_end(True)

    @on(Input.Submitted, "#log-search")
    def _keep_filter(self, event: Input.Submitted) -> None:
        event.stop()
        self.query_one(Tail).focus()

    def turn(self) -> bool:
        """Shows the next part that has content. Returns whether there is one."""
        before = self.part
        place = PARTS.index(self.part)
        order = [*PARTS[place + 1 :], *PARTS[: place + 1]]
        self.turn_to(next((part for part in order if len(self._texts[part]) > 0), self.part))
        return self.part != before

    def turn_to(self, part: str) -> None:
        if part != self.part:
            self.part = part
            self._draw()
            self.to_end(True)

    def scroll(self, lines: int) -> None:
        self.query_one(Tail).scroll_relative(y=lines, animate=False)

    def to_end(self, end: bool) -> None:
        body = self.query_one(Tail)
        if end:
            body.scroll_end(animate=False)
        else:
            body.scroll_home(animate=False)

    def show_log(self, lines: Sequence[LogLine]) -> None:
        if self._is_new("log", (len(lines), lines[-1].time if lines else 0.0)):
            self._set("log", list(_lines(lines)))

    def show_output(self, text: str) -> None:
        if self._is_new("output", text):
            self._set("output", [Content(line) for line in printable(text).split("\n")] if text else ())

    def show_samples(self, samples: Sequence[Mapping[str, Any]]) -> None:
        if self._is_new("samples", len(samples)):
            self._set("samples", [_sample(sample) for sample in samples])

    def _is_new(self, part: str, data: Any) -> bool:
        before, self._made_from[part] = self._made_from.get(part), data
        return before != data

    def _set(self, part: str, text: Sequence[Content]) -> None:
        had = len(self._texts[part]) > 0
        self._texts[part] = text
        if part == self.part or had != (len(text) > 0):
            self._draw()

    def _draw(self) -> None:
        shown = [part for part in PARTS if part == self.part or len(self._texts[part]) > 0]
        title = [(f"{part.capitalize()}   ", "bold" if part == self.part else "$muted") for part in shown]
        hint = ("o: next", "$muted") if len(shown) > 1 else ("", "")
        lines = self._texts[self.part]
        if self._wanted:
            found = [_marked(line, self._wanted) for line in lines if self._wanted in line.plain.lower()]
            hint = (f"{len(found):,} of {len(lines):,} lines have “{one_line(self._wanted)}”", "$accent")
            lines = found
        self.query_one("#log-title", Static).update(Content.assemble(*title, hint))
        newest = lines if self.part == "output" else lines[-MAX_LINES:]
        self.query_one("#log-text", Static).update(Content("\n").join(newest))


def _lines(lines: Sequence[LogLine]) -> Iterator[Content]:
    """The lines with their times; with dates, too, if they are of several days."""
    times = [datetime.fromtimestamp(line.time) for line in lines]
    several = len({time.date() for time in times}) > 1
    for line, time in zip(lines, times, strict=True):
        when = f"{time:%m-%d %H:%M:%S}" if several else f"{time:%H:%M:%S}"
        yield Content.assemble((f"{when}  ", "$muted"), (printable(line.text), STYLES[line.kind]))


def _marked(line: Content, wanted: str) -> Content:
    """The line with the first place of the wanted text highlighted."""
    start = line.plain.lower().find(wanted)
    return line.stylize("reverse", start, start + len(wanted))


def _sample(sample: Mapping[str, Any]) -> Content:
    prompt, text = one_line(sample["prompt"]), printable(sample["text"].rstrip())
    between = "\n" if "\n" in text else "  "
    return Content.assemble((f"step {sample['step']:,}  {prompt}", "$muted"), (f"{between}{text}", "bold"))
