"""The form with the settings of a draft, edited in place."""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.await_complete import AwaitComplete
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.events import Click, MouseScrollDown, MouseScrollUp
from textual.message import Message
from textual.scrollbar import ScrollDown, ScrollTo, ScrollUp
from textual.widgets import Input, Label, Static

from rptrain.tui.new_run.edits import Refused
from rptrain.tui.new_run.places import DATA_SUFFIXES
from rptrain.tui.new_run.setting_text import epochs_note
from rptrain.tui.services.draft import Draft, method_of
from rptrain.tui.services.fields import GROUPS, Field, field_of, set_fields
from rptrain.tui.services.paths import PathSuggester
from rptrain.tui.widgets.choice import Choice
from rptrain.tui.widgets.entry import Entry
from rptrain.utils.text import as_message

TITLE = 2  # lines of a group's title
LAST_OF_SET = set_fields(0)[-1]


class Row(Vertical):
    """A setting with its label, its value and, below it, the reason why that is invalid, or else a note.

    `known`: the value that it was given, or that was last read.
    """

    def __init__(self, field: Field, shown: str) -> None:
        super().__init__(classes="setting")
        self.field = field
        self.editor: Choice | Entry | None = None  # before it is composed
        self.known = shown
        self._reason = self._note = ""
        self._below = Static("", classes="below", markup=False)

    def compose(self) -> ComposeResult:
        field = self.field
        with Horizontal(classes="row" if field.is_grouped else "row other"):
            yield Label(field.label, classes="label")
            if field.options:
                self.editor = Choice(field.options, self.known, id=field.id)
                yield self.editor
            else:
                models = field.key == "model.path"
                suggester = PathSuggester(() if models else DATA_SUFFIXES, models) if field.is_listed else None
                self.editor = Entry(
                    self.known, placeholder=field.placeholder, suggester=suggester, id=field.id, compact=True
                )
                yield self.editor
                if field.is_listed:
                    yield Label("▾", classes="more")
                if field.name == "data.train.path":
                    yield Label("✕", classes="remove")
        yield self._below

    def write(self, shown: str) -> None:
        """Shows a value; leaves spaces around it as they were typed."""
        if self.editor is not None and shown not in (self.editor.value, self.editor.value.strip()):
            self.put(shown)
        self.known = shown if self.editor is None else self.editor.value

    def put(self, shown: str) -> None:
        if isinstance(self.editor, Entry):
            self.editor.put(shown)
        elif self.editor is not None:
            self.editor.value = shown

    def select(self) -> None:
        """Selects the value, so that typing replaces it."""
        if isinstance(self.editor, Entry):
            self.editor.select_all()

    def mark(self, reason: str) -> None:
        """Shows why the value is invalid; an empty reason removes the mark."""
        self._reason = f"✗ {reason}" if reason else ""
        self.set_class(bool(reason), "-invalid")
        self._show_below()

    def note(self, text: str, *, inactive: bool = False) -> None:
        """Shows a note; an empty text removes it. `inactive`: another setting decides in place of this one."""
        self._note = text
        self.set_class(inactive, "-inactive")
        self._show_below()

    def _show_below(self) -> None:
        text = self._reason or self._note
        self._below.update(as_message(text))
        self._below.display = bool(text)


class Sets(Horizontal):
    """The line below the data sets: the keys that add and remove one."""

    def compose(self) -> ComposeResult:
        yield Label("+ data set ^n", classes="add")
        yield Label("✕ remove ^l", classes="remove")


class Form(VerticalScroll, can_focus=False, inherit_bindings=False):
    """All settings. A message reports an edit, and `edited` returns what changed, because messages arrive late.

    Keys move the focus, and the form scrolls to it. If the mouse scrolls the form, the focus stays in view.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down", "move(1)", "next", show=False),
        Binding("up", "move(-1)", "before", show=False),
        Binding("pagedown", "page(1)", "next page", show=False),
        Binding("pageup", "page(-1)", "page before", show=False),
        Binding("ctrl+home", "ends(0)", "first", show=False),
        Binding("ctrl+end", "ends(-1)", "last", show=False),
        Binding("ctrl+l", "remove", "remove data set", show=False),
    ]

    class Edited(Message):
        """A setting was edited."""

    @dataclass
    class Listed(Message):
        """The list of choices was requested."""

        field: Field

    class Added(Message):
        """Another data set was requested."""

    @dataclass
    class Removed(Message):
        """A data set is to be removed: its number, or None if the focus is on none."""

        train_set: int | None

    def __init__(self, draft: Draft) -> None:
        super().__init__(id="form")
        self._draft = draft
        self._by_mouse = False  # the mouse scrolls it, not a focus that moves

    def compose(self) -> ComposeResult:
        for title, fields in GROUPS:
            yield Label(title, classes="group")
            for field in fields:
                yield Row(field, _shown(field, self._draft))
                if field == LAST_OF_SET:
                    for number in range(1, self._draft.train_sets):
                        yield from self._rows_of_set(number)
                    yield Sets(classes="row")
        yield Label("All other settings F5", classes="group")
        for field in self._others():
            yield Row(field, _shown(field, self._draft))

    def on_mount(self) -> None:
        self._show_rows()

    def edited(self) -> list[tuple[Field, str]]:
        """The edits since the last call."""
        found: list[tuple[Field, str]] = []
        for row in self.query(Row):
            if row.editor is not None and row.editor.value != row.known:
                row.known = row.editor.value
                found.append((row.field, row.known))
        return found

    def show(self, draft: Draft, refused: Mapping[str, Refused]) -> AwaitComplete:
        """Updates the rows from the draft, and those with refused values from these. Read `edited` before.

        New rows can be used once the result was awaited.
        """
        self._draft = draft
        there = {row.field for row in self.query(Row)}
        for row in self.query(Row):
            if (row.field.train_set or 0) >= draft.train_sets:
                row.remove()
            elif value := refused.get(row.field.key):
                row.write(value.shown)
            else:
                row.write(_shown(row.field, draft))
        numbers = [number for number in range(1, draft.train_sets) if set_fields(number)[0] not in there]
        rows = [row for number in numbers for row in self._rows_of_set(number)]
        others = [Row(field, _shown(field, draft)) for field in self._others() if field not in there]
        mounted = AwaitComplete(self.mount_all(rows, before=self.query_one(Sets)), self.mount_all(others))
        self._show_rows(refused)
        return mounted

    def enter(self, field: Field, value: str) -> None:
        """Sets a value as if the user had typed it."""
        for row in self.query(Row):
            if row.field == field:
                row.put(value)

    def mark(self, reasons: Mapping[str, str]) -> None:
        """Marks the settings with an invalid value: the reasons, by key."""
        there = {row.field for row in self.query(Row)}
        fields = [field for key in reasons if (field := field_of(key)) is not None and field not in there]
        self.mount_all(Row(field, _shown(field, self._draft)) for field in fields)
        for row in self.query(Row):
            row.mark(reasons.get(row.field.key, ""))
        self.call_after_refresh(self._show_focus)

    def note_epochs(self, length: Mapping[str, Any] | None) -> None:
        """Shows that max steps decides in place of the epochs, if it does. `length`: that of the plan, if known."""
        text = epochs_note(self._draft.shown("train.max_steps"), length)
        self.note("train.num_epochs", text, inactive=bool(text))

    def note(self, key: str, text: str, *, inactive: bool = False) -> None:
        """Shows a note below a setting; an empty text removes it. `inactive`: another setting decides in its place."""
        for row in self.query(Row):
            if row.field.key == key:
                row.note(text, inactive=inactive)
        self.call_after_refresh(self._show_focus)

    # ---- the focus

    def focus_first(self) -> None:
        """Moves the focus to the first setting, and shows the beginning of the form."""
        self._focus(self._displayed()[0])
        self.scroll_home(animate=False, force=True, immediate=True)

    @property
    def focused_field(self) -> Field | None:
        row = self._focused()
        return row.field if row else None

    def select_focused(self) -> None:
        """Selects the value with the focus, so that typing replaces it."""
        if (row := self._focused()) is not None:
            row.select()

    def action_move(self, by: int) -> None:
        rows, row = self._displayed(), self._focused()
        place = rows.index(row) + by if row in rows else 0
        if place == len(rows):
            self.screen.focus_next()
        elif place >= 0:
            self._focus(rows[place])

    def action_page(self, by: int) -> None:
        rows, row = self._displayed(), self._focused()
        place = (rows.index(row) if row in rows else 0) + by * max(1, self.size.height - 2)
        self._focus(rows[min(max(place, 0), len(rows) - 1)])

    def action_ends(self, place: int) -> None:
        self._focus(self._displayed()[place])

    def _displayed(self) -> list[Row]:
        return [row for row in self.query(Row) if row.display]

    def _focused(self) -> Row | None:
        focused = self.screen.focused
        return next((node for node in focused.ancestors if isinstance(node, Row)), None) if focused else None

    def _focus(self, row: Row) -> None:
        self._by_mouse = False
        if row.editor is not None:
            self.screen.set_focus(row.editor, scroll_visible=False)  # at once: keys may come in a burst
            row.select()  # also if it has the focus already

    def _show_focus(self) -> None:
        """Scrolls to the focused setting, and to the title of its group if there is space."""
        if (row := self._focused()) is not None:
            region, height = row.virtual_region, self.size.height
            last = min(self.scroll_y, max(region.y - TITLE, 0))
            self.scroll_to(y=max(last, region.bottom - height), animate=False, force=True, immediate=True)

    @on(MouseScrollDown)
    @on(MouseScrollUp)
    @on(ScrollTo)
    @on(ScrollDown)
    @on(ScrollUp)
    def _scrolled_by_mouse(self) -> None:
        self._by_mouse = True

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Moves the focus to the nearest setting in view if the mouse scrolls the focused one out of it. Rows that
        become higher or lower, and a focus that moves, scroll the form too.
        """
        super().watch_scroll_y(old_value, new_value)
        row, top = self._focused(), round(self.scroll_target_y)
        if row is None or not self._by_mouse:
            return
        bottom = top + self.size.height
        seen = [r for r in self._displayed() if top <= r.virtual_region.y and r.virtual_region.bottom <= bottom]
        if seen and row not in seen:
            self._focus(min(seen, key=lambda other: abs(other.virtual_region.y - row.virtual_region.y)))
            self._by_mouse = True

    def on_resize(self) -> None:
        self.call_after_refresh(self._show_focus)

    async def reveal(self, field: Field) -> None:
        """Moves the focus to a setting, and adds its row if needed."""
        if field not in {row.field for row in self.query(Row)}:
            await self.mount(Row(field, _shown(field, self._draft)))
        for row in self.query(Row):
            row.display = row.display or row.field == field
            if row.field == field:
                self._focus(row)

    def _others(self) -> Iterator[Field]:
        """The settings of the draft that are in no group."""
        fields = map(field_of, self._draft.set_keys())
        return (field for field in fields if field is not None and not field.is_grouped)

    def _rows_of_set(self, number: int) -> Iterator[Row]:
        return (Row(field, _shown(field, self._draft)) for field in set_fields(number))

    def _show_rows(self, refused: Container[str] = ()) -> None:
        """Shows the rows of the method, and of a single data set only what is set or refused."""
        draft, focused, before = self._draft, self._focused(), self._displayed()
        several, method = draft.train_sets > 1, method_of(draft)
        self.set_class(several, "-several")
        for row in self.query(Row):
            detail = row.field in set_fields(0)[1:] and not draft.shown(row.field.key) and row.field.key not in refused
            row.display = row.field.when in ("", method) and (several or not detail)
        if focused is not None and not focused.display:
            above = [row for row in before[: before.index(focused)] if row.display]
            self._focus(above[-1])

    @on(Input.Changed)
    @on(Choice.Changed)
    def _edited(self, event: Message) -> None:
        event.stop()
        self.post_message(self.Edited())

    def on_descendant_focus(self) -> None:
        if not self._by_mouse:
            self._show_focus()

    def on_key(self) -> None:
        self._by_mouse = False

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        row = self._focused()
        if row is not None and row.field.is_listed:
            self.post_message(self.Listed(row.field))
        else:
            self.action_move(1)

    def action_remove(self) -> None:
        row = self._focused()
        self.post_message(self.Removed(row.field.train_set if row else None))

    @on(Click, ".add")
    def _add(self) -> None:
        self.post_message(self.Added())

    @on(Click, ".more")
    @on(Click, ".remove")
    def _clicked(self, event: Click) -> None:
        assert event.widget is not None
        row = next((node for node in event.widget.ancestors if isinstance(node, Row)), None)
        if row is None:
            self.action_remove()
        elif event.widget.has_class("more"):
            self.post_message(self.Listed(row.field))
        else:
            self.post_message(self.Removed(row.field.train_set))


def _shown(field: Field, draft: Draft) -> str:
    if field.key == "train.method":
        return method_of(draft)
    return draft.shown(field.key) or (field.default if field.options else "")
