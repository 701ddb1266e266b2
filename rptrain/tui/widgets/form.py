"""The form with the settings of a draft, edited in place."""

from collections.abc import Container, Iterator
from dataclasses import dataclass

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, VerticalScroll
from textual.message import Message
from textual.widgets import Input, Label

from rptrain.tui.services.draft import Draft
from rptrain.tui.services.fields import ALL, FIELDS, GROUPS, Field
from rptrain.tui.services.paths import PathSuggester
from rptrain.tui.services.places import DATA_SUFFIXES
from rptrain.tui.widgets.choice import Choice
from rptrain.tui.widgets.entry import Entry

LISTED = ("model.path", "data.train.0.path")  # enter shows the choices


class Row(Horizontal):
    """A setting with its label and value. `told`: the value that it was given, or that was last read."""

    def __init__(self, field: Field, shown: str) -> None:
        super().__init__(classes="row" if field in FIELDS else "row other")
        self.field = field
        self.editor: Choice | Entry | None = None  # before it is composed
        self.told = shown

    def compose(self) -> ComposeResult:
        field = self.field
        yield Label(field.label, classes="label")
        if field.options:
            self.editor = Choice(field.options, self.told, id=field.id)
            yield self.editor
        else:
            suffixes = DATA_SUFFIXES if field.key == "data.train.0.path" else ()
            suggester = PathSuggester(suffixes) if field.key in LISTED else None
            self.editor = Entry(
                self.told, placeholder=field.placeholder, suggester=suggester, id=field.id, compact=True
            )
            yield self.editor
            if field.key in LISTED:
                yield Label("▾", classes="more")

    def write(self, shown: str) -> None:
        self.told = shown
        if self.editor is not None and self.editor.value != shown:
            self.editor.value = shown


class Form(VerticalScroll, can_focus=False):
    """All settings. A message reports an edit, and `edited` returns what changed, because messages arrive late."""

    class Edited(Message):
        """A setting was edited."""

    @dataclass
    class Entered(Message):
        """A setting has the focus."""

        field: Field

    @dataclass
    class Listed(Message):
        """The list of choices was requested."""

        field: Field

    def __init__(self, draft: Draft) -> None:
        super().__init__(id="form")
        self._draft = draft

    def compose(self) -> ComposeResult:
        for title, fields in GROUPS:
            yield Label(title, classes="group")
            for field in fields:
                yield Row(field, _shown(field, self._draft))
        yield Label("All other settings F5", classes="group")
        for field in self._others():
            yield Row(field, _shown(field, self._draft))

    def on_mount(self) -> None:
        self._show_method()

    def edited(self) -> list[tuple[Field, str]]:
        """The edits since the last call."""
        found: list[tuple[Field, str]] = []
        for row in self.query(Row):
            if row.editor is not None and row.editor.value != row.told:
                row.told = row.editor.value
                found.append((row.field, row.told))
        return found

    def show(self, draft: Draft, besides: Container[str] = ()) -> None:
        """Updates the rows from the draft, except those of some keys. Read `edited` before."""
        self._draft = draft
        there = {row.field for row in self.query(Row)}
        self.mount_all(Row(field, _shown(field, draft)) for field in self._others() if field not in there)
        for row in self.query(Row):
            if row.field.key not in besides:
                row.write(_shown(row.field, draft))
        self._show_method()

    def enter(self, field: Field, value: str) -> None:
        """Sets a value as if the user had typed it."""
        for row in self.query(Row):
            if row.field == field and row.editor is not None:
                row.editor.value = value

    def focus_first(self) -> None:
        self.query_one(f"#{FIELDS[0].id}").focus()

    async def reveal(self, field: Field) -> None:
        """Moves the focus to a setting, and adds its row if needed."""
        if field not in {row.field for row in self.query(Row)}:
            await self.mount(Row(field, _shown(field, self._draft)))
        for row in self.query(Row):
            row.display = row.display or row.field == field
        self.query_one(f"#{field.id}").focus()

    def _others(self) -> Iterator[Field]:
        """The settings of the draft that are in no group."""
        return (ALL[key] for key in self._draft.set_keys() if key in ALL and ALL[key] not in FIELDS)

    def _show_method(self) -> None:
        method = method_of(self._draft)
        for row in self.query(Row):
            row.display = row.field.when in ("", method)

    @on(Input.Changed)
    @on(Choice.Changed)
    def _edited(self, event: Message) -> None:
        event.stop()
        self.post_message(self.Edited())

    def on_descendant_focus(self) -> None:
        row = self.screen.focused.parent if self.screen.focused else None
        if isinstance(row, Row):
            self.post_message(self.Entered(row.field))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        row = event.input.parent
        assert isinstance(row, Row)
        if row.field.key in LISTED:
            self.post_message(self.Listed(row.field))
        else:
            self.screen.focus_next()

    def on_click(self, event: object) -> None:
        widget = getattr(event, "widget", None)
        if isinstance(widget, Label) and isinstance(widget.parent, Row) and widget.parent.field.key in LISTED:
            self.post_message(self.Listed(widget.parent.field))


def _shown(field: Field, draft: Draft) -> str:
    if field.key == "train.method":
        return method_of(draft)
    return draft.shown(field.key) or (field.default if field.options else "")


def method_of(draft: Draft) -> str:
    """The method of a config: adapters if it has a [lora] table."""
    return draft.shown("train.method") or ("lora" if draft.has("lora") else "full")
