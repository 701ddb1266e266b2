"""The Run screen: one run, current or past."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen

from rptrain.runs.folder import control
from rptrain.runs.folder.ending import Ending, ending_of
from rptrain.runs.records.tail import end_of
from rptrain.runs.view.process_view import ENDED, ProcessView
from rptrain.runs.view.run_view import RunView
from rptrain.tui.context import Context
from rptrain.tui.dialogs import terms
from rptrain.tui.dialogs.confirm import Confirm
from rptrain.tui.dialogs.dialog import ask
from rptrain.tui.messages import BeginWith, Correct, Export, OpenChat, RunEnded
from rptrain.tui.run.banner import Banner
from rptrain.tui.run.curves import Curves
from rptrain.tui.run.lanes import Lanes, Shown
from rptrain.tui.run.log_panel import LogPanel
from rptrain.tui.run.phase_lines import phase_in, shortened
from rptrain.tui.run.replay import Replay
from rptrain.tui.run.run_head import RunHead
from rptrain.tui.run.schedule_panel import ProcessSchedule, SchedulePanel
from rptrain.tui.run.start_errors import first_line, setting_of, start_error
from rptrain.tui.services.closing import until_closed
from rptrain.tui.services.fields import schema_name
from rptrain.tui.services.launch import Launched, log_of
from rptrain.tui.widgets.key_bar import KeyBar
from rptrain.tui.widgets.sizes import TALL
from rptrain.tui.widgets.top_bar import TopBar
from rptrain.utils.errors import UserError
from rptrain.utils.text import counted
from rptrain.utils.units import format_duration, format_moment

PAUSE = 0.4  # seconds between two updates
REMOTE_PAUSE = 2.0  # the same over ssh, where each update of eight devices sends about 13 KB
AT_FIRST = 4 << 20  # bytes of events up to which the whole run is read before it is shown, and not a sample first
OUTPUT = 8000  # bytes of the trainer's output to show, from its end
STRIP = 240  # records in a lane
SEEK = 0.05  # of a replay, by which a key moves it
AROUND = 27  # lines for everything except lanes; with more, and on half of a TALL screen, a lane has two
EMPTY = {
    "new": "nothing is recorded yet",
    "loading": "the weights are being loaded",
    "saving": "the state is being saved",
    "evaluating": "the model is being evaluated",
    "exporting": "the model is being written",
}
OF_FOLDER = ("export", "resume", "begin", "chat", "replay")  # actions that read the run's folder
OF_CHECKPOINT = ("export", "resume", "chat")  # actions that read a checkpoint
FAILED = "failed to start"
STARTING = {True: "the trainer is starting", False: "training failed to start: see below"}


class RunScreen(Screen[None]):
    """Follows the run in a folder, which may not exist yet if the run was started here."""

    TITLE = "Run"
    AUTO_FOCUS = "#log-body"

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space,p", "pause", "pause"),
        Binding("space,p", "go_on", "continue"),
        Binding("s", "save", "save"),
        Binding("x", "stop", "stop"),
        Binding("e", "export", "export"),
        Binding("r", "resume", "resume"),
        Binding("c", "chat", "chat"),
        Binding("v", "replay", "replay"),
        Binding("n", "begin", "new from it", show=False),
        Binding("t", "schedule", "schedule", show=False),
        Binding("l", "curve", "curves", show=False),
        Binding("m", "smooth", "smooth", show=False),
        Binding("slash", "search", "search", show=False),
        Binding("left", "sideways(-1)", show=False),
        Binding("right", "sideways(1)", show=False),
        Binding("shift+left", "sideways(-10)", show=False),
        Binding("shift+right", "sideways(10)", show=False),
        Binding("o", "part", "log", show=False),
        Binding("plus,equals_sign", "speed(2)", "faster", show=False),
        Binding("minus", "speed(0.5)", "slower", show=False),
        Binding("j,down", "scroll(1)", show=False),
        Binding("k,up", "scroll(-1)", show=False),
        Binding("g,home", "ends(False)", show=False),
        Binding("G,end", "ends(True)", show=False),
        Binding("escape", "back", "back"),
    ]
    KEYS = (
        ("space p", "pause and go on; in a replay too"),
        ("s", "save now"),
        ("x", "save and stop, after a question"),
        ("r", "resume a run that ended early"),
        ("n", "a new run with its settings"),
        ("e", "export the result"),
        ("c", "talk to the trained model"),
        ("v", "replay from the beginning, or leave the replay"),
        ("+ -", "the replay's speed"),
        ("t", "the schedule of a step: planned and as measured"),
        ("l", "one curve large, the next, all; some are over time"),
        ("m", "smooth the curves, or not"),
        ("left right", "on a large curve: values at a cursor; shift: faster"),
        ("left right", "in a replay: by 5 %; with shift by a minute"),
        ("/", "search the log"),
        ("o", "log, output of the trainer, samples"),
        ("j k g G", "up and down in it"),
        ("tab up down", "to devices and memory, and up and down in them"),
        *terms.OF_RUN,
    )

    def __init__(self, context: Context, path: Path, launched: Launched | None = None) -> None:
        super().__init__()
        self._shared, self.path = context, path
        context.opened.add(path)
        self._launched = launched or context.launched.get(path)  # until its run has events
        self._view: RunView | None = None
        self._replay: Replay | None = None
        self._pause = REMOTE_PAUSE if "SSH_CONNECTION" in os.environ else PAUSE
        self._replay_paused = False
        self._target: float | None = None  # the Unix time to which it is being moved
        self._scheduled = False  # whether it shows the schedule of a step
        self._ending: Ending | None = None  # of a run that failed or died

    def compose(self) -> ComposeResult:
        yield TopBar("run", str(self.path))
        yield RunHead()
        yield Banner()
        with VerticalScroll(id="devices"):
            yield Lanes()
        with VerticalScroll(id="schedule"):
            yield SchedulePanel()
        yield Curves()
        yield LogPanel(id="log")
        yield KeyBar()

    def on_mount(self) -> None:
        self._follow()

    def on_resize(self) -> None:
        self._show()

    # ---- following

    @work(exclusive=True, group="follow")
    @until_closed
    async def _follow(self) -> None:
        while not self._has_content():
            self._show_start()
            await asyncio.sleep(self._pause)
        view = self._view = await asyncio.to_thread(RunView, self.path, large=AT_FIRST)
        known = view.state, self._beginning
        await self._find_ending(view)
        self.query_one(LogPanel).turn_to("log" if view.log and known[1] != FAILED else "output")
        self.refresh_bindings()
        self._show()
        sampled, whole = not view.whole, None
        while True:
            await asyncio.sleep(self._pause)
            if sampled:  # it is on the screen before a thread reads all
                sampled, whole = False, asyncio.ensure_future(asyncio.to_thread(RunView, self.path))
            if whole is not None and whole.done():
                view, whole = whole.result(), None
                self._view = view
                await self._find_ending(view)
                self._show()
            if (replay := self._replay) is not None:
                if not self._replay_paused and not replay.done:
                    news = await asyncio.to_thread(replay.news, self._pause)
                    if self._replay is replay:  # not moved meanwhile
                        replay.add(news)
                        self._show()
                continue
            changed = view.add(await asyncio.to_thread(view.news))
            now = view.state, self._beginning
            if now != known:
                if view.ended and known[0] not in ENDED and self.path not in self._shared.launched:
                    self.post_message(RunEnded(self.path))
                self._turn_log(known, now)
                known = now
                await self._find_ending(view)
                self.refresh_bindings()
                self._show()
            elif changed or now[1] == "starts":
                self._show()

    async def _find_ending(self, view: RunView) -> None:
        begun = self._shared.launched.get(self.path)
        ours = begun is not None and view.process is not None and begun.process.pid == view.process.pid
        code = begun.process.poll() if begun is not None and ours else None
        self._ending = await asyncio.to_thread(ending_of, view, code)

    def _has_content(self) -> bool:
        """Whether the run's folder exists and has content."""
        if self._launched is not None and not self._launched.move_log():
            return False
        return os.path.isfile(self.path / "events.jsonl") or self._launched is None

    @property
    def _beginning(self) -> str:
        """The state of a trainer that was started here and has not written events yet; empty without one."""
        if self._launched is None or self._view is None:
            return ""
        if (self._view.taken_up or 0.0) >= self._launched.began:
            self._launched = None
            return ""
        return "starts" if self._launched.running else FAILED

    def _turn_log(self, before: tuple[str, str], now: tuple[str, str]) -> None:
        """Shows the trainer's output until its run has events or if it failed to start, else the log of events."""
        assert self._view is not None
        if now[1] == FAILED or (now[1] and not self._view.log):
            self.query_one(LogPanel).turn_to("output")
        elif before[1] or before[0] == "new":
            self.query_one(LogPanel).turn_to("log")

    def _show_start(self) -> None:
        """The output of a trainer that has no run yet."""
        launched = self._launched
        assert launched is not None
        said = launched.said()
        self.query_one(Lanes).empty = _starting(launched, said)
        self.query_one(LogPanel).turn_to("output")
        self.query_one(LogPanel).show_output(shortened(said))
        self._show_banner()

    # ---- showing

    @property
    def state(self) -> str:
        if self._replay is not None:
            return "replay"
        return "new" if self._view is None else self._view.state

    def _show(self) -> None:
        view = self._view if self._replay is None else self._replay.view
        if view is None or not self.children:  # its widgets do not exist yet or any more
            return
        state = self.state
        self.query_one(RunHead).show(view, "starting" if self._beginning == "starts" else state, self._note())
        self._show_banner()
        beginning, launched = self._beginning, self._launched
        if self._scheduled:
            self.query_one(SchedulePanel).parts = ProcessSchedule.all_of(view)
        else:
            self._show_devices(view, state)
            self.query_one(Curves).show(view, state)
        panel = self.query_one(LogPanel)
        panel.show_log(view.whole_log)
        panel.show_samples(view.results.samples)
        panel.show_output(shortened(launched.said() if beginning and launched else end_of(log_of(self.path), OUTPUT)))

    def _show_devices(self, view: RunView, state: str) -> None:
        lanes = self.query_one(Lanes)
        lanes.shown = Shown.of(view, STRIP, state, self._at_rest)
        lines = lanes.shown.height(detailed=True)
        lanes.detailed = self.size.height >= max(TALL, AROUND + lines, 4 + 2 * lines)

    def _show_banner(self) -> None:
        """Says why the run did not start, or how it failed or died, and which key helps."""
        banner, error, ending = self.query_one(Banner), self._start_error, self._ending
        if error is not None:
            key = self._to_correct(error)
            place = f"at {schema_name(key)} in New run" if key else "in New run"
            fresh = self._launched is not None and self._launched.fresh
            again = f"esc: correct it {place}" if fresh else "r tries again"
            banner.show(f"Training failed to start: {first_line(error)}", again)
        elif ending is not None and ending.gone and self._replay is None:
            banner.show(ending.cause, f"{counted(ending.lost, 'step')} lost · esc leads back")
        elif ending is not None and self._replay is None and self._beginning != "starts":
            lost = f"{counted(ending.lost, 'step')} lost"
            saved = f"r resumes from step {ending.saved:,} · {lost}"
            unsaved = f"not saved: {lost} · n begins a new run"
            seen = "" if ending.seen is None else f" · last seen {format_moment(ending.seen)}"
            banner.show(ending.cause, (saved if ending.saved else unsaved) + seen)
        else:
            banner.show("")

    @property
    def _start_error(self) -> str | None:
        """The error of a trainer that was started here and ended before it recorded anything."""
        launched = self._launched
        if launched is None or launched.running or (self._view is not None and not self._beginning):
            return None
        return start_error(launched)

    def _to_correct(self, error: str) -> str | None:
        return setting_of(error, self._shared.draft.shown)

    def _at_rest(self, view: ProcessView, state: str) -> str:
        """What a process does that has no lanes."""
        if self._beginning and (launched := self._launched) is not None:
            return _starting(launched, launched.said())
        return EMPTY.get(state, f"{len(view.devices)} devices idle")

    def _note(self) -> str:
        replay = self._replay
        if replay is not None:
            paused = ", paused" if self._replay_paused else ""
            return f"×{replay.speed}{paused}, {format_duration(replay.left):>4} left"
        if beginning := self._beginning:
            return "" if beginning == "starts" else f"trainer {beginning}"
        if self._view is None:
            return ""
        if self.state == "finished":
            return str(self._view.loss_change or "")
        if self.state == "stopped" and self._view.results.checkpoints:
            return f"r resumes from step {self._view.results.checkpoints[-1].step:,}"
        if not self._view.ended:
            asked = [word for word in (control.SAVE, control.STOP) if control.is_asked(self.path, word)]
            if control.is_asked(self.path, control.PAUSE) and self.state != "paused":
                asked.append(control.PAUSE)
            if asked:
                return f"{' and '.join(asked).lower()} asked"
            if self.state == "paused":
                saved = self._view.results.checkpoints[-1].step if self._view.results.checkpoints else 0
                return "space continues" if saved == self._view.step else "not saved: s saves"
            return ""
        return ""

    # ---- actions

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        ended = self._view is not None and self._view.ended
        if self._ending is not None and self._ending.gone and action in OF_FOLDER:
            return False
        if self._ending is not None and not self._ending.saved and action in OF_CHECKPOINT:
            return False
        if self._replay is not None:
            if action in ("pause", "go_on"):
                return (action == "go_on") == self._replay_paused
            return action not in ("save", "stop", "export", "resume", "begin")
        if action in ("save", "stop"):
            return self._view is not None and not ended
        if action in ("pause", "go_on"):
            paused = control.is_asked(self.path, control.PAUSE)
            return self._view is not None and not ended and (action == "go_on") == paused
        if action == "resume":
            return ended and self.state != "finished" and self._beginning != "starts"
        if action == "begin":
            return ended
        if action in ("replay", "export", "chat"):
            return self._view is not None
        return action != "speed"

    def action_pause(self) -> None:
        if self._replay is not None:
            self._replay_paused = True
            self._show()
        else:
            self._send(control.ask, control.PAUSE, "pausing after this step")
        self.refresh_bindings()

    def action_go_on(self) -> None:
        if self._replay is not None:
            self._replay_paused = False
            self._show()
        else:
            self._send(control.withdraw, control.PAUSE, "continuing")
        self.refresh_bindings()

    def action_save(self) -> None:
        self._send(control.ask, control.SAVE, "saving after this step")

    @work
    @until_closed
    async def action_stop(self) -> None:
        detail = "The state is saved after this step, and the run can be resumed."
        if await ask(self, Confirm(f"Stop {self.path.name}?", "Stop", detail, harmless=True)):
            self._send(control.ask, control.STOP, "stopping after this step; the state is saved")

    def _send(self, do: Callable[[Path, str], None], command: str, message: str) -> None:
        try:
            do(self.path, command)
            self.notify(message)
        except UserError as error:
            self.notify(str(error), severity="error")
        self._show()

    @work
    @until_closed
    async def action_resume(self) -> None:
        try:
            self._launched = await self._shared.resume(self.path)
        except UserError as error:
            self.notify(str(error), severity="error")
        self._show()

    def action_export(self) -> None:
        self.post_message(Export(self.path))

    @work
    @until_closed
    async def action_replay(self) -> None:
        self._replay_paused, self._target = False, None
        replay = None if self._replay is not None else await asyncio.to_thread(Replay, self.path)
        self._replay = replay
        self._show()
        self.refresh_bindings()

    def action_begin(self) -> None:
        self.post_message(BeginWith(self.path))

    def action_chat(self) -> None:
        self.post_message(OpenChat(self.path))

    def action_speed(self, by: float) -> None:
        if self._replay is not None:
            self._replay.faster(by)
            self._show()

    @on(Lanes.Clicked)
    @on(SchedulePanel.Clicked)
    def action_schedule(self) -> None:
        """Shows the schedule of a step in place of devices and curves, or these again."""
        self._scheduled = not self._scheduled
        for selector in ("#devices", "#middle", "#schedule", "#log"):  # not the screen: it would style all its widgets
            self.query_one(selector).set_class(self._scheduled, "-scheduled")
        self._show()
        self.query_one("#schedule" if self._scheduled else "#log-body").focus()

    def _leave_schedule(self) -> None:
        if self._scheduled:
            self.action_schedule()

    def action_curve(self) -> None:
        self._leave_schedule()
        self.query_one(Curves).turn()

    def action_smooth(self) -> None:
        self.query_one(Curves).smooth()

    @work(exclusive=True, group="seek")
    @until_closed
    async def action_sideways(self, columns: int) -> None:
        """Moves the cursor of a curve; in a replay, the time that is shown."""
        replay = self._replay
        if replay is None:
            self.query_one(Curves).move(columns)
            return
        seconds = (replay.end - replay.began) * SEEK if abs(columns) == 1 else 60.0
        clock = (self._target or replay.clock) + (seconds if columns > 0 else -seconds)
        self._target = min(max(clock, replay.began), replay.end)  # kept if the next key cancels this worker
        moved = await asyncio.to_thread(Replay.at, self.path, self._target, replay.speed)
        if self._replay is replay:
            self._replay, self._target = moved, None
            self._show()

    def action_part(self) -> None:
        if not self.query_one(LogPanel).turn():
            self.notify("There is only this log: no output of the trainer, and no samples.")

    def action_search(self) -> None:
        self._leave_schedule()
        self.query_one(LogPanel).search()

    def action_scroll(self, lines: int) -> None:
        self.query_one(LogPanel).scroll(lines)

    def action_ends(self, end: bool) -> None:
        self.query_one(LogPanel).to_end(end)

    def action_back(self) -> None:
        if self.query_one(LogPanel).end_search():
            return
        if self._scheduled:
            self.action_schedule()
        elif self.query_one(Curves).chosen is not None:
            self.query_one(Curves).choose(None)
        elif self._replay is not None:
            self.action_replay()
        elif (error := self._start_error) is not None and self._launched is not None and self._launched.fresh:
            self.post_message(Correct(self._to_correct(error)))
        else:
            self.dismiss(None)


def _starting(launched: Launched, said: str) -> str:
    """What a trainer that was started here does before it records anything. `said`: the end of its output."""
    running = launched.running
    return (phase_in(said) if running else None) or STARTING[running]
