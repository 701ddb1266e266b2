"""The edits of a draft: which settings were set by hand, and which values are not valid."""

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from rptrain.config.errors import ConfigError
from rptrain.planner.learning_rate import trained
from rptrain.tui.new_run.recipe import RATE, recipe
from rptrain.tui.new_run.setting_text import label_of
from rptrain.tui.services.draft import Draft, method_of
from rptrain.tui.services.fields import field_of
from rptrain.utils.errors import UserError
from rptrain.utils.units import format_count

DATA = "data.train.0.path"
CHOOSERS = {"model.path", DATA, "train.method"}  # they set the initial values of other settings
RUN_NAME = "log.run_name"


class Refused(NamedTuple):
    """A value that is not valid TOML, as it was written."""

    shown: str
    message: str


class Edits:
    """The draft gets every value that is valid TOML. Of settings that were not set by hand, the model, the data and the
    method decide. In a config that was `given`, that of a file or of a run, other data adds no setting, and changes
    only values that suited the data before. Settings that are `kept` stay as if they were set by hand.
    """

    def __init__(self, draft: Draft, *, given: bool = False, kept: Iterable[str] = ()) -> None:
        self.draft = draft
        self._given = given or not draft.is_new
        self.refused: dict[str, Refused] = {}  # by key
        self.invalid: dict[str, str] = {}  # why a value is refused, here, by the config or by the plan; by key
        self.touched = False  # edited by the user since the values were filled in
        self._by_hand: set[str] = set(kept)
        self._replaced: dict[str, str] = {}  # values that suggested ones replaced, until a message names them; by key
        self._parameters: dict[str, int] = {}  # of models that were planned
        self._suggests_rate = False
        self._rate: str | None = None  # the learning rate when the size of a model was last known

    @property
    def unsaved(self) -> bool:
        return self.touched and (self.draft.is_changed or bool(self.refused))

    def take(self, edited: Mapping[str, str]) -> bool:
        """Takes values as they were written; returns whether other settings changed with them."""
        before, suggested = self.draft.shown(DATA), self._recipe()
        for key, shown in edited.items():
            self.refused.pop(key, None)
            try:
                self.draft.put(key, shown)
            except UserError as error:
                self.refused[key] = Refused(shown, str(error))
            else:
                self._by_hand.add(key)
        self.touched = self.touched or bool(edited)
        if CHOOSERS.isdisjoint(edited):
            return False
        method = method_of(self.draft)  # a row of the other method is hidden
        self._keep(key for key in self.refused if _has_method(key, method))
        if CHOOSERS & set(edited) == {DATA}:
            return self._suit_data(before, suggested)
        self.suggest()
        return True

    def update(self, values: Mapping[str, str]) -> None:
        """Sets values, all of which are valid."""
        self.draft.update(values)
        self._by_hand.update(values)
        self.touched = True
        self._keep(key for key in self.refused if key not in values)
        if not CHOOSERS.isdisjoint(values):
            self.suggest()

    def begin(self) -> None:
        """Sets what suits the model, the data and the method of a config without edits, and announces no changes."""
        self.suggest()
        self._replaced.clear()

    def replaced(self) -> str:
        """A message with the settings that changed with the model, the data or the method since the last call, without
        the name of the run, which follows every key.
        """
        before, self._replaced = self._replaced, {}
        now = {key: self.draft.shown(key) for key in before}
        changes = [
            f"{label_of(key)} {now[key] or 'unset'} (was {was or 'unset'})"
            for key, was in before.items()
            if now[key] != was and key not in self._by_hand and key != RUN_NAME
        ]
        return f"Changed with the model, data or method: {', '.join(changes)}" if changes else ""

    def add_train_set(self, path: str) -> None:
        """Adds a training set. Raises UserError as the draft does."""
        self.draft.add_train_set(path)
        self.touched = True

    def remove_train_set(self, number: int) -> None:
        """Removes a training set, from 0. Raises UserError as the draft does."""
        before, suggested = self.draft.shown(DATA), self._recipe()
        self.draft.remove_train_set(number)
        self.refused = {moved: value for key, value in self.refused.items() if (moved := _without_set(number, key))}
        self._by_hand = {moved for key in self._by_hand if (moved := _without_set(number, key))}
        self.touched = True
        if number == 0:  # another set is the first one now
            self._suit_data(before, suggested)

    def _suit_data(self, before: str, suggested: Mapping[str, str]) -> bool:
        """Suggests what suits other data than `before`, for which these values were `suggested`. Values of a given
        config that differ from them stay, unless they are for an example's data. Returns whether a value may change.
        """
        if self._given and not before.startswith("builtin:"):
            self.suggest(kept=[key for key, value in suggested.items() if self.draft.shown(key) != value])
        else:
            self.suggest(adds=not self._given)
        return True

    def suggest(self, *, adds: bool = True, kept: Collection[str] = ()) -> None:
        """Sets what suits the model, the data and the method, except for settings that were set by hand or are `kept`.
        `adds`: also settings that the config does not have.
        """
        for key, value in self._recipe().items():
            if key not in self._by_hand and key not in kept and (adds or self.draft.shown(key)):
                self._suggests_rate = self._suggests_rate or key == RATE
                self._replaced.setdefault(key, self.draft.shown(key))
                self._put(key, value)

    def know_size(self, parameters: int) -> str:
        """Sets the learning rate that suits the size of the model, unless it comes from the user or a file.

        Returns a message if the learning rate changed since the size of a model was last known.
        """
        draft, before = self.draft, self._rate
        self._parameters[draft.shown("model.path")] = parameters
        suggests = self._suggests_rate and RATE not in self._by_hand
        if suggests:
            self._put(RATE, self._recipe()[RATE])
        self._rate = draft.shown(RATE)
        if not suggests or before in (None, self._rate):
            return ""
        size = f"{trained(method_of(draft))} of {format_count(parameters)} parameters"
        return f"The learning rate is {self._rate} now, and was {before}: it suits training {size}"

    def _recipe(self) -> Mapping[str, str]:
        model, data = self.draft.shown("model.path"), self.draft.shown(DATA)
        return recipe(model, data, method_of(self.draft), self._parameters.get(model))

    def _put(self, key: str, value: str) -> None:
        with suppress(UserError):  # its place holds something else, which the plan reports
            self.draft.put(key, value)

    def check(self) -> list[str]:
        """All mistakes in the config; those of single settings are `invalid` then."""
        self.invalid = {key: refused.message for key, refused in self.refused.items()}
        messages = list(self.invalid.values())
        try:
            self.draft.resolved()
        except ConfigError as error:
            for key, (_, message) in zip(error.keys, error.mistakes, strict=True):
                messages.append(message)
                if key and (field := field_of(key) or field_of(key.rpartition(".")[0])):  # or it is an item of a list
                    self.invalid.setdefault(field.key, message)
        except UserError as error:
            messages.append(str(error))
        return messages

    def _keep(self, keys: Iterable[str]) -> None:
        self.refused = {key: self.refused[key] for key in list(keys)}


def _without_set(number: int, key: str) -> str:
    """A key once a training set, from 0, is removed; empty for the keys of that set."""
    field = field_of(key)
    if field is None or field.train_set is None or field.train_set < number:
        return key
    before, after = f"data.train.{field.train_set}.", f"data.train.{field.train_set - 1}."
    return "" if field.train_set == number else key.replace(before, after)


def _has_method(key: str, method: str) -> bool:
    """Whether the setting with a key belongs to a method."""
    field = field_of(key)
    return field is not None and field.when in ("", method)
