"""The keys of the interface in the guide: those that the screens bind, and no others."""

import re

import pytest
from textual.app import App
from textual.binding import Binding
from textual.screen import Screen

from rptrain.tui.app import RptrainApp
from rptrain.tui.chat.screen import ChatScreen, Message
from rptrain.tui.data.screen import DataBrowser
from rptrain.tui.doctor.screen import Doctor
from rptrain.tui.new_run.form import Form
from rptrain.tui.new_run.screen import NewRun
from rptrain.tui.run.screen import RunScreen
from rptrain.tui.runs.screen import Runs
from rptrain.tui.widgets.choice import Choice

from .reading import ROOT

NAMES = {
    "escape": "esc",
    "slash": "/",
    "question_mark": "?",
    "plus": "+",
    "minus": "-",
    "equals_sign": "=",
    "pagedown": "pgdn",
    "pageup": "pgup",
}
TEXTUAL = {"enter", "up", "down", "left", "right", "tab", App.COMMAND_PALETTE_BINDING}  # bound by Textual
GUIDE = ROOT / "docs" / "guide"
SECTIONS = {
    "Everywhere": (RptrainApp, App, Screen),
    "New run": (NewRun, Form, Choice),
    "Data browser": (DataBrowser,),
    "Run": (RunScreen,),
    "Runs": (Runs,),
    "Doctor": (Doctor,),
    "In the interface": (ChatScreen, Message),
}


def bound(owner: type) -> set[str]:
    """The keys that a class binds itself. Of changes that make a run fit, those of the first one."""
    found: set[str] = set()
    for binding in owner.__dict__.get("BINDINGS", ()):
        assert isinstance(binding, Binding)
        if binding.action.startswith("remedy("):
            if binding.action == "remedy(1)":
                found.add(binding.key.partition(",")[0])
            continue
        found |= {re.sub(r"^f(\d)$", r"F\1", NAMES.get(key, key)) for key in binding.key.split(",")}
    return found


def documented(section: str) -> set[str]:
    text = (GUIDE / ("chat.md" if section == "In the interface" else "tui.md")).read_text(encoding="utf-8")
    table = re.split("^##+ ", text.split(f"# {section}\n")[1], flags=re.MULTILINE)[0]
    return {key for cell in re.findall(r"^\| (.+?) \|", table, re.MULTILINE) for key in re.findall("`(.+?)`", cell)}


@pytest.mark.parametrize("section", SECTIONS)
def test_the_guide_names_the_keys_of_each_screen(section):
    first, *others = SECTIONS[section]
    shown = documented(section)
    assert sorted(bound(first) - shown) == [], "keys that the guide does not name"
    possible = bound(first).union(*map(bound, others)) | TEXTUAL
    assert sorted(shown - possible) == [], "keys that do nothing"
