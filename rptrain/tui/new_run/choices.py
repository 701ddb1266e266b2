"""The questions of New run: models, data, config files and runs on this machine, and settings."""

import asyncio
from pathlib import Path

from textual.content import Content

from rptrain.config import recipes
from rptrain.config.aliases import other_names
from rptrain.tui.context import Context
from rptrain.tui.new_run import places
from rptrain.tui.new_run.draft_file import RECIPE
from rptrain.tui.new_run.first_samples import first_samples
from rptrain.tui.new_run.picker import Item, Question
from rptrain.tui.new_run.recipe import TINY
from rptrain.tui.services.draft import Draft
from rptrain.tui.services.fields import ALL
from rptrain.utils.errors import UserError
from rptrain.utils.text import as_message
from rptrain.utils.units import DASH, format_bytes, format_count


def model_question(shared: Context, title: str = "Models on this machine", example: Item | None = None) -> Question:
    """Asks for a model: those in the current folder first, then the example."""

    async def find() -> list[Item]:
        found = await shared.helper.call(places.models, shared.preferences.models)
        return [_model(model) for model in found if example is None or model.path != example.value]

    own = (Item(path, "        in this folder") for path in places.own_models())
    return Question(title, find, first=(*own, *_given(example)), models=True)


def data_question(
    shared: Context, draft: Draft, title: str = "Data on this machine", example: Item | None = None
) -> Question:
    """Asks for a data set, and shows samples of each as the model of a draft reads them.

    Files in the current folder come first, but after the example if the draft has its model.
    """

    async def show(path: str) -> Content:
        shown = Draft(draft.path, draft.text)
        try:
            unset = dict.fromkeys((f"data.train.0.{key}" for key in ("format", "split", "columns")), "")
            shown.update({"data.train.0.path": path, **unset})
        except UserError as error:
            return Content.styled(as_message(str(error)), "$error")
        return await first_samples(shared.helper, shown)

    async def find() -> list[Item]:
        found = await asyncio.to_thread(places.data, shared.preferences.data)
        return [_data(file) for file in found if example is None or file.path != example.value]

    own = tuple(map(_data, places.own_data()))
    is_example = draft.shown("model.path") == TINY
    first = (*_given(example), *own) if is_example else (*own, *_given(example))
    return Question(title, find, show, places.DATA_SUFFIXES, first=first)


def _given(example: Item | None) -> tuple[Item, ...]:
    return () if example is None else (example,)


def file_question(shared: Context) -> Question:
    """Config files here, past runs, whose settings can be taken, and recipes."""

    async def find() -> list[Item]:
        folder = shared.runs_folder
        files = await asyncio.to_thread(lambda: sorted(Path().glob("*.toml"), key=_newest))
        runs = await asyncio.to_thread(lambda: sorted(folder.glob("*/config.toml"), key=_newest))
        items = [Item(str(path), "config file") for path in files]
        items += [Item(str(path.parent), "the settings of this run, for a new one") for path in runs]
        return items + [Item(f"{RECIPE}{name}", recipes.title(name)) for name in recipes.names()]

    return Question("Open a config file, the settings of a run, or a recipe", find, suffixes=(".toml",))


def settings_question(draft: Draft) -> Question:
    """Every key, found also by its names in other trainers."""

    async def find() -> list[Item]:
        names = other_names()
        return [
            Item(
                field.key,
                f"{draft.shown(field.key) or field.default or DASH}  {field.about}",
                words=(*names.get(field.name, ()), *([field.label.strip().lower()] if field.is_grouped else [])),
            )
            for field in ALL.values()
        ]

    return Question("All settings", find, paths=False)


def _data(file: places.FoundData) -> Item:
    return Item(file.path, f"{format_bytes(file.nbytes) if file.nbytes else 'built in':>9}")


def _model(model: places.FoundModel) -> Item:
    if not model.parameters:
        return Item(model.path, f"        {model.about}", dim=True)
    preset, weights = model.source == places.BUNDLED, "" if model.weights else "config only, no weights"
    kind = "example" if model.weights else f"preset, {weights}"
    about = f"{kind}: {model.about}" if preset else ", ".join(filter(None, (model.about, model.source, weights)))
    return Item(model.path, f"{format_count(model.parameters):>6}  {about}", offered=not preset)


def _newest(path: Path) -> float:
    try:
        return -path.stat().st_mtime
    except OSError:  # it was just deleted
        return 0.0
