"""The New run screen: a config with its plan, to edit and start."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Button, Static

from rptrain.config.errors import ConfigError
from rptrain.runs.run_dir import RunDir
from rptrain.tui.context import Context
from rptrain.tui.messages import OpenRun
from rptrain.tui.screens.ask_name import AskName
from rptrain.tui.screens.choices import data_question, file_question, model_question, settings_question
from rptrain.tui.screens.closing import is_left, until_closed
from rptrain.tui.screens.confirm import Confirm
from rptrain.tui.screens.data import DataBrowser
from rptrain.tui.screens.dialog import ask
from rptrain.tui.screens.first_run import FirstRun
from rptrain.tui.screens.picker import Picker
from rptrain.tui.services import heavy
from rptrain.tui.services.draft import Draft
from rptrain.tui.services.fields import ALL, Field
from rptrain.tui.services.helper import HelperError
from rptrain.tui.services.recipe import recipe
from rptrain.tui.widgets.advice_list import AdviceList
from rptrain.tui.widgets.form import Form, method_of
from rptrain.tui.widgets.key_bar import KeyBar
from rptrain.tui.widgets.plan_panel import PlanPanel
from rptrain.tui.widgets.sample_text import Samples, preview_text
from rptrain.tui.widgets.sizes import TALL
from rptrain.tui.widgets.top_bar import TopBar
from rptrain.utils.errors import UserError, describe

PAUSE = 0.35  # seconds without typing before a plan is made
CHOOSERS = {"model.path", "data.train.0.path", "train.method"}  # they set the initial values of other settings


class NewRun(Screen[None]):
    TITLE = "New run"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+r", "start", "start"),
        Binding("ctrl+s", "save", "save"),
        Binding("ctrl+t", "browse", "samples"),
        Binding("ctrl+o", "open", "open", show=False),
        Binding("f6", "save_as", "save as", show=False),
        *(Binding(f"alt+{n},{n}", f"remedy({n})", "remedy", show=False) for n in range(1, 10)),
        Binding("f5", "settings", "all settings", show=False),
        Binding("down", "app.focus_next", "next", show=False),
        Binding("up", "app.focus_previous", "before", show=False),
    ]
    KEYS = (
        ("up down", "between settings"),
        ("enter", "on model and data: what is on this machine"),
        ("right", "complete a path; change a choice"),
        ("ctrl+r", "save the config and start the run, if it fits"),
        ("ctrl+s", "save the config"),
        ("ctrl+t", "samples of the data, as the model reads them"),
        ("alt+1 alt+2 …", "take a change that makes the run fit"),
        ("ctrl+o", "open a config file or a past run's settings"),
        ("F6", "save the config under another name"),
        ("F5", "all settings there are, to find one and set it"),
    )

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._shared = context
        self._draft = context.draft
        self._by_hand: set[str] = set()  # keys set by hand, which recipes no longer change
        self._refused: dict[str, str] = {}  # values of the form that are not valid TOML: the message, by key
        self._invalid: dict[str, str] = {}  # these, and values that the config refuses
        self._touched = False  # edited since the file was opened
        self._planned_text = ""  # the text of the shown plan
        self._left = False  # another screen was shown
        self._starts = False  # once the plan fits

    def compose(self) -> ComposeResult:
        yield TopBar("new", str(self._draft.path))
        with Horizontal(id="new"):
            with Vertical(id="left"):
                yield Form(self._draft)
                with Horizontal(id="actions"):
                    yield Button("Start ^r", id="start", variant="primary", compact=True)
                    yield Button("Save ^s", id="save", compact=True)
            with VerticalScroll(id="plan"):
                yield PlanPanel()
                yield AdviceList()
            with Samples(id="samples"):
                yield Static("", id="sample")
        yield Static("", id="about", markup=False)
        yield KeyBar()

    def on_mount(self) -> None:
        self.query_one("#start", Button).disabled = True
        if not self._draft.path.exists():
            self._suggest()
            self._fill()
        self.query_one(Form).focus_first()
        self._changed()
        if self._shared.welcome:
            self._shared.welcome = False
            self._welcome()

    @work
    @until_closed
    async def _welcome(self) -> None:
        """Asks the questions of the first run, and starts it once its plan fits."""
        first = FirstRun(self._shared)
        answer = await ask(self, first)
        self._draft.update(first.values)
        self._by_hand.update(first.values)
        self._suggest()
        self._fill()
        self._changed()
        if answer is not None:
            self._starts = True
            self.notify("planning; training starts once the plan fits")

    def on_resize(self) -> None:
        self.query_one(PlanPanel).detailed = self.size.height >= TALL

    # ---- the draft

    @on(Form.Edited)
    def _take(self) -> None:
        """Applies the form to the draft. Called before the draft is read, because messages arrive late."""
        edited = {field.key: shown for field, shown in self.query_one(Form).edited()}
        for key, shown in edited.items():
            self._refused.pop(key, None)
            try:
                self._draft.put(key, shown)
            except UserError as error:
                self._refused[key] = str(error)
            else:
                self._by_hand.add(key)
        if not CHOOSERS.isdisjoint(edited):
            method = method_of(self._draft)  # a row of the other method is hidden
            self._refused = {key: why for key, why in self._refused.items() if ALL[key].when in ("", method)}
            self._suggest()
            self._fill()
        if edited:
            self._starts, self._touched = False, True
            self._changed()

    def _fill(self) -> None:
        """Fills the form from the draft, except for rejected values, which the user has to correct."""
        self.query_one(Form).show(self._draft, self._refused)

    def _suggest(self) -> None:
        draft = self._draft
        for key, value in recipe(draft.shown("model.path"), draft.shown("data.train.0.path"), method_of(draft)).items():
            if key not in self._by_hand:
                with suppress(UserError):  # its place holds something else, which the plan reports
                    draft.put(key, value)

    def _changed(self) -> None:
        changed = " *" if self._draft.is_changed else ""
        self._shared.unsaved = self._touched and (self._draft.is_changed or bool(self._refused))
        self.query_one(TopBar).tell(f"{self._draft.path}{changed}")
        self.query_one(PlanPanel).busy = True
        self.query_one("#start", Button).disabled = True
        self._plan()

    # ---- the plan

    @work(exclusive=True, group="plan")
    @until_closed
    async def _plan(self) -> None:
        await asyncio.sleep(PAUSE)
        text = self._draft.text
        if messages := self._check():
            self._show_problem("\n".join(f"· {message}" for message in messages))
            return
        try:
            planned = await self._shared.helper.call(heavy.plan, self._draft.path, text)
        except (UserError, HelperError) as error:
            self._show_problem(str(error))
            return
        panel = self.query_one(PlanPanel)
        panel.problem, panel.planned, panel.busy = "", planned, False
        self._planned_text = text if planned.fits else ""
        self.query_one("#start", Button).disabled = not planned.fits
        self._invalid = {one["key"]: one["message"] for one in planned.report["refusals"] if one["key"] in ALL}
        self._mark()
        self.query_one(AdviceList).propose(planned)
        starts, self._starts = self._starts, False
        if starts and planned.fits:
            self.action_start()
        if self.query_one(Samples).display:
            self._show_samples()

    def _check(self) -> list[str]:
        """Marks invalid values in the form, and returns all mistakes."""
        messages, self._invalid = list(self._refused.values()), dict(self._refused)
        try:
            self._draft.resolved()
        except ConfigError as error:
            for key, (_, message) in zip(error.keys, error.mistakes, strict=True):
                messages.append(message)
                if key in ALL:
                    self._invalid.setdefault(key, message)
        except UserError as error:
            messages.append(str(error))
        self._mark()
        return messages

    def _mark(self) -> None:
        self.query_one(Form).mark({key: _reason(key, message) for key, message in self._invalid.items()})

    def _show_problem(self, problem: str) -> None:
        panel = self.query_one(PlanPanel)
        panel.problem, panel.busy, self._planned_text, self._starts = problem, False, "", False
        self.query_one("#start", Button).disabled = True
        self.query_one(AdviceList).propose(None)

    @on(AdviceList.OptionSelected, "#advice")
    def _take_advice(self, event: AdviceList.OptionSelected) -> None:
        if event.option.id is not None:
            self.action_remedy(int(event.option.id))

    def action_remedy(self, number: int) -> None:
        """Takes a change that the plan proposes, from 1."""
        values = self.query_one(AdviceList).changes(number)
        if not values:
            return
        self._take()
        self._draft.update(values)
        self._touched = True
        self._by_hand.update(values)
        if "train.method" in values:
            self._suggest()
        self._refused = {key: why for key, why in self._refused.items() if key not in values}
        self._fill()
        self.query_one(Form).focus_first()
        self._changed()

    # ---- data

    @on(Samples.Shown)
    def _samples_shown(self) -> None:
        """Loads the samples once there is room for them; a running plan brings them with it."""
        panel = self.query_one(PlanPanel)
        if panel.planned is not None and not panel.busy and not panel.problem:
            self._show_samples()

    @work(exclusive=True, group="samples")
    @until_closed
    async def _show_samples(self) -> None:
        self.query_one("#sample", Static).update(await self._sample(self._draft.text))

    async def _sample(self, text: str) -> Content:
        try:
            return preview_text(await self._shared.helper.call(heavy.preview, self._draft.path, text))
        except (UserError, HelperError) as error:
            return Content.styled(str(error), "$error")

    async def _sample_of(self, path: str) -> Content:
        draft = Draft(self._draft.path, self._draft.text)
        draft.put("data.train.0.path", path)
        return await self._sample(draft.text)

    def action_browse(self) -> None:
        self._take()
        if self._check():
            self.notify("the data is shown once the marked values are right", severity="warning")
        else:
            self.app.push_screen(DataBrowser(self._shared, self._draft.path, self._draft.text))

    @on(Form.Listed)
    def _listed(self, event: Form.Listed) -> None:
        self._choose(event.field.key)

    @work
    @until_closed
    async def _choose(self, key: str) -> None:
        self._take()
        is_model = key == "model.path"
        question = model_question(self._shared) if is_model else data_question(self._shared, self._sample_of)
        if chosen := await ask(self, Picker(question)):
            self.query_one(Form).enter(ALL[key], chosen)
            self._take()

    # ---- actions

    @on(Form.Entered)
    def _entered(self, event: Form.Entered) -> None:
        self.query_one("#about", Static).update(_about(event.field))

    @on(Button.Pressed, "#save")
    @work
    @until_closed
    async def action_save(self) -> None:
        if await self._save():
            self.notify(f"saved to {self._draft.path}")

    async def _save(self) -> bool:
        """Saves the draft; asks first if the file has changed on disk. Returns whether it was saved."""
        self._take()
        path = self._draft.path
        if self._refused:
            self.notify("\n".join(self._refused.values()), severity="error")
            return False
        if self._draft.is_changed_outside:
            detail = "Another program changed or created the file. Saving discards its content."
            if not await ask(self, Confirm(f"Write over {path}?", "Write", detail)):
                return False
        try:
            self._draft.save()
        except UserError as error:
            self.notify(str(error), severity="error")
            return False
        self._shared.unsaved = False
        self.query_one(TopBar).tell(str(path))
        return True

    @on(Button.Pressed, "#start")
    @work
    @until_closed
    async def action_start(self) -> None:
        self._take()
        if self.query_one(PlanPanel).busy:
            self._check()
        if self._planned_text != self._draft.text:
            self._say_why_not()
            return
        planned, self._planned_text = self._planned_text, ""  # the key may arrive twice
        if not await self._save():
            self._planned_text = planned
            return
        try:
            config = self._draft.resolved().config
            launched = await self._shared.start(self._draft.path, config.save.output_dir, config.log.run_name or "run")
        except UserError as error:
            self.notify(str(error), severity="error")
            self._planned_text = planned
            return
        self._call_off()
        self.query_one(PlanPanel).busy = True  # made again on return to the screen
        self._shared.helper.close()  # the run needs its memory
        self.post_message(OpenRun(launched.path, launched))

    def _say_why_not(self) -> None:
        """Says why the run is not started; moves the focus to an invalid value."""
        panel = self.query_one(PlanPanel)
        if self._invalid:
            key, reason = next(iter(self._invalid.items()))
            self._reveal(key)
        elif panel.busy:
            reason = "the plan is not ready yet"
        elif panel.problem:
            reason = panel.problem
        elif panel.planned is not None and not panel.planned.too_large:
            reason = "the plan says what would refuse the run"
        else:
            reason = "the run does not fit; the plan lists changes that make it fit"
        self.notify(f"not started: {reason}", severity="warning")

    # ---- leaving and coming back

    def on_screen_suspend(self) -> None:
        if is_left(self):
            self._left = True
            self._call_off()

    def on_screen_resume(self) -> None:
        if self._left and self.query_one(PlanPanel).busy:
            self._plan()
        elif self._left and self.query_one(Samples).display:
            self._samples_shown()
        self._left = False

    def _call_off(self) -> None:
        """Cancels the plan and samples, which are no longer shown."""
        self.workers.cancel_group(self, "plan")
        self.workers.cancel_group(self, "samples")

    # ---- other settings

    @work
    @until_closed
    async def action_settings(self) -> None:
        key = await ask(self, Picker(settings_question(self._draft)))
        if key in ALL:
            self._reveal(key)

    def _reveal(self, key: str) -> None:
        self.run_worker(self.correct(key))

    async def correct(self, key: str | None) -> None:
        """Moves the focus to the setting that kept a run from starting, if it is known."""
        if key is not None:
            await self.query_one(Form).reveal(ALL[key])

    # ---- files

    @work
    @until_closed
    async def action_open(self) -> None:
        chosen = await ask(self, Picker(file_question(self._shared)))
        if chosen is None:
            return
        self._take()
        if self._shared.unsaved:
            detail = "Its edits would be lost."
            if not await ask(self, Confirm(f"Leave {self._draft.path} without saving?", "Leave", detail)):
                return
        path = Path(chosen).expanduser()
        if path.is_dir():
            self.begin_with(path)
        else:
            self._open(path)

    def _open(self, path: Path) -> None:
        try:
            if not path.exists():
                raise UserError(f"{path} does not exist")
            draft = Draft.open(path)
        except (UserError, OSError) as error:
            self.notify(describe(error), severity="error")
            return
        self._draft = self._shared.draft = draft
        self._by_hand, self._refused, self._touched = set(), {}, False
        self._fill()
        self._changed()

    @work
    @until_closed
    async def action_save_as(self) -> None:
        self._take()
        before = self._draft.path
        path = await ask(self, AskName(before))
        if path is None:
            return
        self._draft.path = path
        if await self._save():
            self._changed()
            self.notify(f"saved to {path}")
        else:
            self._draft.path = before

    def begin_with(self, run: Path) -> None:
        """Takes the settings of an earlier run, for a new run in the same file."""
        try:
            config = RunDir(run).config()
            self._draft.become(config.model_copy(update={"save": config.save.model_copy(update={"resume": "auto"})}))
        except UserError as error:
            self.notify(str(error), severity="error")
            return
        self._by_hand, self._refused, self._touched = set(), {}, True
        self._fill()
        self._changed()
        self.notify(f"using the settings of {run.name}")


def _about(field: Field) -> str:
    hint = "  ·  enter: what is on this machine" if field.key.endswith("path") else ""
    return f"{field.name}: {field.about}{hint}"


def _reason(key: str, message: str) -> str:
    """A message without the key, for the place beside its value."""
    return message.removeprefix(f"`{key}`").removeprefix(key).lstrip(": ")
