"""Questions whose answers are on this machine: models, data and past runs."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from textual.content import Content

from rptrain.tui.context import Context
from rptrain.tui.screens.picker import Item, Question
from rptrain.tui.services import places
from rptrain.utils.units import format_bytes, format_count


def model_question(shared: Context, title: str = "Models on this machine", first: tuple[Item, ...] = ()) -> Question:
    async def find() -> list[Item]:
        known = {item.value for item in first}
        found = await shared.helper.call(places.models, shared.preferences.models)
        return [_model(model) for model in found if model.path not in known]

    return Question(title, find, first=first)


def data_question(
    shared: Context, show: Callable[[str], Awaitable[Content]] | None = None, title: str = "Data on this machine"
) -> Question:
    async def find() -> list[Item]:
        found = await asyncio.to_thread(places.data, shared.preferences.data)
        return [Item(file.path, f"{format_bytes(file.nbytes) if file.nbytes else 'built in':>9}") for file in found]

    return Question(title, find, show, places.DATA_SUFFIXES)


def run_question(shared: Context) -> Question:
    async def find() -> list[Item]:
        folder = shared.runs_folder
        found = await asyncio.to_thread(lambda: sorted(folder.glob("*/config.toml"), key=_newest))
        return [Item(str(path.parent), "") for path in found]

    return Question("Begin with the settings of", find)


def _model(model: places.FoundModel) -> Item:
    if not model.parameters:
        return Item(model.path, f"        {model.about}", dim=True)
    weights = "" if model.weights else ", config only, no weights"
    return Item(model.path, f"{format_count(model.parameters):>6}  {model.about}, {model.source}{weights}")


def _newest(path: Path) -> float:
    try:
        return -path.stat().st_mtime
    except OSError:  # it was just deleted
        return 0.0
