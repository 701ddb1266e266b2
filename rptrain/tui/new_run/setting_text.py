"""Texts of New run about what has the focus, and about values that are not valid."""

import re
from collections.abc import Mapping
from typing import Any

from rptrain.tui.services.fields import FIELDS, Field, field_of, schema_name
from rptrain.utils.units import format_epochs

STOPS = {  # what can have the focus besides settings, by id
    "start": "Start: enter saves the config and starts the run (ctrl+r does so from everywhere)",
    "save": "Save: enter saves the config (ctrl+s does so from everywhere)",
    "plan": "The plan of these settings: up and down scroll it",
    "advice": "Changes that the plan proposes: enter applies the highlighted one",
    "samples": "Samples of the data: up and down scroll them; ctrl+t shows all samples",
}
_KEYS = "|".join(re.escape(field.name).replace(r"data\.train", r"data\.train(?:\.\d+)?") for field in FIELDS)
_SETTING = re.compile(rf"`?(?<![\w.])({_KEYS})(?![\w.]*\w)`?(\s*=\s*)?")


def about(field: Field) -> str:
    """A line about a setting."""
    hint = "  ·  enter: list" if field.is_listed else ""
    name = f"{field.label.strip()} ({field.name})" if field.is_grouped else field.name
    return f"{name}: {field.about}{hint}"


def label_of(key: str) -> str:
    """The label of a setting in the form; the key of one that is in no group."""
    field = field_of(key)
    return key if field is None else field.label.strip()


def with_labels(message: str) -> str:
    """A message with labels of the form: before the keys of settings, or in place of them in "key = value"."""

    def labeled(found: re.Match[str]) -> str:
        label = next(field.label.strip() for field in FIELDS if field.name == schema_name(found[1]))
        return f"{label} = " if found[2] else f"{label} ({found[1]})"

    return _SETTING.sub(labeled, message)


def length_note(length: Mapping[str, Any] | None) -> str:
    """A note about the samples of a plan's `length`; empty if nothing is known of them."""
    if length is None or length["longest"] is None:
        return ""
    samples = f"samples have up to {length['longest']:,} tokens"
    if length["shorter"] is None:
        return samples
    return f"{samples}: {length['shorter']:,} would be enough, with less padding"


def epochs_note(max_steps: str, length: Mapping[str, Any] | None) -> str:
    """A note that max steps decides in place of the epochs, if they are set; with a plan's `length`, how many these
    are.
    """
    if not max_steps:
        return ""
    epochs = None if length is None else length["epochs"]
    about = "" if length is None or length["exact"] else "about "
    return "max steps decides" + ("" if epochs is None else f": {about}{format_epochs(epochs)}")


def reason_of(key: str, message: str) -> str:
    """A message without the key, or that of an item of its list, for the place beside its value."""
    names = f"{re.escape(key)}|{re.escape(schema_name(key))}"
    return with_labels(re.sub(rf"\A`?(?:{names})(?:\.\d+)?`?[: ]*", "", message))
