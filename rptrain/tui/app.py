"""The application: its screens, themes and keys."""

import asyncio
import gc
import signal
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, ClassVar

from textual import work
from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.events import Event
from textual.notifications import SeverityLevel
from textual.screen import ModalScreen, Screen

from rptrain.tui.chat.screen import ChatScreen
from rptrain.tui.context import Context
from rptrain.tui.data.screen import DataBrowser
from rptrain.tui.dialogs.confirm import Confirm
from rptrain.tui.dialogs.help import Help, meaning
from rptrain.tui.doctor.screen import Doctor
from rptrain.tui.export.exporting import export_run
from rptrain.tui.messages import BeginWith, Browse, Correct, Export, OpenChat, OpenRun, RunEnded, TakeBack
from rptrain.tui.new_run.screen import NewRun
from rptrain.tui.outcomes import died, outcome, still_trains
from rptrain.tui.run.screen import RunScreen
from rptrain.tui.runs.screen import Runs
from rptrain.tui.services import preferences
from rptrain.tui.services.draft import Draft
from rptrain.tui.services.helper import ChildHelper, Helper
from rptrain.tui.services.preferences import ThemeName
from rptrain.tui.themes import THEMES
from rptrain.tui.turns import Turns
from rptrain.tui.widgets.sizes import MEDIUM, NARROW, TALL, WIDE
from rptrain.utils.errors import UserError, describe
from rptrain.utils.paths import expanded
from rptrain.utils.text import as_message, one_line

CONFIG = Path("rptrain.toml")
COLLECT_AFTER = 60.0  # seconds between two collections of garbage, which delay a key by up to 0.1 s
KEY_NAMES = {"escape": "esc", "slash": "/", "plus": "+", "minus": "-", **{f"f{n}": f"F{n}" for n in range(1, 10)}}
CHECK_AFTER = 2.0  # seconds between two checks of processes started here


class RptrainApp(App[None]):
    TITLE = "rptrain"
    CSS_PATH = "style.tcss"
    HORIZONTAL_BREAKPOINTS = [(0, "-tiny"), (NARROW, "-narrow"), (MEDIUM, "-medium"), (WIDE, "-wide")]  # noqa: RUF012 (not Textual's type)
    VERTICAL_BREAKPOINTS = [(0, "-short"), (TALL, "-tall")]  # noqa: RUF012
    COMMAND_PALETTE_DISPLAY = "^p"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f1", "help", "help", show=False),
        Binding("question_mark", "help", "help", show=False),
        Binding("f2", "go('new')", "new run", show=False),
        Binding("f3", "go('runs')", "runs", show=False),
        Binding("f4", "go('doctor')", "doctor", show=False),
        Binding("f8", "picture", "picture", show=False),
        Binding("f9", "theme", "light or dark", show=False),
        Binding("ctrl+q", "quit", "quit", priority=True),
    ]

    def __init__(self, context: Context, attach: Path | None = None) -> None:
        super().__init__()
        self._shared, self._first_run = context, attach
        self._turns = Turns(self, context.readings)
        self._shown_until: dict[str, float] = {}  # when each notice disappears, by a monotonic clock
        if self.no_color:  # removed from the environment, but the trainer needs it too
            context.environment = {**context.environment, "NO_COLOR": "1"}
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = context.preferences.look

    async def on_mount(self) -> None:
        for kind in (signal.SIGTERM, signal.SIGHUP):  # the terminal is left as it was
            asyncio.get_running_loop().add_signal_handler(kind, partial(self.exit, return_code=128 + kind))
        self.set_interval(CHECK_AFTER, self._notice_ends)
        self.set_interval(COLLECT_AFTER, self._collect)
        for name, make in (("new", NewRun), ("runs", Runs), ("doctor", Doctor)):
            self.add_mode(name, partial(make, self._shared))
        if self._first_run is None:
            await self.switch_mode("new")
            self._mention_a_death()
        else:
            await self.switch_mode("runs")
            self.push_screen(RunScreen(self._shared, self._first_run))

    async def on_event(self, event: Event) -> None:
        if self._turns.may_act(event):
            await super().on_event(event)

    @work
    async def _mention_a_death(self) -> None:
        if (text := await asyncio.to_thread(died, self._shared.runs_folder)) is not None:
            self.notify(text, severity="warning", timeout=15)

    async def action_go(self, place: str) -> None:
        while isinstance(self.screen, ModalScreen | RunScreen | ChatScreen | DataBrowser):
            self.pop_screen()
        await self.switch_mode(place)

    async def on_open_run(self, message: OpenRun) -> None:
        await self.action_go("runs")
        if isinstance(runs := self.screen, Runs) and runs.is_mounted:
            runs.choose(message.path)
        self.push_screen(RunScreen(self._shared, message.path, message.launched))

    def on_open_chat(self, message: OpenChat) -> None:
        self.push_screen(ChatScreen(self._shared, message.path))

    def on_browse(self, message: Browse) -> None:
        self.push_screen(DataBrowser(self._shared, message.path, message.text))

    def on_export(self, message: Export) -> None:
        self.screen.run_worker(export_run(self.screen, self._shared, message.path))

    async def on_begin_with(self, message: BeginWith) -> None:
        await self.action_go("new")
        assert isinstance(self.screen, NewRun)
        self.screen.begin_with(message.path)

    def _notice_ends(self) -> None:
        for launched in self._shared.take_ended():
            self.post_message(RunEnded(launched.path, launched.process.returncode, launched.began))

    def _collect(self) -> None:
        gc.collect()

    @work
    async def on_run_ended(self, message: RunEnded) -> None:
        """Says how a run ended: by the terminal, and by a note on screens that do not show the run."""
        text, severity = await asyncio.to_thread(outcome, message.path, message.code, message.began)
        if not self.screen_stack:  # the program is ending
            return
        self._alert(text)
        if not (isinstance(self.screen, RunScreen) and self.screen.path == message.path):
            self.notify(text, severity=severity, timeout=15)

    def _alert(self, text: str) -> None:
        """Rings the bell, and sends a notification (OSC 9), which terminals that do not know it skip."""
        self.bell()
        if self._driver is not None:
            self._driver.write(f"\x1b]9;rptrain: {one_line(text)}\x1b\\")

    async def on_correct(self, message: Correct) -> None:
        await self.action_go("new")
        assert isinstance(self.screen, NewRun)
        await self.screen.correct(message.key)

    def notify(
        self,
        message: str,
        *,
        title: str = "",
        severity: SeverityLevel = "information",
        timeout: float | None = None,
        markup: bool = False,
    ) -> None:
        """Shows the message without interpreting markup, which names of files and runs may contain; once, as long as
        it is shown.
        """
        message = as_message(message)
        now = monotonic()
        if self._shown_until.get(message, now) > now:
            return
        self._shown_until[message] = now + (self.NOTIFICATION_TIMEOUT if timeout is None else timeout)
        super().notify(message, title=title, severity=severity, timeout=timeout, markup=False)

    def on_take_back(self, message: TakeBack) -> None:
        self._shown_until.pop(message.notice, None)
        for notice in [*self._notifications]:
            if notice.message == message.notice:
                self._unnotify(notice)

    async def action_quit(self) -> None:
        """Quits; asks first if there are unsaved edits."""
        if not self._shared.unsaved or isinstance(self.screen, ModalScreen):
            self.exit()
            return
        question = Confirm(f"Quit without saving {self._shared.draft.path}?", "Quit", "Its edits would be lost.")
        self.push_screen(question, lambda yes: self.exit() if yes else None)

    async def on_unmount(self) -> None:
        self._shared.helper.close()
        if self._shared.chat is not None:
            await self._shared.chat.close()

    def still_training(self) -> list[str]:
        """A sentence for each run that was started or shown here and still trains."""
        starting = {run.path for run in self._shared.launched.values() if run.running}
        paths = sorted(starting | self._shared.opened)
        return [text for path in paths if (text := still_trains(path, starting=path in starting)) is not None]

    def action_focus_next(self) -> None:
        self._lay_out()
        super().action_focus_next()

    def action_focus_previous(self) -> None:
        self._lay_out()
        super().action_focus_previous()

    def _lay_out(self) -> None:
        """Computes a pending layout now instead of in the next frame. The focus moves in the order of the positions on
        the screen, and a widget that was just shown has none before.
        """
        self.screen._on_timer_update()

    def action_help(self) -> None:
        keys, in_dialog = getattr(self.screen, "KEYS", ()), isinstance(self.screen, ModalScreen)
        if keys or not in_dialog:
            self.push_screen(Help(str(self.screen.TITLE), keys, in_dialog=in_dialog))

    def action_help_quit(self) -> None:
        """Says how to leave: ctrl+c copies selected text, and leaves other programs."""
        self.notify("Press ctrl+q to leave; runs continue")

    def action_theme(self) -> None:
        theme: ThemeName = "light" if self.theme == "dark" else "dark"
        self.theme = theme
        try:
            preferences.save_theme(self._shared.preferences_path, theme)
        except (OSError, UserError) as error:
            self.notify(f"the theme cannot be saved: {describe(error)}", severity="warning")

    def action_picture(self) -> None:
        try:
            self.notify(f"saved {self.save_screenshot()}")
        except OSError as error:
            self.notify(f"the picture cannot be saved: {describe(error)}", severity="error")

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        yield SystemCommand("New run", "Choose a model, data and settings (F2)", partial(self._later, "go('new')"))
        yield SystemCommand("Runs", "Past and present runs (F3)", partial(self._later, "go('runs')"))
        yield SystemCommand("Doctor", "What this machine has (F4)", partial(self._later, "go('doctor')"))
        yield SystemCommand("Light or dark", "Change the look, and keep it (F9)", self.action_theme)
        yield SystemCommand("Picture", "Save the screen as an SVG file (F8)", self.action_picture)
        yield SystemCommand("Help", "What each key does (F1)", self.action_help)
        yield SystemCommand("Quit", "Leave; runs continue (ctrl+q)", self.action_quit)
        own = {each.action for each in type(screen).BINDINGS if isinstance(each, Binding) and each.description}
        for active in screen.active_bindings.values():
            binding = active.binding
            if active.node is screen and binding.description and binding.action in own:
                key = binding.key_display or KEY_NAMES.get(binding.key, binding.key)
                does = meaning(getattr(screen, "KEYS", ()), key) or "on this screen"
                act = partial(self._later, binding.action, screen)
                yield SystemCommand(binding.description.capitalize(), f"{does} ({key})", act)

    def _later(self, action: str, screen: Screen[Any] | None = None) -> None:
        """Runs after the command palette has closed."""
        self.call_later(self.run_action, action, screen)


def make_app(
    *,
    attach: Path | None = None,
    config: Path = CONFIG,
    runs_folder: Path | None = None,
    helper: Helper | None = None,
    settings: Path | None = None,
    welcome: bool = True,
) -> RptrainApp:
    """Creates the app for a config file and a folder of runs (default: the config's). `settings`: the preferences file.

    `welcome`: whether three questions come first if there is neither a config nor a run.

    If a run is to be shown, a broken config does not matter: the New run screen starts from the starter config.
    """
    settings = settings or preferences.place()
    try:
        draft = Draft.open(config)
    except UserError:
        if attach is None:
            raise
        draft = Draft.instead_of(config)
    folder = runs_folder or _runs_folder(draft)
    context = Context(draft, folder, helper or ChildHelper(), preferences.load(settings), settings)
    context.welcome = welcome and attach is None and not config.exists() and not any(folder.glob("*/config.toml"))
    return RptrainApp(context, attach)


def _runs_folder(draft: Draft) -> Path:
    """The folder of save.output_dir; its default if the config names none that can be, which New run shows."""
    try:
        return expanded(draft.shown("save.output_dir") or "runs")
    except UserError:
        return Path("runs")
