"""Models and data sets that are on this machine already: found in folders, in the hub's cache, and bundled."""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rptrain.data.read import READERS
from rptrain.models.locate import PRESETS, cached, locate, presets
from rptrain.tui.services.paths import is_text
from rptrain.utils.errors import UserError
from rptrain.utils.paths import expanded

HERE = "."  # the place that is the current folder
BUNDLED = "bundled"  # the source of what comes with the program
DEEP = 3  # folders below a place that are looked into
QUICK = 200  # names in the current folder that are searched without a wait
MAX_FOLDERS = 4000  # folders that are looked into in all
DATA_SUFFIXES = tuple(READERS)
NOT_DATA = frozenset({"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"})


@dataclass(frozen=True)
class FoundModel:
    """A model that can be named in a config."""

    path: str  # as the config names it
    source: str  # "bundled", "hub cache", "in this folder", or the place in which it was found
    parameters: int  # 0 if it cannot be trained
    about: str  # its architecture, or why it cannot be trained
    weights: bool  # whether there are any: a bundled shape begins with random ones


@dataclass(frozen=True)
class FoundData:
    """A file that can be a data set, or a built-in one."""

    path: str
    source: str
    nbytes: int


def own_models() -> list[str]:
    """Folders in the current one that may be models, found without a wait; `models` finds them all a moment later."""
    return [name for name in _names(Path(HERE))[:QUICK] if os.path.isfile(Path(name) / "config.json")]


def own_data() -> list[FoundData]:
    """Files in the current folder that are probably data; texts may be anything."""
    return [file for file in islice(_files(HERE, Path(HERE)), QUICK) if not file.path.lower().endswith(".txt")]


def models(folders: Sequence[str]) -> list[FoundModel]:
    """Those in the current folder, in the hub's cache and in the other folders, then those that are bundled, of which
    most have no weights.
    """

    here, elsewhere = list[FoundModel](), list[FoundModel]()
    for folder, directory in _folders(sorted(folders, key=lambda folder: folder != HERE)):
        if os.path.isfile(directory / "config.json"):
            if folder == HERE:
                here.append(_model(str(directory), directory, "in this folder"))
            else:
                elsewhere.append(_model(str(directory), directory, folder))
    bundled = [_model(name, PRESETS / name, BUNDLED) for name in presets()]
    in_cache = [_model(name, directory, "hub cache") for name, directory in cached()]
    return [*here, *in_cache, *elsewhere, *sorted(bundled, key=lambda model: not model.weights)]


def data(folders: Sequence[str]) -> list[FoundData]:
    """Files in the current folder that are probably data, then the built-in sets, then files in the folders."""
    found = [*own_data(), FoundData("builtin:tasks", BUNDLED, 0), FoundData("builtin:random", BUNDLED, 0)]
    for folder, directory in _folders(folders):
        found += _files(folder, directory)
    return list(dict.fromkeys(found))


def _files(folder: str, directory: Path) -> Iterator[FoundData]:
    """The data files in a directory, unless it is that of a model or a run."""
    if os.path.isfile(directory / "config.json") or os.path.isfile(directory / "config.toml"):
        return
    for name in _names(directory):
        file = str(directory / name)
        if name.lower().endswith(DATA_SUFFIXES) and name not in NOT_DATA and os.path.isfile(file):
            with suppress(OSError):  # it is gone
                yield FoundData(file, folder, os.path.getsize(file))


def has_weights(model: str) -> bool:
    """Whether a model, named as in a config, has files with weights. Raises UserError if the model is not found."""

    return _has_weights(locate(model))


def _has_weights(directory: Path) -> bool:
    return any(name.endswith(".safetensors") for name in _names(directory))


def _model(path: str, directory: Path, source: str) -> FoundModel:
    from rptrain.models.families import registry

    weights = _has_weights(directory) or path == "tiny-tasks"
    try:
        spec = registry.build(registry.model_config(directory))
    except UserError as error:
        return FoundModel(path, source, 0, str(error), weights)
    return FoundModel(path, source, spec.num_parameters, _family(spec.architecture), weights)


def _family(architecture: str) -> str:
    """The architecture without the name of its task."""
    return architecture.removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")


def _folders(places: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Each place and the folders in it, the nearest first, none twice; hidden ones are left out."""
    seen: set[str] = set()
    for place in places:
        level = [expanded(place)]
        for _ in range(DEEP):
            below: list[Path] = []
            for directory in level:
                real = os.path.realpath(directory)
                if real in seen or len(seen) >= MAX_FOLDERS or not os.path.isdir(directory):
                    continue
                seen.add(real)
                yield place, directory
                below += [
                    directory / name
                    for name in _names(directory)
                    if not name.startswith((".", "__")) and name != "checkpoints" and os.path.isdir(directory / name)
                ]
            level = below


def _names(directory: Path) -> list[str]:
    try:
        return sorted(filter(is_text, os.listdir(directory)))
    except OSError:  # not to be read: there is nothing to choose
        return []
