"""Find the folder of a model, and read its config.json; no torch."""

import json
import os
import re
from pathlib import Path
from typing import Any

from rptrain.utils.errors import UserError
from rptrain.utils.files import read_small, read_small_text
from rptrain.utils.objects import unique_keys
from rptrain.utils.paths import expanded, from_environment
from rptrain.utils.suggest import nearest
from rptrain.utils.text import quoted

PRESETS = Path(__file__).parent / "presets"
HUB_ID = re.compile(r"(?!.*(?:--|\.\.))[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)  # owner/name on the hub
_REPOSITORY = re.compile(r"models--(.+?)--(.+)")  # the name of a model's folder in the hub's cache


def presets() -> list[str]:
    """Names of the bundled presets."""
    return sorted(path.parent.name for path in PRESETS.glob("*/config.json"))


def locate(model_path: str) -> Path:
    """The directory of a model: a local one, a bundled preset, or a hub id that the local cache holds.

    Nothing is downloaded. If nothing is found, raises UserError with the command that downloads a hub id, or for other
    names with the presets and the nearest one.
    """
    directory = expanded(model_path)
    if model_path and os.path.isfile(directory / "config.json"):
        return directory
    if model_path in presets():
        return PRESETS / model_path
    cached = _cached(model_path)
    if cached is not None:
        return cached
    if model_path and os.path.isdir(directory):
        raise UserError(f"{directory} is not a model directory: it has no config.json")
    if HUB_ID.fullmatch(model_path):
        raise UserError(
            f"no model {quoted(repr(model_path))}: it is neither a directory nor in the hub cache {hub_cache()}. "
            f"To download it from the hub: {download_command(model_path)}"
        )
    near = nearest(model_path.lower(), presets())
    raise UserError(
        f"no model {quoted(repr(model_path))}: it is neither a directory nor a preset ({', '.join(presets())}); a "
        "model on the hub is named owner/name" + (f". Did you mean {near[0]!r}?" if near else "")
    )


def download_command(hub_id: str) -> str:
    """The command that downloads a model."""
    return f"rptrain download {hub_id}"


def how_to_complete(directory: Path) -> str:
    """What to do about missing files of a model in the hub's cache, after a message; empty for another directory."""
    hub_id = hub_id_of(directory)
    return "" if hub_id is None else f"; to download what is missing: {download_command(hub_id)}"


def hub_id_of(directory: Path) -> str | None:
    """The hub id of a snapshot in a hub cache; None for another directory."""
    place = directory.absolute()
    match = _REPOSITORY.fullmatch(place.parent.parent.name) if place.parent.name == "snapshots" else None
    return f"{match[1]}/{match[2]}" if match else None


def read_config(path: str | Path) -> dict[str, Any]:
    """The content of config.json in a model directory, or of the file itself. Raises UserError if it is invalid."""
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(read_small_text(file), object_pairs_hook=unique_keys)
    except UserError:  # a ValueError, too
        raise
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{file} must hold a JSON object, not a {type(config).__name__}")
    return config


def cached() -> list[tuple[str, Path]]:
    """The models in the hub's cache: ids and directories."""
    found = []
    for repository in sorted(hub_cache().glob("models--*--*")):
        hub_id = repository.name.removeprefix("models--").replace("--", "/", 1)
        if (directory := _cached(hub_id)) is not None:
            found.append((hub_id, directory))
    return found


def hub_cache() -> Path:
    """The folder in which Hugging Face's libraries keep downloaded repositories."""
    if explicit := os.environ.get("HF_HUB_CACHE"):
        return expanded(explicit, "HF_HUB_CACHE")
    if home := os.environ.get("HF_HOME"):
        return expanded(home, "HF_HOME") / "hub"
    return from_environment("XDG_CACHE_HOME", "~/.cache") / "huggingface" / "hub"


def _cached(hub_id: str) -> Path | None:
    """The snapshot of `main`, or otherwise the newest one with a config.json."""
    if hub_id.count("/") != 1 or ".." in hub_id or hub_id.startswith("/"):
        return None
    repository = hub_cache() / f"models--{hub_id.replace('/', '--')}"
    snapshots = sorted(
        (config.parent for config in repository.glob("snapshots/*/config.json")),
        key=lambda path: path.stat().st_mtime,
    )
    main = repository / "refs" / "main"
    if main.is_file():
        commit = read_small(main).decode(errors="replace").strip()
        snapshots += [path for path in snapshots if path.name == commit]
    return snapshots[-1] if snapshots else None
