"""The settings of a draft as rows of a form, each edited in place."""

from collections.abc import Iterator
from dataclasses import dataclass

from textual.app import ComposeResult
from textual.containers import Horizontal, VerticalScroll
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Input, Label

from rptrain.tui.choice import Choice
from rptrain.tui.draft import Draft
from rptrain.tui.entry import Entry
from rptrain.tui.fields import ALL, FIELDS, GROUPS, Field
from rptrain.tui.paths import PathSuggester
from rptrain.tui.places import DATA_SUFFIXES

LISTED = ("model.path", "data.train.0.path")  # enter shows what there is


class Row(Horizontal):
    """A setting: its label and its value."""

    def __init__(self, field: Field, shown: str) -> None:
        super().__init__(classes="row" if field in FIELDS else "row other")
        self.field, self._shown = field, shown

    def compose(self) -> ComposeResult:
        field = self.field
        yield Label(field.label, classes="label")
        if field.options:
            yield Choice(field.options, self._shown or field.default, id=field.id)
        else:
            suffixes = DATA_SUFFIXES if field.key == "data.train.0.path" else ()
            suggester = PathSuggester(suffixes=suffixes) if field.key in LISTED else None
            yield Entry(self._shown, placeholder=field.placeholder, suggester=suggester, id=field.id, compact=True)
            if field.key in LISTED:
                yield Label("▾", classes="more")


class Form(VerticalScroll, can_focus=False):
    """All settings. Tells of changes by the person, not of those by `show`."""

    @dataclass
    class Edited(Message):
        field: Field
        shown: str

    @dataclass
    class Entered(Message):
        """A setting has the focus."""

        field: Field

    @dataclass
    class Listed(Message):
        """The list of what can be chosen is asked for."""

        field: Field

    def __init__(self, draft: Draft) -> None:
        super().__init__(id="form")
        self._draft = draft

    def compose(self) -> ComposeResult:
        for title, fields in GROUPS:
            yield Label(title, classes="group")
            for field in fields:
                yield Row(field, self._draft.shown(field.key))
        yield Label("All other settings F5", classes="group")
        for field in self._others():
            yield Row(field, self._draft.shown(field.key))

    def on_mount(self) -> None:
        self._show_method()

    def show(self, draft: Draft) -> None:
        """Makes the rows say what the draft says."""
        self._draft = draft
        there = {row.field for row in self.query(Row)}
        self.mount_all(Row(field, draft.shown(field.key)) for field in self._others() if field not in there)
        for row, editor in self._editors():
            shown = draft.shown(row.field.key)
            with self.prevent(Input.Changed, Choice.Changed):
                if isinstance(editor, Input):
                    if editor.value != shown:
                        editor.value = shown
                elif isinstance(editor, Choice):
                    editor.value = shown or row.field.default or method_of(draft)
        self._show_method()

    def focus_first(self) -> None:
        self.query_one(f"#{FIELDS[0].id}").focus()

    async def reveal(self, field: Field) -> None:
        """Goes to a setting, which gets its row if it has none."""
        if field not in {row.field for row in self.query(Row)}:
            await self.mount(Row(field, self._draft.shown(field.key)))
        self.query_one(f"#{field.id}").focus()

    def _others(self) -> Iterator[Field]:
        """Those that the draft sets and that are in no group."""
        return (ALL[key] for key in self._draft.set_keys() if key in ALL and ALL[key] not in FIELDS)

    def _editors(self) -> Iterator[tuple[Row, Widget]]:
        for row in self.query(Row):
            if row.children:  # it was composed
                yield row, row.query_one(f"#{row.field.id}")

    def _show_method(self) -> None:
        method = method_of(self._draft)
        for row, editor in self._editors():
            row.display = row.field.when in ("", method)
            if row.field.key == "train.method" and isinstance(editor, Choice):
                with self.prevent(Choice.Changed):
                    editor.value = method

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self._edited(event.input, event.value)

    def on_choice_changed(self, event: Choice.Changed) -> None:
        event.stop()
        self._edited(event.choice, event.value)

    def _edited(self, editor: Widget, shown: str) -> None:
        row = editor.parent
        assert isinstance(row, Row)
        if shown != self._draft.shown(row.field.key):
            self.post_message(self.Edited(row.field, shown))

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


def method_of(draft: Draft) -> str:
    """What the config means: adapters where it has a [lora] table."""
    return draft.shown("train.method") or ("lora" if draft.has("lora") else "full")
