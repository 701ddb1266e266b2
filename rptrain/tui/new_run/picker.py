"""A filterable list of models or data sets; the typed text may also be a path."""

import asyncio
import os
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

from rptrain.tui.dialogs.dialog import Dialog
from rptrain.tui.services.helper import HelperError
from rptrain.tui.services.paths import PathSuggester, is_folder_without
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
    offered: bool = True  # highlighted if it is the first one; otherwise it has to be moved to, or typed
    words: tuple[str, ...] = ()  # other names by which it is found


@dataclass(frozen=True)
class Question:
    """`find` returns the items; `show`, if given, returns a preview of the highlighted one, or of a typed path.

    `first`: items that are known already, about which `find` may say more; `paths`: whether the typed text may be a
    path, of a file with one of `suffixes` if there are any, or of a model's folder if `models`.
    """

    title: str
    find: Callable[[], Awaitable[Sequence[Item]]]
    show: Callable[[str], Awaitable[Content]] | None = None
    suffixes: tuple[str, ...] = ()
    paths: bool = True
    models: bool = False
    first: tuple[Item, ...] = ()


class Typed(Entry, inherit_bindings=False):
    """The filter text."""

    BINDINGS: ClassVar[list[BindingType]] = without_enter(Entry)


class Picker(Dialog[str | None]):
    """Asks a question. Keys move in the list wherever the focus is, except in a focused sample that can scroll."""

    TITLE = "List"
    KEYS = (
        ("any text", "narrow the list to what has these words; or a path, if the question may be answered with one"),
        ("right", "complete the path"),
        ("up down", "between the lines"),
        ("enter", "choose the line, or the path"),
        ("esc", "close without a choice"),
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "cancel", "cancel"),
        Binding("f1", "app.help", show=False),  # keys of the app do not reach a dialog
        Binding("down", "move(1)", show=False),
        Binding("up", "move(-1)", show=False),
        Binding("pagedown", "move(8)", show=False),
        Binding("pageup", "move(-8)", show=False),
        Binding("enter", "take", "choose"),
    ]

    def __init__(self, question: Question) -> None:
        super().__init__()
        self._question = question
        self._items: Sequence[Item] | None = question.first or None  # None: being searched, or not found
        self._narrowed: tuple[str, int] | None = None  # the filter, and the number of matching items
        self._searches = self._takes = False  # `_takes`: what the search finds is taken, since enter was pressed

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog wide"):
            yield Static(self._question.title, classes="question", markup=False)
            yield Typed(compact=True)
            options = OptionList(compact=True)
            options.can_focus = False  # it still receives the keys
            yield options
            yield Static("searching …", id="searching")
            with VerticalScroll(id="shown"):
                yield Static("", id="sample")

    def on_mount(self) -> None:
        self.pose(self._question)

    def pose(self, question: Question) -> None:
        """Asks another question in place of the one before."""
        self._question, self._items, self._narrowed = question, question.first or None, None
        self.query_one(".question", Static).update(one_line(question.title))
        typed = self.query_one(Typed)
        typed.placeholder = "type to narrow the list" + (", or a path (right completes it)" if question.paths else "")
        typed.suggester = PathSuggester(question.suffixes, question.models) if question.paths else None
        with typed.prevent(Input.Changed):
            typed.value = ""
        self.query_one("#shown").display = question.show is not None
        options = self.query_one(OptionList)
        options.clear_options()
        self._narrow()
        self._set_searching(True)
        self._find()

    def _set_searching(self, searching: bool) -> None:
        self._searches, self._takes = searching, False
        self.query_one("#searching").display = searching

    @work(exclusive=True, group="find")
    async def _find(self) -> None:
        options = self.query_one(OptionList)
        try:
            found = await self._question.find()
            chosen = self._highlighted
            self._items = [*{item.value: item for item in (*self._question.first, *found)}.values()]
        except (UserError, HelperError) as error:
            options.add_option(Option(Content.styled(str(error), "$error"), disabled=True))
        else:
            self._narrowed = None
            self._narrow()
            if chosen is not None:
                listed = [option.id and self._item(option).value for option in options.options]
                options.highlighted = listed.index(chosen.value) if chosen.value in listed else options.highlighted
        takes = self._takes
        self._set_searching(False)
        if takes:
            self.action_take()

    def on_input_changed(self) -> None:
        self._takes = False
        if not self._narrow() and self._question.paths and (typed := self.query_one(Typed).value.strip()):
            self._preview(typed, typed=True)

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
            if all(word in f"{item.value} {item.about} {' '.join(item.words)}".lower() for word in words)
        ]
        found.sort(key=lambda pair: "_".join(words) not in pair[1].words)  # a name itself comes first
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
                    (_other_name(item, words), "$accent"),
                ),
                id=str(number),
            )
            for number, item in found
        )
        if more > 0:
            options.add_option(Option(Content.styled(f"and {more:,} more: type to find them", "$muted"), disabled=True))
        options.highlighted = 0 if found and (words or found[0][1].offered) else None
        return len(found)

    @property
    def _highlighted(self) -> Item | None:
        options = self.query_one(OptionList)
        return None if options.highlighted is None else self._item(options.highlighted_option)

    def _item(self, option: Option | None) -> Item:
        assert self._items is not None and option is not None and option.id is not None
        return self._items[int(option.id)]

    def _take(self, item: Item) -> None:
        """Answers with an item; says why if it cannot be used."""
        if item.dim:
            self.notify(f"{item.value}: {item.about.strip()}", severity="warning")
        else:
            self.taken(item.value)

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        if self._question.show is not None and event.option.id is not None:
            self._preview(self._item(event.option).value)

    @work(exclusive=True, group="preview")
    async def _preview(self, value: str, typed: bool = False) -> None:
        """Shows an item, or the path that was typed unless it is only the beginning of one."""
        question, sample = self._question, self.query_one("#sample", Static)
        if question.show is None:
            return
        sample.update(Content.styled("reading …", "$muted"))
        await asyncio.sleep(PAUSE)
        if typed and await asyncio.to_thread(is_folder_without, value, question.suffixes):
            shown = Content.styled(
                "a folder: continue the path (right completes it), or press enter for all of it", "$muted"
            )
        else:
            shown = await question.show(value)
        if question is self._question:
            sample.update(shown)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        if event.option.id is not None:
            self._take(self._item(event.option))

    def action_move(self, by: int) -> None:
        count = self._narrow()
        options = self.query_one(OptionList)
        self._takes = False
        if count:
            before = -1 if options.highlighted is None else options.highlighted
            options.highlighted = min(max(before + by, 0), count - 1)

    def action_take(self) -> None:
        count = self._narrow()
        typed = self.query_one(Input).value.strip()
        if count and (item := self._highlighted) is not None:
            self._take(item)
        elif typed and self._searches and not os.path.exists(os.path.expanduser(typed)):
            self._takes = True  # it may be the name of something that the search finds
        elif typed and self._question.paths:
            self.taken(typed)

    def taken(self, value: str) -> None:
        """A value was chosen."""
        self.answer(value)

    def action_cancel(self) -> None:
        self.answer(None)


def _other_name(item: Item, words: Sequence[str]) -> str:
    """The other name of an item that was typed, to say why it is found."""
    name = next((name for name in item.words if words and all(word in name for word in words)), "")
    return f"  (also called {name})" if name else ""
