"""The data browser: the rows of a config's data sets as the model reads them, their lengths, and rows with problems."""

from pathlib import Path
from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static

from rptrain.data.samples import Page
from rptrain.tui.context import Context
from rptrain.tui.data import pages
from rptrain.tui.data.page_text import about_text, rows_text
from rptrain.tui.services.closing import until_closed
from rptrain.tui.services.helper import HelperError
from rptrain.tui.widgets.key_bar import KeyBar
from rptrain.tui.widgets.top_bar import TopBar
from rptrain.utils.errors import UserError

ROWS = 5  # rows of a page


class DataBrowser(Screen[None]):
    """Pages are made in the helper process, which reads no more of the files than the first page needs."""

    TITLE = "Data"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "app.pop_screen", "back"),
        Binding("pagedown,n", "move(1)", "next", key_display="pgdn", priority=True),
        Binding("pageup,p", "move(-1)", "previous", key_display="pgup", priority=True),
        Binding("b", "problems", "problems only"),
        Binding("d", "set", "next data set"),
        Binding("home", "first", show=False, priority=True),
        Binding("j", "scroll(1)", show=False),
        Binding("k", "scroll(-1)", show=False),
    ]
    KEYS = (
        ("pgdn pgup", "next / previous page (also n and p)"),
        ("home", "first page"),
        ("b", "only rows that are bad, too long or without a trained token; again: all rows"),
        ("d", "next data set"),
        ("up down", "scroll within the page (also j and k)"),
        ("esc", "back to New run"),
    )

    def __init__(self, context: Context, path: Path, text: str) -> None:
        super().__init__()
        self._shared, self._path, self._text = context, path, text
        self._number = self._first = 0
        self._problems = False
        self._page: Page | None = None

    def compose(self) -> ComposeResult:
        yield TopBar("new", "data")
        yield Static("", id="data-about")
        with VerticalScroll(id="data-rows"):
            yield Static("", id="data-text")
        yield KeyBar()

    def on_mount(self) -> None:
        self.query_one("#data-rows").focus()
        self.query_one("#data-text", Static).update(Content.styled("reading the first rows …", "$muted"))
        self._read()

    def on_resize(self) -> None:
        self._show()

    @work(exclusive=True, group="preview")
    @until_closed
    async def _read(self) -> None:
        given = (self._path, self._text, self._number, self._first, ROWS, self._problems)
        try:
            self._page = await self._shared.helper.call(pages.page, *given)
        except (UserError, HelperError) as error:
            self._page = None
            self.query_one("#data-about", Static).update("")
            self.query_one("#data-text", Static).update(Content.styled(str(error), "$error"))
            return
        self._first = self._page.first
        self.query_one("#data-rows", VerticalScroll).scroll_home(animate=False)
        self._show()

    def _show(self) -> None:
        if (page := self._page) is None:
            return
        bins = max(3, self.size.height // 2 - 6)
        self.query_one("#data-about", Static).update(
            about_text(page, self._problems, max(20, self.size.width - 2), bins)
        )
        self.query_one("#data-text", Static).update(rows_text(page, self._problems))

    def action_move(self, pages: int) -> None:
        first = max(0, self._first + pages * ROWS)
        if self._page is not None and first < self._page.total and first != self._first:
            self._first = first
            self._read()

    def action_first(self) -> None:
        self._first = 0
        self._read()

    def action_problems(self) -> None:
        self._problems = not self._problems
        self.action_first()

    def action_set(self) -> None:
        sets = 1 if self._page is None else len(self._page.sets)
        if sets > 1:
            self._number = (self._number + 1) % sets
            self.action_first()

    def action_scroll(self, lines: int) -> None:
        self.query_one("#data-rows", VerticalScroll).scroll_relative(y=lines, animate=False)
