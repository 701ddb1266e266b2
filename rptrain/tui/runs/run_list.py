"""The list of runs: sorted, filtered, and with marks for those that are compared."""

from collections.abc import Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import ClassVar

from textual.binding import BindingType
from textual.content import Content
from textual.events import Click
from textual.message import Message
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from rptrain.runs.folder.listing import Summary
from rptrain.tui.runs.run_rows import Layout, Mark, Order, ago, matches
from rptrain.tui.widgets.bindings import without_enter

COLORS = ("$loss", "$backward", "$fused", "$success", "$forward", "$error")


class Heading(Static):
    """The names of the columns. A click on one sorts by it."""

    class Chosen(Message):
        def __init__(self, column: str) -> None:
            super().__init__()
            self.column = column

    def __init__(self) -> None:
        super().__init__("", id="columns")
        self._layout = Layout(0, ())

    def show(self, layout: Layout, order: Order) -> None:
        self._layout = layout
        self.update(layout.heading(order))

    def on_click(self, event: Click) -> None:
        offset = event.get_content_offset(self)
        if offset is not None and (column := self._layout.column_at(offset.x)) is not None:
            self.post_message(self.Chosen(column))


class RunList(OptionList, inherit_bindings=False):
    """`heading` shows its columns. Only rows that changed are made again: there may be hundreds."""

    BINDINGS: ClassVar[list[BindingType]] = without_enter(OptionList)

    def __init__(self, heading: Heading, nothing: str) -> None:
        super().__init__(id="list", compact=True)
        self._heading, self._nothing = heading, nothing
        self._runs: Sequence[Summary] | None = None  # until they are read
        self._shown: Sequence[Summary] = ()
        self._drawn: list[tuple[Summary, Mark, str]] = []  # of each row: the run, its mark and its age
        self._layout = Layout(0, ())
        self.marked: list[Path] = []  # in the order of the list
        self.order = Order()
        self.words = ""  # the filter
        self._wanted: Path | None = None  # the run to highlight
        self._drawing = False

    def action_cursor_up(self) -> None:
        """To the run above; the list does not wrap, and neither do settings."""
        if self.highlighted != 0:
            super().action_cursor_up()

    def action_cursor_down(self) -> None:
        if self.highlighted != self.option_count - 1:
            super().action_cursor_down()

    # ---- contents

    def choose(self, path: Path) -> None:
        """Highlights a run as soon as it is in the list, unless another one is highlighted by a key or a click before
        that.
        """
        self._wanted = path.absolute()
        self._draw()

    def show(self, runs: Sequence[Summary]) -> None:
        """Shows these runs, and keeps the highlighted one."""
        self._runs = runs
        self.marked = [path for path in self.marked if any(run.path == path for run in runs)]
        self._draw()

    def narrow(self, words: str) -> None:
        """Shows only runs with these words."""
        self.words = words
        self._draw()

    def sort(self, order: Order) -> None:
        self.order = order
        self._draw()
        self._sort_marks()

    def sort_by_next(self) -> None:
        """Sorts by the next of the columns that are shown; the time of the start is one of them."""
        names = ["run", *(name for name, _ in self._layout.columns)]
        names += [] if "began" in names else ["began"]
        place = names.index(self.order.column) if self.order.column in names else -1
        self.sort(Order.by(names[(place + 1) % len(names)]))

    def mark(self) -> None:
        """Marks the highlighted run, or removes its mark."""
        run = self.chosen
        if run is not None:
            self.marked = [path for path in self.marked if path != run.path] + [run.path] * (
                run.path not in self.marked
            )
            self._sort_marks()

    def _sort_marks(self) -> None:
        """Puts the marks in the order of the list; they keep it while runs that train change their places."""
        places = {run.path: place for place, run in enumerate(self._shown)}
        self.marked.sort(key=lambda path: places.get(path, len(places)))
        self._draw()

    def mark_of(self, path: Path) -> Mark:
        if path not in self.marked:
            return Mark()
        number = self.marked.index(path)
        return Mark(ascii_uppercase[number % len(ascii_uppercase)], COLORS[number % len(COLORS)])

    @property
    def chosen(self) -> Summary | None:
        index = self.highlighted
        return self._shown[index] if index is not None and index < len(self._shown) else None

    @property
    def counts(self) -> tuple[int, int]:
        """The numbers of runs that are shown, and of all."""
        return len(self._shown), len(self._runs or ())

    # ---- drawing

    def on_resize(self) -> None:
        self._draw()

    def watch_highlighted(self, highlighted: int | None) -> None:
        super().watch_highlighted(highlighted)
        if not self._drawing:
            self._wanted = None

    def _draw(self) -> None:
        self._drawing = True
        try:
            self._draw_rows()
        finally:
            self._drawing = False

    def _draw_rows(self) -> None:
        width = self.scrollable_content_region.width
        if width < 1:
            return
        if self._runs is None:
            self.clear_options()
            self.add_option(Option(Content.styled("reading …", "$muted"), disabled=True))
            return
        chosen = self.chosen
        before = [run.path for run in self._shown]
        self._shown = self.order.sorted(run for run in self._runs if matches(run, self.words))
        longest = max((len(run.path.name) for run in self._runs), default=0)
        layout = Layout.of(width, longest, validated=any(run.best_loss is not None for run in self._runs))
        rows = [(run, self.mark_of(run.path), ago(run)) for run in self._shown]
        if layout != self._layout or not before or before != [run.path for run in self._shown[: len(before)]]:
            self._layout = layout
            self._write(rows, chosen)
        else:
            for index, (row, old) in enumerate(zip(rows, self._drawn, strict=False)):
                if row != old:
                    self.replace_option_prompt_at_index(index, layout.row(row[0], row[1]))
            self.add_options([layout.row(run, mark) for run, mark, _ in rows[len(before) :]])
        self._drawn = rows
        paths = [run.path.absolute() for run in self._shown]
        if self._wanted in paths:
            self.highlighted, self._wanted = paths.index(self._wanted), None
        self._heading.show(layout, self.order)

    def _write(self, rows: Sequence[tuple[Summary, Mark, str]], chosen: Summary | None) -> None:
        self.clear_options()
        self.add_options([self._layout.row(run, mark) for run, mark, _ in rows])
        paths = [run.path for run, _, _ in rows]
        if paths:
            self.highlighted = paths.index(chosen.path) if chosen and chosen.path in paths else 0
        else:
            nothing = "No run has these words in its name, state or model." if self._runs else self._nothing
            self.add_option(Option(Content.styled(nothing, "$muted"), disabled=True))
