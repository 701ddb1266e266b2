"""Download a model: config.json first, then what rptrain reads of it."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rptrain.checkpoint.export_progress import ADAPTER_CONFIG
from rptrain.hub import snapshot
from rptrain.hub.repository import RemoteFile, Repository, find
from rptrain.models.base_files import CONFIG, COPIED, LICENSES
from rptrain.models.locate import read_config
from rptrain.utils.errors import UserError
from rptrain.utils.files import read_small_text
from rptrain.utils.text import counted
from rptrain.utils.units import format_bytes

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"
CARD = "README.md"  # its metadata name the license
OTHERS = (".bin", ".pt", ".pth", ".gguf", ".onnx", ".msgpack", ".h5")  # weights in formats that are not read
_SHOWN = 3  # files that a message names


@dataclass(frozen=True)
class Downloaded:
    """A downloaded model, or an adapter with the name of its base model."""

    path: Path
    base: str | None = None


def download(
    name: str,
    revision: str | None,
    check: Callable[[Mapping[str, Any]], object],
    tell: Callable[[str], object] = lambda said: None,
) -> Downloaded:
    """Downloads a model, or an adapter, into the hub's cache, and continues an earlier download.

    `check` gets the content of config.json before anything large is fetched, and raises UserError for a model that
    cannot be trained; `tell` gets the size and the place. UserError if the repository has no weights in safetensors,
    and as `snapshot.fetch`. The snapshot gets config.json last: programs take one that has it for complete.
    """
    repository = find(name, "model", revision)
    base = None
    if CONFIG in repository.files:
        check(read_config(snapshot.read(repository, repository.files[CONFIG])))
        weights = _weights(repository)
    elif ADAPTER_CONFIG in repository.files:
        base = _base(repository)
        weights = _adapter(repository)
    else:
        raise UserError(f"{name} is not a model: it has no {CONFIG}, and no {ADAPTER_CONFIG} of an adapter")
    files = sorted([*_others(repository), *weights], key=lambda file: file.name in (CONFIG, ADAPTER_CONFIG))
    tell_size(repository, files, tell)
    snapshot.fetch(repository, files)
    return Downloaded(snapshot.link(repository, files), base)


def tell_size(repository: Repository, files: Sequence[RemoteFile], tell: Callable[[str], object]) -> None:
    """Tells how large the files are, how much of them is in the cache already, and where they go."""
    missing, size = snapshot.missing_bytes(repository, files), sum(file.size for file in files)
    here = "" if missing == size else f", {format_bytes(size - missing)} of it already downloaded"
    tell(f"{repository.name}: {format_bytes(size)} in {counted(len(files), 'file')}{here}, in {repository.folder}")


def _others(repository: Repository) -> list[RemoteFile]:
    """All but the weights: config, tokenizer, templates, licenses and the card."""
    patterns = (*COPIED, *LICENSES, CARD, ADAPTER_CONFIG)
    return [file for file in repository.files.values() if any(_matches(file.name, pattern) for pattern in patterns)]


def _matches(name: str, pattern: str) -> bool:
    """Whether a file is that of a pattern, in the same folder."""
    return name.count("/") == pattern.count("/") and fnmatchcase(name, pattern)


def _weights(repository: Repository) -> list[RemoteFile]:
    """The files with weights that are read, and their index. UserError if there are none."""
    files = repository.files
    if SINGLE in files:
        return [files[SINGLE]]
    if INDEX not in files:
        found = [name for name in files if name.endswith(OTHERS)]
        shown = f", only {', '.join(found[:_SHOWN])}{' and others' * (len(found) > _SHOWN)}" if found else ""
        raise UserError(
            f"{repository.name} has neither {SINGLE} nor {INDEX}{shown}: other formats are not read. Look for a "
            "revision or a copy of it in safetensors, such as --revision refs/pr/N of a pull request that converts it"
        )
    weight_map = read_config(snapshot.read(repository, files[INDEX])).get("weight_map")
    named = [*weight_map.values()] if isinstance(weight_map, dict) else []
    if not named or not all(isinstance(name, str) and name.endswith(".safetensors") for name in named):
        raise UserError(f"{repository.name}: the weight_map of {INDEX} does not name files in safetensors")
    names = sorted(set(named))
    if lacking := [name for name in names if name not in files]:
        raise UserError(f"{repository.name} is incomplete: {INDEX} names {lacking[0]}, which is not there")
    return [files[name] for name in (INDEX, *names)]


def _adapter(repository: Repository) -> list[RemoteFile]:
    if ADAPTER not in repository.files:
        raise UserError(f"{repository.name} is an adapter without {ADAPTER}: other formats are not read")
    return [repository.files[ADAPTER]]


def _base(repository: Repository) -> str:
    """The base model that an adapter names; empty if it names none."""
    try:
        found = json.loads(read_small_text(snapshot.read(repository, repository.files[ADAPTER_CONFIG])))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{repository.name}: {ADAPTER_CONFIG} is not valid JSON: {error}") from error
    return str(found.get("base_model_name_or_path") or "") if isinstance(found, dict) else ""
