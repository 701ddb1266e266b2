"""A filterable list of models or data sets; the typed text may also be a path."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from rptrain.tui.screens.dialog import Dialog
from rptrain.tui.services.helper import HelperError
from rptrain.tui.services.paths import PathSuggester
from rptrain.tui.widgets.bindings import without_enter
from rptrain.tui.widgets.entry import Entry
from rptrain.utils.errors import UserError
from rptrain.utils.text import one_line

MAX_ITEMS = 500  # maximum items listed
PAUSE = 0.3  # seconds before the preview of a highlighted item is made


@dataclass(frozen=True)
class Item:
    value: str
    about: str
    dim: bool = False  # it exists, but cannot be used


class Typed(Entry, inherit_bindings=False):
    """The filter text."""

    BINDINGS: ClassVar[list[BindingType]] = without_enter(Entry)


class Picker(Dialog[str | None]):
    """`find` returns the items; `show`, if given, returns a preview of the highlighted one.

    Keys move in the list wherever the focus is, except in a focused sample that can scroll.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "cancel", "cancel"),
        Binding("down", "move(1)", show=False),
        Binding("up", "move(-1)", show=False),
        Binding("pagedown", "move(8)", show=False),
        Binding("pageup", "move(-8)", show=False),
        Binding("enter", "take", "choose"),
    ]

    def __init__(
        self,
        title: str,
        find: Callable[[], Awaitable[Sequence[Item]]],
        show: Callable[[str], Awaitable[Content]] | None = None,
        suffixes: tuple[str, ...] = (),
        *,
        paths: bool = True,
    ) -> None:
        super().__init__()
        self._title, self._find, self._show, self._suffixes, self._paths = title, find, show, suffixes, paths
        self._items: Sequence[Item] | None = None  # None: being searched, or not found
        self._narrowed: tuple[str, int] | None = None  # the filter, and the number of matching items

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog wide"):
            yield Static(self._title, classes="question", markup=False)
            yield Typed(
                placeholder="type to narrow the list" + (", or a path (right completes it)" if self._paths else ""),
                suggester=PathSuggester(self._suffixes) if self._paths else None,
                compact=True,
            )
            options = OptionList(compact=True)
            options.can_focus = False  # it still receives the keys
            yield options
            if self._show is not None:
                with VerticalScroll(id="shown"):
                    yield Static("", id="sample")

    def on_mount(self) -> None:
        self.query_one(OptionList).loading = True
        self._look()

    @work(exclusive=True, group="find")
    async def _look(self) -> None:
        options = self.query_one(OptionList)
        try:
            self._items = await self._find()
        except (UserError, HelperError) as error:
            options.add_option(Option(Content.styled(str(error), "$error"), disabled=True))
        else:
            self._narrow()
        options.loading = False

    def on_input_changed(self) -> None:
        self._narrow()

    def _narrow(self) -> int:
        """Filters the list by the typed text; returns the number of listed items."""
        text = self.query_one(Input).value
        if self._items is None:
            return 0
        if self._narrowed is not None and self._narrowed[0] == text:
            return self._narrowed[1]
        options = self.query_one(OptionList)
        words = text.lower().split()
        found = [
            (number, item)
            for number, item in enumerate(self._items)
            if all(word in f"{item.value} {item.about}".lower() for word in words)
        ]
        more, found = len(found) - MAX_ITEMS, found[:MAX_ITEMS]
        self._narrowed = text, len(found)
        width = min(max((len(item.value) for _, item in found), default=0), 60) + 2
        options.clear_options()
        options.add_options(
            Option(
                Content.assemble(
                    (one_line(item.value), "$muted" if item.dim else ""),
                    " " * max(1, width - len(item.value)),
                    (one_line(item.about), "$muted"),
                ),
                id=str(number),
            )
            for number, item in found
        )
        if more > 0:
            options.add_option(Option(Content.styled(f"and {more:,} more: type to find them", "$muted"), disabled=True))
        options.highlighted = 0 if found else None
        return len(found)

    def _value(self, option: Option) -> str:
        assert self._items is not None and option.id is not None
        return self._items[int(option.id)].value

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        if self._show is not None and event.option.id is not None:
            self._preview(self._value(event.option))

    @work(exclusive=True, group="preview")
    async def _preview(self, value: str) -> None:
        assert self._show is not None
        sample = self.query_one("#sample", Static)
        sample.update(Content.styled("reading …", "$muted"))
        await asyncio.sleep(PAUSE)
        sample.update(await self._show(value))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        if event.option.id is not None:
            self.answer(self._value(event.option))

    def action_move(self, by: int) -> None:
        count = self._narrow()
        options = self.query_one(OptionList)
        if count:
            options.highlighted = min(max((options.highlighted or 0) + by, 0), count - 1)

    def action_take(self) -> None:
        count = self._narrow()
        options = self.query_one(OptionList)
        typed = self.query_one(Input).value.strip()
        if count and options.highlighted is not None:
            self.answer(self._value(options.get_option_at_index(options.highlighted)))
        elif typed and self._paths:
            self.answer(typed)

    def action_cancel(self) -> None:
        self.answer(None)
