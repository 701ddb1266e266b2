"""The edits of a draft: which settings were set by hand, and which values are not valid."""

from collections.abc import Iterable, Mapping
from contextlib import suppress

from rptrain.config.errors import ConfigError
from rptrain.tui.services.draft import Draft, method_of
from rptrain.tui.services.fields import field_of
from rptrain.tui.services.recipe import recipe
from rptrain.utils.errors import UserError

CHOOSERS = {"model.path", "data.train.0.path", "train.method"}  # they set the initial values of other settings


class Edits:
    """The draft gets every value that is valid TOML. Of settings that were not set by hand, the model, the data and the
    method decide.
    """

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.refused: dict[str, str] = {}  # values that are not valid TOML: the message, by key
        self.invalid: dict[str, str] = {}  # these, and values that the config or the plan refuses
        self.touched = False  # edited by the user since the values were filled in
        self._by_hand: set[str] = set()

    @property
    def unsaved(self) -> bool:
        return self.touched and (self.draft.is_changed or bool(self.refused))

    def take(self, edited: Mapping[str, str]) -> bool:
        """Takes values as they were written; returns whether other settings changed with them."""
        for key, shown in edited.items():
            self.refused.pop(key, None)
            try:
                self.draft.put(key, shown)
            except UserError as error:
                self.refused[key] = str(error)
            else:
                self._by_hand.add(key)
        self.touched = self.touched or bool(edited)
        if CHOOSERS.isdisjoint(edited):
            return False
        method = method_of(self.draft)  # a row of the other method is hidden
        self._keep(key for key in self.refused if _has_method(key, method))
        self.suggest()
        return True

    def update(self, values: Mapping[str, str]) -> None:
        """Sets values, all of which are valid."""
        self.draft.update(values)
        self._by_hand.update(values)
        self.touched = True
        self._keep(self.refused.keys() - values)
        if not CHOOSERS.isdisjoint(values):
            self.suggest()

    def add_train_set(self, path: str) -> None:
        self.draft.add_train_set(path)
        self.touched = True

    def remove_train_set(self, number: int) -> None:
        self.draft.remove_train_set(number)
        self._keep(key for key in self.refused if not key.startswith("data.train."))
        self.touched = True

    def suggest(self) -> None:
        """Sets what suits the model, the data and the method, except for settings that were set by hand."""
        draft = self.draft
        for key, value in recipe(draft.shown("model.path"), draft.shown("data.train.0.path"), method_of(draft)).items():
            if key not in self._by_hand:
                with suppress(UserError):  # its place holds something else, which the plan reports
                    draft.put(key, value)

    def check(self) -> list[str]:
        """All mistakes in the config; those of single settings are `invalid` then."""
        messages, self.invalid = list(self.refused.values()), dict(self.refused)
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


def _has_method(key: str, method: str) -> bool:
    """Whether the setting with a key belongs to a method."""
    field = field_of(key)
    return field is not None and field.when in ("", method)
