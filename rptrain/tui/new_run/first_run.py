"""The first run: three questions, each with a good answer. The bundled example starts training after them."""

from collections.abc import Mapping
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import Static

from rptrain.tui.context import Context
from rptrain.tui.new_run import places
from rptrain.tui.new_run.choices import data_question, model_question
from rptrain.tui.new_run.picker import Item, Picker, Question
from rptrain.tui.new_run.recipe import TASKS, TINY
from rptrain.tui.services.draft import Draft
from rptrain.utils.text import one_line

EXAMPLE = Item(TINY, " 407 k  Qwen3, bundled: trains on a CPU in a minute")
QUESTIONS = Item(TASKS, " built in  questions that the bundled example learns to answer")
METHODS: Mapping[str, Mapping[str, str]] = {
    "full": {"train.method": "full"},
    "lora": {"train.method": "lora"},
    "lora, 4-bit base": {"train.method": "lora", "lora.base": "nf4"},
}
FULL = Item("full", "train all weights")
ADAPTERS = [
    Item("lora", "train adapters: less memory, small files"),
    Item("lora, 4-bit base", "adapters on a base quantized to NF4: least memory"),
]
NO_ADAPTERS = [Item("lora", "adapters need pretrained weights, which this model does not have", dim=True)]


class FirstRun(Picker):
    """Asks for model, data and method. The answer is empty if the user wants to see all settings instead.

    `values`: the answers, as values of a draft.
    """

    TITLE = "The first run"
    KEYS = (
        *Picker.KEYS[:-1],
        ("esc", "the question before; at the first one, all settings"),
        ("F2", "all settings, with the answers so far; F7 asks again there"),
    )
    BINDINGS: ClassVar[list[BindingType]] = [Binding("f2", "all_settings", "all settings")]

    def __init__(self, shared: Context) -> None:
        self._shared = shared
        self.values: dict[str, str] = {}
        self._step = 0
        super().__init__(self._at(0))

    def compose(self) -> ComposeResult:
        yield from super().compose()
        yield Static("", id="first-keys")

    @property
    def is_example(self) -> bool:
        """Whether the answers are the bundled model and data, which train on any machine."""
        return self._chosen() == [TINY, TASKS]

    def pose(self, question: Question) -> None:
        super().pose(question)
        enter = "choose" if self._step < 2 else "start training" if self.is_example else "see the plan"
        leave = (("esc", "back"), ("F2", "all settings")) if self._step else (("esc F2", "all settings"),)
        keys = (("enter", enter), *leave, ("F1", "keys"))
        parts = [part for key, does in keys for part in ((f"{key} ", "$accent"), (f"{does}   ", "$muted"))]
        self.query_one("#first-keys", Static).update(Content.assemble(*parts))

    def _at(self, step: int) -> Question:
        chosen = "".join(f"   {one_line(value)}" for value in self._chosen())
        title = f"Your first run, {step + 1} of 3: {('the model', 'the data', 'the method')[step]}{chosen}"
        if step == 0:
            return model_question(self._shared, title, EXAMPLE)
        if step == 1:
            draft = Draft(self._shared.draft.path)
            draft.update(self.values)
            return data_question(self._shared, draft, title, QUESTIONS)
        return Question(title, self._adapters, paths=False, first=(FULL,))

    async def _adapters(self) -> list[Item]:
        """The methods besides training all weights."""
        model = self.values["model.path"]
        if model != TINY and await self._shared.helper.call(places.has_weights, model):
            return ADAPTERS
        return NO_ADAPTERS

    def _chosen(self) -> list[str]:
        return [self.values[key] for key in ("model.path", "data.train.0.path") if key in self.values]

    def taken(self, value: str) -> None:
        if self._step == 2:
            self.values |= METHODS[value]
            self.answer(value)
            return
        self.values[("model.path", "data.train.0.path")[self._step]] = value
        self._step += 1
        self.pose(self._at(self._step))

    def action_cancel(self) -> None:
        if self._step == 0:
            self.answer(None)
            return
        self._step -= 1
        self.values.pop(("model.path", "data.train.0.path")[self._step])
        self.pose(self._at(self._step))

    def action_all_settings(self) -> None:
        self.answer(None)
