"""Adding and removing data sets on New run."""

from typing import Any

from textual.screen import Screen

from rptrain.tui.context import Context
from rptrain.tui.dialogs.dialog import ask
from rptrain.tui.new_run.choices import data_question
from rptrain.tui.new_run.edits import Edits
from rptrain.tui.new_run.picker import Picker
from rptrain.utils.errors import UserError


async def add(screen: Screen[Any], shared: Context, edits: Edits) -> int | None:
    """Asks for a training set and adds it. Returns its number, or None if none was added; an error is shown."""
    path = await ask(screen, Picker(data_question(shared, edits.draft, "A further data set")))
    if not path:
        return None
    try:
        edits.add_train_set(path)
    except UserError as error:
        screen.notify(str(error), severity="error")
        return None
    return edits.draft.train_sets - 1


def remove(screen: Screen[Any], edits: Edits, number: int | None) -> int | None:
    """Removes a training set. Returns the number of the next one, or None with a message if none was removed."""
    if edits.draft.train_sets == 1:
        screen.notify("a run needs at least one data set: enter another one in its place", severity="warning")
    elif number is None:
        screen.notify("move to a data set to remove it", severity="warning")
    else:
        try:
            edits.remove_train_set(number)
        except UserError as error:
            screen.notify(str(error), severity="error")
        else:
            return min(number, edits.draft.train_sets - 1)
    return None
