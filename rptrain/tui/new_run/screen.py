"""The New run screen: a config with its plan, to edit and start."""

import asyncio
from pathlib import Path
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.await_complete import AwaitComplete
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import Screen
from textual.widgets import Button, Static

from rptrain.tui.context import Context
from rptrain.tui.dialogs.dialog import ask
from rptrain.tui.messages import Browse, OpenRun
from rptrain.tui.new_run import data_sets, draft_file, planning
from rptrain.tui.new_run import keys as new_run_keys
from rptrain.tui.new_run.advice_list import AdviceList
from rptrain.tui.new_run.ask_name import AskName
from rptrain.tui.new_run.choices import data_question, file_question, model_question, settings_question
from rptrain.tui.new_run.edits import DATA, Edits
from rptrain.tui.new_run.first_run import FirstRun
from rptrain.tui.new_run.first_samples import first_samples
from rptrain.tui.new_run.form import Form
from rptrain.tui.new_run.inputs import Inputs
from rptrain.tui.new_run.picker import Picker
from rptrain.tui.new_run.plan_pane import PlanPane
from rptrain.tui.new_run.plan_panel import PlanPanel
from rptrain.tui.new_run.planning import Planned
from rptrain.tui.new_run.sample_text import Samples
from rptrain.tui.new_run.setting_text import STOPS, about, length_note, reason_of, with_labels
from rptrain.tui.services.closing import is_left, until_closed
from rptrain.tui.services.draft import Draft
from rptrain.tui.services.fields import Field, field_of
from rptrain.tui.services.helper import HelperError
from rptrain.tui.services.launch import free_name
from rptrain.tui.widgets.key_bar import KeyBar
from rptrain.tui.widgets.sizes import TALL
from rptrain.tui.widgets.top_bar import TopBar
from rptrain.utils.errors import UserError, describe

PAUSE = 0.35  # seconds without typing before a plan is made
WATCH_AFTER = 2.0  # seconds between two checks of the files of the model and of the data


class NewRun(Screen[None]):
    TITLE = "New run"
    BINDINGS: ClassVar[list[BindingType]] = new_run_keys.BINDINGS
    KEYS = new_run_keys.KEYS

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._shared = context
        self._edits = Edits(context.draft)
        self._file = context.draft.path  # that was opened or saved last
        self._inputs: Inputs | None = None  # as the shown plan read them
        self._left = False  # another screen was shown
        self._is_launching = False

    @property
    def _draft(self) -> Draft:
        return self._edits.draft

    @property
    def _pane(self) -> PlanPane:
        return self.query_one(PlanPane)

    @property
    def _panel(self) -> PlanPanel:
        return self._pane.panel

    def compose(self) -> ComposeResult:
        yield TopBar("new", str(self._draft.path))
        with Horizontal(id="new"):
            with Vertical(id="left"):
                yield Form(self._draft)
                with Horizontal(id="actions"):
                    yield Button("Start ^r", id="start", variant="primary", compact=True)
                    yield Button("Save ^s", id="save", compact=True)
            yield PlanPane()
            with Samples(id="samples"):
                yield Static("", id="sample")
        yield Static("", id="about", markup=False)
        yield KeyBar()

    def on_mount(self) -> None:
        self.query_one("#start", Button).disabled = True
        self.set_interval(WATCH_AFTER, self._watch)
        if not self._draft.path.exists():
            self._edits.begin()
            self._fill()
        self.query_one(Form).focus_first()
        self._changed()
        if self._shared.welcome:
            self._shared.welcome = False
            self.action_guide()

    @work
    @until_closed
    async def action_guide(self) -> None:
        """Asks the questions of a first run. Starts the bundled example once its plan fits; shows that of others."""
        self._take()
        first, touched = FirstRun(self._shared), self._edits.touched
        answer = await ask(self, first)
        if first.values:
            self._edits.update(first.values)
            if not touched:
                self._edits.begin()
            self._edits.touched = touched or not self._draft.is_new
            await self._show_draft()
        if answer is None:
            self.notify("All settings of the run; F7 asks the three questions again", timeout=15)
        elif first.is_example:
            self._panel.starts = True
        else:
            self.notify("Check the settings and the plan of your run; ctrl+r starts it", timeout=15)

    def on_resize(self) -> None:
        self._panel.detailed = self.size.height >= TALL

    # ---- the draft

    @on(Form.Edited)
    def _take(self) -> None:
        """Applies the form to the draft. Called before the draft is read, because messages arrive late."""
        edited = {field.key: shown for field, shown in self.query_one(Form).edited()}
        if self._edits.take(edited):
            self._fill()
        if edited:
            self._panel.starts = False
            self._changed()

    def _fill(self) -> AwaitComplete:
        """Fills the form from the draft, and with refused values, which the user has to correct."""
        return self.query_one(Form).show(self._draft, self._edits.refused)

    async def _show_draft(self) -> None:
        """Shows another draft, or one with other values, from its first setting."""
        await self._fill()
        self.query_one(Form).focus_first()
        self._changed()

    def _changed(self) -> None:
        self._shared.unsaved = self._edits.unsaved
        self._show_file()
        subject = self._subject()
        if subject != self._pane.subject:  # it says something about the samples of other data
            self.query_one(Form).note("data.max_length", "")
        self._pane.expect(subject)
        self.query_one("#start", Button).disabled = True
        self._plan()

    def _subject(self) -> tuple[str, str]:
        return self._draft.shown("model.path"), self._draft.shown(DATA)

    def _show_file(self) -> None:
        """Names the file, with a star if the settings on the screen are not those in it."""
        differs = self._draft.is_changed or bool(self._edits.refused)
        mark = "" if not differs else " (new)" if self._draft.is_new and not self._edits.touched else " *"
        self.query_one(TopBar).tell(f"{self._draft.path}{mark}")

    # ---- the plan

    @work(exclusive=True, group="plan")
    @until_closed
    async def _plan(self) -> None:
        await asyncio.sleep(PAUSE)
        text = self._draft.text
        messages = self._edits.check()
        self._mark()
        if changes := self._edits.replaced():
            self.notify(changes, timeout=15)
        self.query_one(Form).note_epochs(None)
        if messages:
            self._show_problem("\n".join(f"· {message}" for message in messages))
            return
        try:
            await self._note_name()
            self._inputs = await asyncio.to_thread(Inputs.of, self._draft.resolved().config)
            planned = await self._shared.helper.call(planning.plan, self._draft.path, text)
        except (UserError, HelperError) as error:
            self._take()
            if self._draft.text == text:  # else it is about earlier settings
                self._show_problem(str(error))
            return
        if not self._is_of_size(planned, text):
            return
        self._pane.show(planned, text, self._subject())
        self.query_one("#start", Button).disabled = not planned.fits
        refusals = planned.report["refusals"]
        self._edits.invalid = {one["key"]: one["message"] for one in refusals if field_of(one["key"])}
        self._mark()
        self.query_one(Form).note("data.max_length", length_note(planned.report["length"]))
        self.query_one(Form).note_epochs(planned.report["length"])
        if self._panel.starts:
            self._panel.starts = False
            self.action_start()
        if self.query_one(Samples).display:
            self._show_samples()

    @work(exclusive=True, group="watch")
    @until_closed
    async def _watch(self) -> None:
        """Makes the plan again if one of its files was changed, because bad rows may have been fixed."""
        inputs, busy = self._inputs, self._panel.busy
        if inputs is None or busy or not self.is_current or not await asyncio.to_thread(lambda: inputs.have_changed):
            return
        if inputs is self._inputs and not self._panel.busy:
            self._changed()

    def _is_of_size(self, planned: Planned, text: str) -> bool:
        """Adapts the settings to the size of the model in their plan. Returns False if another plan has to be made."""
        self._take()
        if self._draft.text == text:
            if message := self._edits.know_size(planned.report["model"]["parameters"]):
                self.notify(message, timeout=15)
            if self._draft.text == text:
                return True
            self._fill()
            self._changed()
        return False

    def _mark(self) -> None:
        self.query_one(Form).mark({key: reason_of(key, message) for key, message in self._edits.invalid.items()})

    async def _note_name(self) -> None:
        """Says in the plan, which is always in sight, if another run has the name, and which one this run will get."""
        folder, name = self._place()
        free = await asyncio.to_thread(free_name, folder, name)
        self._panel.note = "" if free == name else f"{Path(folder) / name} exists: this run will be {free}"

    def _place(self) -> tuple[str, str]:
        """The folder of runs and the name of this one in a valid config."""
        config = self._draft.resolved().config
        return config.save.output_dir, config.log.run_name or "run"

    def _show_problem(self, problem: str) -> None:
        self._pane.refuse(problem)
        self.query_one("#start", Button).disabled = True
        if self._panel.starts:
            self._panel.starts = False
            self._say_why_not()

    @on(AdviceList.OptionSelected, "#advice")
    def _take_advice(self, event: AdviceList.OptionSelected) -> None:
        if event.option.id is not None:
            self.action_remedy(int(event.option.id))

    def action_advice(self) -> None:
        self._pane.advice.focus()

    def action_remedy(self, number: int) -> None:
        """Takes a change that the plan proposes, from 1."""
        if not (values := self._pane.advice.changes(number)):
            return
        self._take()
        try:
            self._edits.update(values)
        except UserError as error:
            self.notify(str(error), severity="error")
        self._fill()
        self.query_one(Form).focus_first()
        self._changed()

    # ---- data

    @on(Samples.Shown)
    def _samples_shown(self) -> None:
        """Loads the samples once there is space for them; a running plan brings them with it."""
        if self._pane.is_done:
            self._show_samples()

    @work(exclusive=True, group="samples")
    @until_closed
    async def _show_samples(self) -> None:
        text, shown = self._draft.text, await first_samples(self._shared.helper, self._draft)
        if self._draft.text == text:  # else they are those of earlier settings
            self.query_one("#sample", Static).update(shown)

    def action_browse(self) -> None:
        self._take()
        if self._edits.check():
            self._mark()
            self.notify("the data is shown once the marked values are right", severity="warning")
        else:
            self.post_message(Browse(self._draft.path, self._draft.text))

    @on(Form.Listed)
    def _listed(self, event: Form.Listed) -> None:
        self._choose(event.field)

    @work
    @until_closed
    async def _choose(self, field: Field) -> None:
        self._take()
        is_model = field.key == "model.path"
        question = model_question(self._shared) if is_model else data_question(self._shared, self._draft)
        if chosen := await ask(self, Picker(question)):
            self.query_one(Form).enter(field, chosen)
            self._take()

    @on(Form.Added)
    @work
    @until_closed
    async def action_add_set(self) -> None:
        self._take()
        await self._sets_changed(await data_sets.add(self, self._shared, self._edits))

    @on(Form.Removed)
    async def _remove_set(self, event: Form.Removed) -> None:
        self._take()
        await self._sets_changed(data_sets.remove(self, self._edits, event.train_set))

    async def _sets_changed(self, train_set: int | None) -> None:
        """Shows the data sets, and moves the focus to one of them. None: nothing changed."""
        if train_set is None:
            return
        self._panel.starts = False
        await self._fill()
        self._changed()
        await self.correct(f"data.train.{train_set}.path")

    # ---- actions

    def on_descendant_focus(self) -> None:
        """Explains what has the focus: messages may arrive when another one has it."""
        field = self.query_one(Form).focused_field
        stop = self.focused.id if self.focused else None
        self.query_one("#about", Static).update(about(field) if field else STOPS.get(stop or "", ""))

    @on(Button.Pressed, "#save")
    @work
    @until_closed
    async def action_save(self) -> None:
        if await self._save():
            draft_file.tell_saved(self, self._edits)

    async def _save(self) -> bool:
        """Saves the draft; asks first if the file has changed on disk. Returns whether it was saved."""
        self._take()
        if self._panel.busy:
            self._edits.check()
        if not await draft_file.save(self, self._edits):
            return False
        self._shared.unsaved = False
        self._file = self._draft.path
        self._show_file()
        return True

    @on(Button.Pressed, "#start")
    @work
    @until_closed
    async def action_start(self) -> None:
        """Saves the config and starts the run, or lets this wait for the plan. Says why if it cannot be started."""
        if self._is_launching:  # the key may arrive twice
            return
        self._take()
        if self._pane.fits(self._draft.text):
            self._is_launching = True
            try:
                await self._launch()
            finally:
                self._is_launching = False
            return
        if self._panel.busy:
            self._edits.check()
            self._mark()
        if self._panel.busy and not self._edits.invalid:
            self._panel.starts = True
        else:
            self._say_why_not()

    async def _launch(self) -> None:
        if not await self._save():
            return
        try:
            launched = await self._shared.start(self._draft.path, *self._place())
        except UserError as error:
            self.notify(str(error), severity="error")
            return
        self._call_off()
        self._pane.expire()  # the plan is made again on return to the screen
        self._shared.helper.close()  # the run needs its memory
        self.post_message(OpenRun(launched.path, launched))

    def action_stay(self) -> None:
        """Cancels a start that waits for the plan."""
        self._panel.starts = False

    def _say_why_not(self) -> None:
        """Says why the run is not started; moves the focus to an invalid value."""
        reason = self._panel.refusal
        if self._edits.invalid:
            key, reason = next(iter(self._edits.invalid.items()))
            self._reveal(key)
        self.notify(f"not started: {with_labels(reason)}", severity="warning")

    # ---- leaving and coming back

    def on_screen_suspend(self) -> None:
        self.query_one(Form).select_focused()  # as any value that gets the focus
        if is_left(self):
            self._left = True
            self._call_off()

    def on_screen_resume(self) -> None:
        if self._left and self._panel.busy:
            self._plan()
        elif self._left and self.query_one(Samples).display:
            self._samples_shown()
        self._left = False

    def _call_off(self) -> None:
        """Cancels the plan, samples, and a start that waits for the plan."""
        self._panel.starts = False
        self.workers.cancel_group(self, "plan")
        self.workers.cancel_group(self, "samples")

    # ---- other settings

    @work
    @until_closed
    async def action_settings(self) -> None:
        key = await ask(self, Picker(settings_question(self._draft)))
        if key is not None:
            self._reveal(key)

    def _reveal(self, key: str) -> None:
        self.run_worker(self.correct(key))

    async def correct(self, key: str | None) -> None:
        """Moves the focus to the setting that kept a run from starting, if it is known."""
        if key is not None and (field := field_of(key)):
            await self.query_one(Form).reveal(field)

    # ---- files

    @work
    @until_closed
    async def action_open(self) -> None:
        chosen = await ask(self, Picker(file_question(self._shared)))
        if chosen is None:
            return
        if await self._may_lose_edits():
            path = Path(chosen).expanduser()
            await (self._take_over(path) if path.is_dir() else self._open(chosen))

    async def _may_lose_edits(self) -> bool:
        self._take()
        return not self._shared.unsaved or await draft_file.may_leave(self, self._draft.path)

    async def _open(self, chosen: str) -> None:
        try:
            edits = draft_file.opened(chosen)
        except (UserError, OSError) as error:
            self.notify(describe(error), severity="error")
            return
        self._file = edits.draft.path
        await self._edit(edits)

    async def _edit(self, edits: Edits) -> None:
        """Leaves the edits before for others."""
        self._edits, self._shared.draft = edits, edits.draft
        await self._show_draft()

    @work
    @until_closed
    async def action_save_as(self) -> None:
        self._take()
        path = await ask(self, AskName(self._draft.path))
        if path is None:
            return
        with self._draft.moved(path):
            saved = await self._save()
        if saved:
            self._changed()
            draft_file.tell_saved(self, self._edits)

    @work
    @until_closed
    async def begin_with(self, run: Path) -> None:
        """Takes the settings of an earlier run for a new one. Asks first if edits would be lost."""
        if await self._may_lose_edits():
            await self._take_over(run)

    async def _take_over(self, run: Path) -> None:
        try:
            edits = draft_file.settings_of(run, self._file)
        except UserError as error:
            self.notify(str(error), severity="error")
            return
        await self._edit(edits)
        self.notify(f"using the settings of {run.name}")
