"""The Runs screen: past and current runs, and actions on them."""

import asyncio
from pathlib import Path
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.content import Content
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Footer, OptionList, Static
from textual.widgets.option_list import Option

from rptrain.runs.listing import Summary, delete
from rptrain.runs.view import ENDED
from rptrain.tui.context import Context
from rptrain.tui.messages import BeginWith, OpenRun
from rptrain.tui.screens.closing import until_closed
from rptrain.tui.screens.confirm import Confirm
from rptrain.tui.screens.dialog import ask
from rptrain.tui.screens.exporting import export_run
from rptrain.tui.services.summaries import RunFolder
from rptrain.tui.widgets.bindings import without_enter
from rptrain.tui.widgets.plot import POINTS, Curve, Plot
from rptrain.tui.widgets.run_rows import heading, row
from rptrain.tui.widgets.top_bar import TopBar
from rptrain.utils.errors import UserError, describe
from rptrain.utils.text import one_line
from rptrain.utils.units import format_bytes

PAUSE = 2.0  # seconds between two scans of the folder
COLORS = ("$loss", "$backward", "$fused", "$success", "$forward", "$error")


class RunList(OptionList, inherit_bindings=False):
    BINDINGS: ClassVar[list[BindingType]] = without_enter(OptionList)

    class Resized(Message):
        """The list has a new size."""

    def on_resize(self) -> None:
        self.post_message(self.Resized())


class Runs(Screen[None]):
    TITLE = "Runs"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "open", "open"),
        Binding("space,c", "mark", "compare"),
        Binding("r", "resume", "resume"),
        Binding("e", "export", "export"),
        Binding("n", "begin", "new from it"),
        Binding("d,delete", "delete", "delete"),
        Binding("j", "move(1)", show=False),
        Binding("k", "move(-1)", show=False),
    ]
    KEYS = (
        ("enter", "open the run"),
        ("space c", "mark for comparison: the losses are drawn together"),
        ("r", "resume a run that ended early"),
        ("e", "export its last checkpoint"),
        ("n", "a new run with its settings"),
        ("d", "delete it, after a question"),
        ("j k", "down and up"),
    )

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._shared = context
        self._folder = RunFolder(context.runs_folder)
        self._found: list[Summary] = []
        self._marked: list[Path] = []
        self._offered = ""  # the state for which the footer has keys; empty without a run
        self._written_for = 0  # the width of the written list
        self._in_sight = asyncio.Event()  # no other screen covers it

    def compose(self) -> ComposeResult:
        yield TopBar("runs", str(self._shared.runs_folder))
        yield Static("", id="columns")
        yield RunList(id="list", compact=True)
        with Horizontal(id="compared"):
            yield Plot("loss")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#compared").display = False
        self.query_one(OptionList).focus()
        self._follow()

    def on_screen_resume(self) -> None:
        self._in_sight.set()

    def on_screen_suspend(self) -> None:
        self._in_sight.clear()

    # ---- the list

    @on(RunList.Resized)
    def _resized(self) -> None:
        if self._width == self._written_for:
            return
        self._written_for = self._width
        self.query_one("#columns", Static).update(heading(self._width))
        if self._found:
            self._write(self._chosen)

    @work(exclusive=True, group="follow")
    @until_closed
    async def _follow(self) -> None:
        while True:
            await self._in_sight.wait()
            self._show(await self._folder.look())
            await asyncio.sleep(PAUSE)

    def _show(self, found: list[Summary]) -> None:
        same = [run.path for run in found] == [run.path for run in self._found]
        chosen = self._chosen
        before, self._found = self._found, found
        self._marked = [path for path in self._marked if any(run.path == path for run in found)]
        if not same or not found:
            self._write(chosen)
        elif before != found or self._marked:
            self._rewrite()
        self._compare()
        self._offer()

    def _write(self, chosen: Summary | None) -> None:
        """Writes the whole list, and keeps the highlighted run."""
        options, width = self.query_one(OptionList), self._width
        options.clear_options()
        options.add_options([row(run, width, self._mark(run)) for run in self._found])
        if self._found:
            paths = [run.path for run in self._found]
            options.highlighted = paths.index(chosen.path) if chosen and chosen.path in paths else 0
        else:
            nothing = f"No run in {one_line(str(self._shared.runs_folder))} yet: F2 begins one."
            options.add_option(Option(Content.styled(nothing, "$muted"), disabled=True))

    def _rewrite(self) -> None:
        options, width = self.query_one(OptionList), self._width
        for index, run in enumerate(self._found):
            options.replace_option_prompt_at_index(index, row(run, width, self._mark(run)))

    @property
    def _width(self) -> int:
        return self.query_one(OptionList).scrollable_content_region.width

    def _mark(self, run: Summary) -> str:
        """The color of its curve; empty if it is not compared."""
        return COLORS[self._marked.index(run.path) % len(COLORS)] if run.path in self._marked else ""

    @property
    def _chosen(self) -> Summary | None:
        index = self.query_one(OptionList).highlighted
        return self._found[index] if index is not None and index < len(self._found) else None

    # ---- comparison

    def action_mark(self) -> None:
        run = self._chosen
        if run is None:
            return
        if run.path in self._marked:
            self._marked.remove(run.path)
        else:
            self._marked.append(run.path)
        self._rewrite()
        self._compare()

    @work(exclusive=True, group="compare")
    @until_closed
    async def _compare(self) -> None:
        self.query_one("#compared").display = bool(self._marked)
        if self._marked:
            found = await self._folder.losses(self._marked, POINTS)
            self.query_one(Plot).show(
                tuple(
                    Curve(curve.steps, curve.losses, COLORS[number % len(COLORS)], curve.name)
                    for number, curve in enumerate(found)
                )
            )

    # ---- actions

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        run = self._chosen if self.is_mounted else None
        if action in ("open", "mark", "export", "begin", "move"):
            return run is not None
        if action == "resume":
            return run is not None and run.state in ("stopped", "failed", "dead")
        if action == "delete":
            return run is not None and (run.state in ENDED or run.state == "new")
        return True

    @on(OptionList.OptionHighlighted)
    def _offer(self) -> None:
        """Offers the keys of the highlighted run. Only if they change, because that rebuilds the footer."""
        run = self._chosen
        before, self._offered = self._offered, "" if run is None else run.state
        if before != self._offered:
            self.refresh_bindings()

    def action_move(self, by: int) -> None:
        options = self.query_one(OptionList)
        if by > 0:
            options.action_cursor_down()
        else:
            options.action_cursor_up()

    def action_open(self) -> None:
        if (run := self._chosen) is not None:
            self.post_message(OpenRun(run.path))

    @on(OptionList.OptionSelected)
    def _selected(self) -> None:
        self.action_open()

    def action_resume(self) -> None:
        if (run := self._chosen) is None:
            return
        try:
            launched = self._shared.resume(run.path)
        except UserError as error:
            self.notify(str(error), severity="error")
            return
        self.post_message(OpenRun(run.path, launched))

    def action_begin(self) -> None:
        if (run := self._chosen) is not None:
            self.post_message(BeginWith(run.path))

    @work
    @until_closed
    async def action_delete(self) -> None:
        if (run := self._chosen) is None:
            return
        size = format_bytes(run.nbytes)
        detail = f"{size} in {run.path}: its checkpoints, its model and its records. This cannot be undone."
        if not await ask(self, Confirm(f"Delete {run.path.name}?", "Delete", detail)):
            return
        try:
            await asyncio.to_thread(delete, run.path)
        except UserError as error:
            self.notify(str(error), severity="error")
        except OSError as error:
            self.notify(f"not all of it could be deleted: {describe(error)}", severity="error")
        self._show(await self._folder.look())

    @work
    @until_closed
    async def action_export(self) -> None:
        if (run := self._chosen) is not None:
            await export_run(self, self._shared, run.path)
