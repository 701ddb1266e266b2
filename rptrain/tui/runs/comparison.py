"""Marked runs side by side: curves of a metric, and a table of results and differing settings."""

from collections.abc import Iterator, Sequence
from math import inf

from rich.cells import cell_len
from textual.app import ComposeResult
from textual.containers import Horizontal, ScrollableContainer
from textual.content import Content
from textual.widgets import Static

from rptrain.runs.folder.comparison import AXES, METRICS, Axis, Row, comparable
from rptrain.tui.runs.run_rows import Mark
from rptrain.tui.runs.summaries import Compared
from rptrain.tui.widgets.plot import Curve, Plot
from rptrain.utils.text import clipped, one_line
from rptrain.utils.units import format_count, format_duration

SPIKES = 3.0  # of speeds: a step that was measured too short would set the axis
GAP = 2  # characters between two columns
LONGEST = 36  # maximum width of a value or a name
TITLES = {"tokens": "tokens with padding"}
FORMS = {"steps": lambda x: f"{x:,.0f}", "tokens": format_count, "time": format_duration}


class Comparison(Horizontal):
    """The curves, and beside them or in their place the table. `show` is called again after `turn_metric` and
    `turn_axis`, with what they chose.
    """

    def __init__(self) -> None:
        super().__init__(id="compared")
        self.metric, self.axis = next(iter(METRICS)), AXES[0]

    def compose(self) -> ComposeResult:
        plot = Plot("loss")
        plot.empty = "not recorded in these runs; m: another metric"
        yield plot
        with ScrollableContainer(id="differences"):
            yield Static("")

    def turn_metric(self) -> None:
        """Shows the curves of the next metric."""
        metrics = tuple(METRICS)
        self.remove_class("-table")
        self.metric = metrics[(metrics.index(self.metric) + 1) % len(metrics)]

    def turn_axis(self) -> None:
        self.remove_class("-table")
        self.axis: Axis = AXES[(AXES.index(self.axis) + 1) % len(AXES)]

    def turn_table(self) -> None:
        """The table in the whole width, or the curves, beside the table if there is space for both."""
        self.toggle_class("-table")

    def show(self, compared: Compared, marks: Sequence[Mark]) -> None:
        plot = self.query_one(Plot)
        plot.spikes = SPIKES if self.metric == "tokens/s" else inf
        plot.title, plot.format_x = f"{self.metric} by {TITLES.get(self.axis, self.axis)}", FORMS[self.axis]
        names = [one_line(path.name) for path in compared.runs]
        plot.show(
            tuple(
                Curve(xs, ys, mark.style, name, mark=mark.letter)
                for (xs, ys), mark, name in zip(compared.curves, marks, names, strict=True)
            )
        )
        self.query_one(Static).update(Content("\n").join(_table(compared, names, marks)))


def _table(compared: Compared, names: Sequence[str], marks: Sequence[Mark]) -> Iterator[Content]:
    rows = [*compared.results, *compared.differences]
    left = min(max(cell_len(one_line(row.name)) for row in rows), LONGEST) + GAP
    heads = [f"{mark.letter} {name}" for mark, name in zip(marks, names, strict=True)]
    columns = [
        min(max(map(cell_len, (head, *(_value(row, index) for row in rows)))), LONGEST) + GAP
        for index, head in enumerate(heads)
    ]
    cells = [_cell(head, width, mark.style) for head, width, mark in zip(heads, columns, marks, strict=True)]
    yield Content.assemble((_padded("results", left), "bold"), *cells)
    yield from _lines(compared.results, left, columns)
    if len(names) < 2:
        return
    yield Content("")
    if compared.differences:
        yield Content.styled("settings that differ", "bold")
        yield from _lines(compared.differences, left, columns)
    else:
        yield Content.styled("no settings differ", "$muted")
    if not comparable(compared.differences):
        yield Content("")
        yield Content.styled("The data or the models differ: the losses may not be comparable.", "$warning")


def _lines(rows: Sequence[Row], left: int, columns: Sequence[int]) -> Iterator[Content]:
    for row in rows:
        cells = [
            _cell(_value(row, index), width, "bold" if row.best == index else "") for index, width in enumerate(columns)
        ]
        yield Content.assemble(_cell(one_line(row.name), left, "$muted"), *cells)


def _value(row: Row, index: int) -> str:
    return one_line(row.values[index]) + (" ✓ best" if row.best == index else "")


def _cell(text: str, width: int, style: str) -> tuple[str, str]:
    return _padded(clipped(text, width - GAP), width), style


def _padded(text: str, width: int) -> str:
    return text + " " * (width - cell_len(text))
