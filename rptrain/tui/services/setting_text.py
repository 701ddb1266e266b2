"""Texts of New run about what has the focus, and about values that are not valid."""

import re

from rptrain.tui.services.fields import Field, schema_name

STOPS = {  # what can have the focus besides settings, by id
    "start": "Start: enter saves the config and starts the run (ctrl+r does so from everywhere)",
    "save": "Save: enter saves the config (ctrl+s does so from everywhere)",
    "plan": "The plan of these settings: up and down scroll it",
    "advice": "Changes that make the run fit: enter applies the highlighted one",
    "samples": "Samples of the data: up and down scroll them; ctrl+t shows all samples",
}


def about(field: Field) -> str:
    """A line about a setting."""
    hint = "  ·  enter: what is on this machine" if field.is_listed else ""
    return f"{field.name}: {field.about}{hint}"


def reason_of(key: str, message: str) -> str:
    """A message without the key, or that of an item of its list, for the place beside its value."""
    names = f"{re.escape(key)}|{re.escape(schema_name(key))}"
    return re.sub(rf"\A`?(?:{names})(?:\.\d+)?`?[: ]*", "", message)
