"""The Doctor screen: the checks of `rptrain doctor`."""

from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Static

from rptrain.doctor.checks import Check
from rptrain.tui.context import Context
from rptrain.tui.doctor import machine
from rptrain.tui.services.closing import is_left, until_closed
from rptrain.tui.services.helper import HelperError
from rptrain.tui.widgets.key_bar import KeyBar
from rptrain.tui.widgets.top_bar import TopBar
from rptrain.utils.errors import UserError
from rptrain.utils.text import printable

MARKS = {"ok": ("✓", "$success"), "warning": ("!", "$warning")}


class Doctor(Screen[None]):
    TITLE = "Doctor"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("r", "check", "check again"),
        Binding("j", "scroll(1)", show=False),
        Binding("k", "scroll(-1)", show=False),
    ]
    KEYS = (("r", "check again"), ("j k", "down and up"))

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._shared = context
        self._seen = False  # the result
        self._left = True  # focus another widget

    def compose(self) -> ComposeResult:
        yield TopBar("doctor")
        yield VerticalScroll(id="findings")
        yield KeyBar()

    def on_mount(self) -> None:
        self.query_one("#findings").focus()

    def on_screen_resume(self) -> None:
        if self._left and not self._seen:
            self.action_check()
        self._left = False

    def on_screen_suspend(self) -> None:
        if is_left(self):
            self._left = True
            self.workers.cancel_group(self, "check")

    @work(exclusive=True, group="check")
    @until_closed
    async def action_check(self) -> None:
        self._seen = False
        self._show(Static(Content.styled("looking at this machine: a few seconds …", "$muted")))
        try:
            findings = await self._shared.helper.call(machine.checks, self._shared.runs_folder)
        except (UserError, HelperError) as error:
            self._show(Static(Content.styled(str(error), "$error")))
            return
        self._seen = True
        self._show(*map(Line, findings))
        warnings = sum(finding.advice is not None for finding in findings)
        count = {0: "no issues", 1: "1 issue"}.get(warnings, f"{warnings} issues")
        self.query_one(TopBar).tell(count)

    def _show(self, *lines: Widget) -> None:
        body = self.query_one("#findings")
        body.remove_children()
        body.mount_all(lines)

    def action_scroll(self, lines: int) -> None:
        self.query_one("#findings").scroll_relative(y=lines, animate=False)


class Line(Horizontal):
    """A check and its advice."""

    def __init__(self, finding: Check) -> None:
        super().__init__()
        self._finding = finding

    def compose(self) -> ComposeResult:
        mark, style = MARKS[self._finding.status]
        subject = Content.assemble((f"{mark} ", f"bold {style}"), (self._finding.subject, "bold"))
        yield Static(subject, classes="subject")
        text = Content(printable(self._finding.text))
        if self._finding.advice is not None:
            text = Content.assemble(text, (f"\n→ {self._finding.advice}", "$warning"))
        yield Static(text, classes="text")
