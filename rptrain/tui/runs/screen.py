"""The Runs screen: past and current runs, and actions on them."""

import asyncio
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.css.query import NoMatches
from textual.screen import Screen
from textual.widgets import Label

from rptrain.runs.folder.listing import Summary, delete
from rptrain.runs.view.process_view import ENDED
from rptrain.tui.context import Context
from rptrain.tui.dialogs import terms
from rptrain.tui.dialogs.confirm import Confirm
from rptrain.tui.dialogs.dialog import ask
from rptrain.tui.messages import BeginWith, Export, OpenChat, OpenRun
from rptrain.tui.runs.comparison import Comparison
from rptrain.tui.runs.run_list import Heading, RunList
from rptrain.tui.runs.run_rows import Order
from rptrain.tui.runs.summaries import RunFolder, with_starting
from rptrain.tui.services.closing import until_closed
from rptrain.tui.widgets.entry import Entry
from rptrain.tui.widgets.key_bar import KeyBar
from rptrain.tui.widgets.plot import POINTS
from rptrain.tui.widgets.top_bar import TopBar
from rptrain.utils.errors import UserError, describe
from rptrain.utils.text import counted, one_line
from rptrain.utils.units import format_bytes

PAUSE = 2.0  # seconds between two scans of the folder


class Filter(Entry):
    """The words that the names, states or models of the shown runs have."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter,down", "screen.list", "to the list"),
        Binding("escape", "screen.unfilter", "show all"),
    ]


class Runs(Screen[None]):
    TITLE = "Runs"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "open", "open"),
        Binding("space", "mark", "compare"),
        Binding("m", "metric", "metric"),
        Binding("x", "axis", "axis"),
        Binding("t", "table", "table"),
        Binding("r", "resume", "resume"),
        Binding("e", "export", "export"),
        Binding("c", "chat", "chat"),
        Binding("slash", "filter", "filter", key_display="/"),
        Binding("n", "begin", "new"),
        Binding("d,delete", "delete", "delete"),
        Binding("s", "sort", "sort"),
        Binding("S", "reverse", "reverse the order", show=False),
        Binding("escape", "unfilter", "show all", show=False),
        Binding("j", "move(1)", show=False),
        Binding("k", "move(-1)", show=False),
    ]
    KEYS = (
        ("enter", "open the run"),
        ("space", "mark for comparison: curves, results, settings that differ"),
        ("m", "compare another metric: validation loss, tokens/s …"),
        ("x", "over steps, tokens or training time"),
        ("t", "the table of a comparison alone, or with the curves"),
        ("r", "resume a run that ended early"),
        ("e c", "export its result; talk to its model"),
        ("n", "a new run with its settings"),
        ("d", "delete it, after a question"),
        ("/", "only runs with words in name, state or model; esc: all"),
        ("s S", "sort by the next column; reverse the order"),
        ("j k", "down and up"),
        *terms.OF_RUNS,
    )

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._shared = context
        self._folder = RunFolder(context.runs_folder)
        self._offered = ""  # the state for which the footer has keys; empty without a run
        self._in_sight = asyncio.Event()  # no other screen covers it
        self._read: tuple[int, int] | None = None  # runs that are read, of all, while they are read first

    def compose(self) -> ComposeResult:
        heading = Heading()
        yield TopBar("runs", str(self._shared.runs_folder))
        with Horizontal(id="filter", classes="row"):
            yield Label("filter", classes="label")
            yield Filter(placeholder="words in name, state or model", compact=True)
        yield heading
        yield RunList(heading, f"No run in {one_line(str(self._shared.runs_folder))} yet: F2 begins one.")
        yield Comparison()
        yield KeyBar()

    def on_mount(self) -> None:
        self.query_one(Comparison).display = False
        self.query_one("#filter").display = False
        self.query_one(RunList).focus()
        self._follow()

    def on_screen_resume(self) -> None:
        self._in_sight.set()

    def on_screen_suspend(self) -> None:
        self._in_sight.clear()

    def choose(self, path: Path) -> None:
        """Highlights a run, one that was just started too."""
        self.query_one(RunList).choose(path)

    # ---- the list

    @work(exclusive=True, group="follow")
    @until_closed
    async def _follow(self) -> None:
        await self._in_sight.wait()
        with ExitStack() as pending:  # input, until there are runs that it can be about
            pending.enter_context(self._shared.readings.reading())

            def fill(found: list[Summary], total: int) -> None:
                pending.close()
                self._read = len(found), total
                with suppress(NoMatches):  # the screen was closed
                    if len(found) >= 2 * self.query_one(RunList).counts[1]:  # in all, each row is drawn about twice
                        self._show(found)
                    else:
                        self._show_count()

            found = await self._folder.read(fill)
            self._read = None
            self._show(found)
        while True:
            await asyncio.sleep(PAUSE)
            await self._in_sight.wait()
            self._show(await self._folder.read())

    def _show(self, found: list[Summary]) -> None:
        shared = self._shared
        self.query_one(RunList).show(with_starting(found, shared.runs_folder, shared.launched.values()))
        self._show_count()
        self._compare()
        self._offer()

    def _show_count(self) -> None:
        """Says how many runs are shown, or how many are read."""
        shown, total = self.query_one(RunList).counts
        text = str(self._shared.runs_folder)
        if self._read is not None:
            text = f"reading runs: {self._read[0]:,} of {self._read[1]:,}"
        elif self.query_one(Filter).value:
            text = f"{shown:,} of {counted(total, 'run')}"
        self.query_one(TopBar).tell(text)

    @property
    def _chosen(self) -> Summary | None:
        return self.query_one(RunList).chosen

    def action_sort(self) -> None:
        self.query_one(RunList).sort_by_next()

    def action_reverse(self) -> None:
        runs = self.query_one(RunList)
        runs.sort(runs.order.reversed)

    @on(Heading.Chosen)
    def _sort_by(self, event: Heading.Chosen) -> None:
        runs = self.query_one(RunList)
        runs.sort(runs.order.reversed if event.column == runs.order.column else Order.by(event.column))

    def action_filter(self) -> None:
        self.query_one("#filter").display = True
        self.set_focus(self.query_one(Filter))  # at once: the next keys are for it

    @on(Filter.Changed)
    def _narrow(self, event: Filter.Changed) -> None:
        self.query_one(RunList).narrow(event.value)
        self._show_count()
        self._offer()

    def action_list(self) -> None:
        self.query_one("#filter").display = bool(self.query_one(Filter).value)
        self.query_one(RunList).focus()

    def action_unfilter(self) -> None:
        self.query_one(Filter).value = ""
        self.query_one("#filter").display = False
        self.query_one(RunList).focus()

    # ---- comparison

    def action_mark(self) -> None:
        self.query_one(RunList).mark()
        self._compare()

    @work(exclusive=True, group="compare")
    @until_closed
    async def _compare(self) -> None:
        runs, shown = self.query_one(RunList), self.query_one(Comparison)
        if shown.display != bool(runs.marked):
            shown.display = bool(runs.marked)
            self.refresh_bindings()
        if marked := tuple(runs.marked):
            found = await self._folder.compare(marked, shown.metric, shown.axis, POINTS)
            shown.show(found, [runs.mark_of(path) for path in marked])

    def action_metric(self) -> None:
        self.query_one(Comparison).turn_metric()
        self._compare()

    def action_axis(self) -> None:
        self.query_one(Comparison).turn_axis()
        self._compare()

    def action_table(self) -> None:
        self.query_one(Comparison).turn_table()

    # ---- actions

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        run = self._chosen if self.is_mounted else None
        if action in ("open", "move"):
            return run is not None
        if action in ("mark", "export", "chat", "begin"):
            return run is not None and run.state != "starting"
        if action in ("metric", "axis", "table"):
            return self.is_mounted and self.query_one(Comparison).display
        if action == "resume":
            return run is not None and run.state in ("stopped", "failed", "dead")
        if action == "delete":
            return run is not None and (run.state in ENDED or run.state == "new")
        return True

    @on(RunList.OptionHighlighted)
    def _offer(self) -> None:
        """Offers the keys of the highlighted run. Only if they change, because that rebuilds the footer."""
        run = self._chosen
        before, self._offered = self._offered, "" if run is None else run.state
        if before != self._offered:
            self.refresh_bindings()

    def action_move(self, by: int) -> None:
        options = self.query_one(RunList)
        if by > 0:
            options.action_cursor_down()
        else:
            options.action_cursor_up()

    def action_open(self) -> None:
        if (run := self._chosen) is not None:
            self.post_message(OpenRun(run.path))

    @on(RunList.OptionSelected)
    def _selected(self) -> None:
        self.action_open()

    @work
    @until_closed
    async def action_resume(self) -> None:
        if (run := self._chosen) is None:
            return
        try:
            launched = await self._shared.resume(run.path)
        except UserError as error:
            self.notify(str(error), severity="error")
            return
        self.post_message(OpenRun(run.path, launched))

    def action_chat(self) -> None:
        if (run := self._chosen) is not None:
            self.post_message(OpenChat(run.path))

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
        self._show(await self._folder.read())

    def action_export(self) -> None:
        if (run := self._chosen) is not None:
            self.post_message(Export(run.path))
