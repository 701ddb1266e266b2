"""Opens and saves the file of New run, and takes the settings of a run, with the questions that these need."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from textual.screen import Screen

from rptrain.config import recipes
from rptrain.runs.folder.run_dir import RunDir
from rptrain.tui.dialogs.confirm import Confirm
from rptrain.tui.dialogs.dialog import ask
from rptrain.tui.new_run.edits import Edits
from rptrain.tui.new_run.setting_text import with_labels
from rptrain.tui.services.draft import Draft
from rptrain.tui.services.launch import free_file, free_name
from rptrain.utils.errors import UserError

RECIPE = "recipe "  # before the name of a recipe, where a path may stand


def opened(chosen: str) -> Edits:
    """The config in a file, or that of a recipe, in a new file that is named after it.

    Raises UserError if there is none, or OSError if it cannot be looked up.
    """
    if chosen.startswith(RECIPE):
        name = chosen.removeprefix(RECIPE)
        draft = Draft.unsaved(free_file(Path(f"{name}.toml"), name), recipes.text(name))
        return Edits(draft, given=True, kept=draft.set_keys())
    path = Path(chosen).expanduser()
    if not path.exists():
        raise UserError(f"{path} does not exist")
    return Edits(Draft.open(path))


def settings_of(run: Path, file: Path) -> Edits:
    """The settings of a run for a new one, in a new file beside the user's. Raises UserError if they cannot be read."""
    config = RunDir(run).config()
    save = config.save.model_copy(update={"resume": "auto"})
    name = free_name(save.output_dir, run.name)
    log = config.log.model_copy(update={"run_name": name})
    draft = Draft.instead_of(free_file(file, name))
    draft.become(config.model_copy(update={"save": save, "log": log}))
    return Edits(draft, given=True)


async def save(screen: Screen[Any], edits: Edits) -> bool:
    """Saves a draft. Asks first if its file has changed on disk; says why it is not saved. Returns whether it was."""
    draft = edits.draft
    if edits.refused:
        screen.notify("\n".join(refused.message for refused in edits.refused.values()), severity="error")
        return False
    if draft.is_changed_outside:
        detail = "Another program changed or created the file. Saving discards its content."
        if not await ask(screen, Confirm(f"Write over {draft.path}?", "Write", detail)):
            return False
    try:
        draft.save()
    except UserError as error:
        screen.notify(str(error), severity="error")
        return False
    return True


async def may_leave(screen: Screen[Any], file: Path) -> bool:
    """Asks whether the unsaved edits of a file may be lost."""
    question = Confirm(f"Leave {file} without saving?", "Leave", "Its edits would be lost.")
    return bool(await ask(screen, question))


def tell_saved(screen: Screen[Any], edits: Edits) -> None:
    """Says that a draft was saved, and which of its values are invalid."""
    saved = f"saved to {edits.draft.path}"
    if edits.invalid:
        screen.notify(f"{saved}; {invalid_values(edits.invalid)}", severity="warning")
    else:
        screen.notify(saved)


def invalid_values(keys: Iterable[str]) -> str:
    """Names the settings with these keys, whose values are invalid."""
    *others, last = map(with_labels, keys)
    if not others:
        return f"the value of {last} is invalid and saved as written"
    return f"the values of {', '.join(others)} and {last} are invalid and saved as written"
