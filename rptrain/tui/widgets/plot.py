"""Curves drawn with braille characters, which have 2 x 4 dots each."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, log10
from statistics import median

from textual.content import Content
from textual.events import Click
from textual.geometry import Region
from textual.message import Message

from rptrain.runs.view.series import thinned
from rptrain.tui.widgets.line_widget import LineWidget
from rptrain.utils.text import clipped, one_line
from rptrain.utils.units import format_short

AXIS = 7  # characters for the numbers at the left
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # dots of a character, by column and row
EMPTY = 0x2800
POINTS = 1000  # points passed to a curve, which draws as many as fit
HUGE = 1e300  # above this, differences may be infinite
NAMED = 8  # characters of a curve's name below which its mark alone is shown
MARKED = 3  # places of a mark on its curve
WIDE = 100.0  # positive values with a larger ratio are drawn on a logarithmic scale


Ends = tuple[float, float]  # of the axis


@dataclass(frozen=True)
class Curve:
    xs: Sequence[float]
    ys: Sequence[float]
    style: str
    name: str = ""
    valued: bool = True  # whether its value at the cursor is shown
    outside: frozenset[float] = frozenset()  # xs of points that do not set the axis, if there are others
    mark: str = ""  # a letter on the curve, to tell it from others without color


class Plot(LineWidget):
    """A plot with title, newest value, curves, and numbers at the ends of the axes. With a cursor, its title has the
    values there. `hint`: text at the right of the title.
    """

    @dataclass
    class Clicked(Message):
        """A click on the plot, in a column of its curves."""

        plot: "Plot"
        column: int

    def __init__(self, title: str, *, logarithmic: bool = False, id: str | None = None) -> None:
        super().__init__(id=id)
        self.title, self._logarithmic = title, logarithmic
        self.empty = "nothing yet"  # text without points
        self.format_x: Callable[[float], str] = lambda x: f"{x:,.0f}"
        self.format_y: Callable[[float], str] = format_short  # on the axis
        self.format_value: Callable[[float], str] = format_short  # at the cursor
        self.bounds: Ends | None = None  # of the axis; None: those of the values
        self.least_range = 0.0  # of the axis, as a share of the largest value: less would look like a trend
        self.spikes = inf  # values above this multiple of the median are drawn at the upper end of the axis
        self.note = ""  # text behind the title, such as "smoothed"
        self.curves: tuple[Curve, ...] = ()
        self.value = self.hint = self._notes = ""
        self.cursor: int | None = None  # its column

    def show(self, curves: tuple[Curve, ...], value: str = "") -> None:
        self.curves, self.value = curves, value
        self.redraw()

    def tell(self, value: str, hint: str) -> None:
        """Shows another newest value and another hint, and the curves as they are."""
        if (value, hint) != (self.value, self.hint) and self._drawn:
            self.value, self.hint = value, hint
            self._drawn[0] = self._heading()
            self.refresh(Region(0, 0, self.size.width, 1))

    def move(self, columns: int) -> None:
        """Moves the cursor; without one it appears at the end."""
        self._place(self._columns - 1 if self.cursor is None else self.cursor + columns)

    def _place(self, column: int) -> None:
        self.cursor = max(0, min(column, self._columns - 1))
        self.redraw()

    def on_click(self, event: Click) -> None:
        self.post_message(self.Clicked(self, event.x - self.gutter.left - AXIS - 1))

    @property
    def _columns(self) -> int:
        """Characters in a row of the curves."""
        return max(self.size.width - AXIS - 1, 1)

    def lines(self) -> Iterator[Content]:
        rows, columns = self.size.height - 2, self._columns
        points = [(curve, _drawable(curve, 2 * columns)) for curve in self.curves]
        ys = [y for _, places in points for _, y in places]
        scaled = self._logarithmic and bool(ys) and min(ys) > 0 and max(ys) / min(ys) > WIDE
        self._notes = "".join(f", {note}" for note in (self.note, "log scale" if scaled else "") if note)
        yield self._heading()
        if rows < 1 or columns < 4:
            return
        xs = [x for _, places in points for x, _ in places]
        if not ys:
            yield Content("")
            yield Content.styled(" " * AXIS + f" {self.empty}", "$muted")
            return
        ends = self.bounds or self._ends(points, ys)
        low, high = (log10(end) for end in ends) if scaled else _margins(*ends, self.least_range)
        left, right = min(xs), max(xs)
        canvas = Canvas(columns, rows)
        drawn = [
            [
                (
                    (x - left) / (right - left or 1),
                    min(max(1 - ((log10(y) if scaled else y) - low) / (high - low), 0.0), 1.0),
                )
                for x, y in places
            ]
            for _, places in points
        ]
        for (curve, _), places in zip(points, drawn, strict=True):
            canvas.draw(curve.style, places)
        for number, ((curve, _), places) in enumerate(zip(points, drawn, strict=True)):
            if curve.mark and places:
                canvas.mark(curve.mark, curve.style, _marks(places, number / len(points)))
        before = ""
        for row in range(rows):
            at = row / (rows - 1) if rows > 1 else 0.0
            number = high - (high - low) * at
            named_row = row in (0, rows - 1) or (rows >= 9 and row == rows // 2)
            label = self.format_y(10**number if scaled else number).replace(" ", "") if named_row else ""
            label, before = "" if label == before else label, label or before
            yield Content.assemble((f"{label:>{AXIS}}", "$muted"), ("│", "$faint"), canvas.row(row, self.cursor))
        first, last = self.format_x(left), self.format_x(right)
        gap = max(1, columns - len(first) - len(last))
        yield Content.styled(f"{'':{AXIS + 1}}{first}{'' if left == right else ' ' * gap + last}", "$muted")

    def _heading(self) -> Content:
        """The title, the value, the names of the curves and the hint."""
        width = self.size.width
        named = self._names(width - len(self.title) - len(self._notes))
        value = self.value if self.cursor is None else self._at(self.cursor)
        title = Content.assemble(
            (self.title, "bold"),
            (self._notes, "$muted"),
            "  ",
            (value, "$accent"),
            *(named if self.cursor is None else ()),
        )
        gap = width - title.cell_length - len(self.hint)
        return Content.assemble(title, " " * gap, (self.hint, "$muted")) if self.hint and gap > 1 else title

    def _names(self, width: int) -> list[tuple[str, str]]:
        """The names of the curves after their marks, in a line; the marks alone if there is little space."""
        named = [curve for curve in self.curves if curve.name]
        space = max(width // max(len(self.curves), 1) - 4, 4)
        short = any(curve.mark and space < min(NAMED, len(curve.name)) for curve in named)
        return [
            (f"  {curve.mark or '━'}" + ("" if short else f" {clipped(one_line(curve.name), space)}"), curve.style)
            for curve in named
        ]

    def _ends(self, points: Sequence[tuple[Curve, Sequence[tuple[float, float]]]], ys: Sequence[float]) -> Ends:
        """The ends of the axis: of the values that set it, the lowest one, and the highest one that is not a spike."""
        ys = [y for curve, places in points for x, y in places if x not in curve.outside] or ys
        limit = self.spikes * median(ys) if self.spikes < inf and median(ys) > 0 else inf
        return min(ys), max(y for y in ys if y <= limit)

    def _at(self, column: int) -> str:
        """The place of a column on the axis, and the value of each curve, the last one first, at its nearest point."""
        curves = [curve for curve in self.curves if curve.valued and len(curve.xs)]
        if not curves:
            return ""
        left, right = min(curve.xs[0] for curve in curves), max(curve.xs[-1] for curve in curves)
        x = left + (right - left) * column / max(self._columns - 1, 1)
        *others, main = curves
        here = self.format_x(main.xs[_nearest(main.xs, x)])
        parts = [f"at {here}:"]
        for curve in (main, *others):
            nearest = _nearest(curve.xs, x)
            value, place = self.format_value(curve.ys[nearest]), self.format_x(curve.xs[nearest])
            elsewhere = "" if place == here else f" (at {place})"
            parts.append(value if curve is main else f"{one_line(curve.name)} {value}{elsewhere}")
        return "  ".join(parts)


def _drawable(curve: Curve, count: int) -> list[tuple[float, float]]:
    """At most `count` points of a curve, without huge ones."""
    places = zip(*thinned(curve.xs, curve.ys, count), strict=True)
    return [place for place in places if max(map(abs, place)) < HUGE]


def _marks(places: Sequence[tuple[float, float]], shift: float) -> list[tuple[float, float]]:
    """Points of a line, evenly spaced from left to right; its last one if the line is shorter. `shift`: from 0 to 1, of
    a space.
    """
    wanted = [(number + shift + 1 / 6) / MARKED for number in range(MARKED)]
    xs = [x for x, _ in places]
    found = list[tuple[float, float]]()
    for x in wanted:
        if xs[0] <= x <= xs[-1]:
            after = min(max(bisect_left(xs, x), 1), len(xs) - 1)
            (x0, y0), (x1, y1) = places[after - 1], places[after]
            found.append((x, y0 + (y1 - y0) * (x - x0) / (x1 - x0 or 1)))
    return found or [places[-1]]


def _nearest(xs: Sequence[float], x: float) -> int:
    after = bisect_left(xs, x)
    places = [index for index in (after - 1, after) if 0 <= index < len(xs)]
    return min(places, key=lambda index: abs(xs[index] - x))


def _margins(low: float, high: float, least: float) -> tuple[float, float]:
    """The ends of an axis, which differ even if all values are equal, and by `least` of the largest value."""
    if low == high:
        low, high = low - (abs(low) / 2 or 1), high + (abs(high) / 2 or 1)
    missing = max(least * max(abs(low), abs(high)) - (high - low), 0.0)
    return low - missing / 2, high + missing / 2


class Canvas:
    """`columns` x `rows` characters. A character shared by curves has the color of the later one."""

    def __init__(self, columns: int, rows: int) -> None:
        self._columns, self._rows = columns, rows
        self._dots = [[0] * columns for _ in range(rows)]
        self._styles = [[""] * columns for _ in range(rows)]
        self._marks: dict[tuple[int, int], str] = {}  # letters by row and column

    def draw(self, style: str, places: Sequence[tuple[float, float]]) -> None:
        """Draws a line through points with x and y from 0, at the top left, to 1."""
        width, height = self._columns * 2 - 1, self._rows * 4 - 1
        spots = [(round(x * width), round(y * height)) for x, y in places]
        for (x0, y0), (x1, y1) in zip(spots, spots[1:] or spots, strict=False):
            count = max(abs(x1 - x0), abs(y1 - y0), 1)
            for step in range(count + 1):
                self._dot(x0 + (x1 - x0) * step // count, y0 + (y1 - y0) * step // count, style)

    def mark(self, letter: str, style: str, places: Sequence[tuple[float, float]]) -> None:
        """Writes a letter at points as those of `draw`."""
        for x, y in places:
            row, column = round(y * (self._rows * 4 - 1)) // 4, round(x * (self._columns * 2 - 1)) // 2
            self._marks[row, column], self._styles[row][column] = letter, f"bold {style}"

    def _dot(self, x: int, y: int, style: str) -> None:
        self._dots[y // 4][x // 2] |= DOTS[x % 2][y % 4]
        self._styles[y // 4][x // 2] = style

    def row(self, index: int, cursor: int | None = None) -> Content:
        """A row of characters. Where no curve is, the column of the cursor has a line."""
        parts: list[tuple[str, str]] = []
        text, before = "", ""
        for column, (dots, style) in enumerate(zip(self._dots[index], self._styles[index], strict=True)):
            letter = self._marks.get((index, column), chr(EMPTY + dots) if dots else " ")
            if column == cursor:
                letter, style = (letter, f"bold {style}") if dots else ("│", "$muted")
            if style != before:
                parts.append((text, before))
                text, before = "", style
            text += letter
        return Content.assemble(*parts, (text, before))
