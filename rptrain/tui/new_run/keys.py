"""The keys of the New run screen, and what its help says about them."""

from textual.binding import Binding, BindingType

from rptrain.tui.dialogs import terms
from rptrain.tui.new_run.advice_list import REMEDY_BINDINGS

BINDINGS: list[BindingType] = [
    Binding("ctrl+r", "start", "start"),
    Binding("ctrl+s", "save", "save"),
    Binding("ctrl+t", "browse", "samples"),
    Binding("ctrl+n", "add_set", "add data set", show=False),
    Binding("ctrl+o", "open", "open", show=False),
    Binding("f6", "save_as", "save as", show=False),
    *REMEDY_BINDINGS,
    Binding("f5", "settings", "all settings", show=False),
    Binding("f7", "guide", "three questions", show=False),
    Binding("escape", "stay", show=False),
    Binding("down", "app.focus_next", show=False),
    Binding("up", "app.focus_previous", show=False),
]
KEYS = (
    ("up down", "between settings"),
    ("enter", "on model and data: what is on this machine"),
    ("right", "complete a path; change a choice"),
    ("ctrl+r", "save the config and start the run, once its plan is ready and fits; esc cancels this"),
    ("ctrl+s", "save the config"),
    ("ctrl+t", "samples of the data, as the model reads them"),
    ("ctrl+n ctrl+l", "add a data set; remove the one with the focus"),
    ("alt+1 alt+2 …", "take a change that makes the run fit; ctrl+g goes to these, and enter takes one"),
    ("ctrl+o", "open a config file, a recipe or a past run"),
    ("F6", "save the config under another name"),
    ("F5", "all settings there are, to find one and set it"),
    ("F7", "the three questions of a first run: model, data, method"),
    *terms.OF_PLAN,
)
