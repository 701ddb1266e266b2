"""The rates of products and links that `rptrain doctor` measured, kept in the user's cache folder for later plans."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from math import isfinite
from pathlib import Path
from typing import Literal

import torch
from pydantic import TypeAdapter, ValidationError

from rptrain.data import cache
from rptrain.schedule.machine import MeasuredRates, Rates
from rptrain.utils.errors import UserError, describe
from rptrain.utils.private import Untrusted, close_own_folder, read_own
from rptrain.utils.replacing import replace_file

FILE = "rates.json"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Versions:
    """The versions of the libraries that compute products."""

    torch: str
    cuda: str | None  # that torch was built for

    @classmethod
    def here(cls) -> "Versions":
        return cls(torch.__version__, torch.version.cuda)


@dataclass(frozen=True)
class GpuRates:
    """The measured rates of a GPU. They apply to the same GPU with the same versions."""

    uuid: str
    name: str
    versions: Versions
    measured: MeasuredRates


@dataclass(frozen=True)
class LinkRates:
    """Rates of copies between GPUs and the host, in bytes per second each way, while both ways are in use."""

    uuids: tuple[str, ...]  # the GPUs, sorted
    alone: float  # of the slowest GPU while no other one copies
    together: float  # of all GPUs at once
    date: str  # ISO 8601


@dataclass(frozen=True)
class _Content:
    """The content of `rates.json`."""

    format: Literal[1]
    gpus: tuple[GpuRates, ...] = ()
    links: tuple[LinkRates, ...] = ()


def uuid(device: str | int) -> str:
    """The identifier of a GPU, such as "cuda:0", which stays the same in every process and slot."""
    return str(torch.cuda.get_device_properties(device).uuid)


def measured_rates(devices: Sequence[str]) -> MeasuredRates | None:
    """The measured rates of these GPUs, of each type the lowest; None if one of the GPUs was not measured."""
    kept = {gpu.uuid: gpu.measured for gpu in load().gpus if gpu.versions == Versions.here()}
    found = [kept.get(uuid(device)) for device in devices] if kept else []
    known = [one for one in found if one is not None]
    if not known or len(known) < len(devices):
        return None
    fp8 = [one.rates.fp8 for one in known if one.rates.fp8 is not None]
    rates = Rates(
        min(one.rates.bf16 for one in known),
        min(one.rates.fp16 for one in known),
        min(fp8) if len(fp8) == len(known) else None,
    )
    return MeasuredRates(rates, min(one.date for one in known))


def measured_links(devices: Sequence[str]) -> LinkRates | None:
    """The rates of the smallest set of GPUs that contains these; None if there is none, or without GPUs."""
    kept = load().links
    wanted = {uuid(device) for device in devices} if kept else set[str]()
    sets = [links for links in kept if wanted.issubset(links.uuids)]
    return min(sets, key=lambda links: len(links.uuids), default=None)


def load() -> _Content:
    """The content of the file. A file that is not one of ours is ignored, with a warning."""
    path: Path | None = None
    try:
        path = _path()
        content = TypeAdapter(_Content).validate_json(read_own(path), strict=True)
    except FileNotFoundError:
        return _Content(1)
    except Untrusted as error:
        log.warning("%s: plans use estimated rates until rptrain doctor measures again", error)
        return _Content(1)
    except (ValidationError, OSError, UserError) as error:  # UserError: no home directory, or no regular file
        said = "has unknown content" if isinstance(error, ValidationError) else f"cannot be read ({error})"
        log.warning("%s %s: plans use estimated rates until rptrain doctor measures again", path or FILE, said)
        return _Content(1)
    gpus = [gpu for gpu in content.gpus if _possible(*astuple(gpu.measured.rates))]
    links = [links for links in content.links if _possible(links.alone, links.together)]
    if len(gpus) < len(content.gpus) or len(links) < len(content.links):
        log.warning("%s has impossible rates, which plans leave out until rptrain doctor measures again", path)
    return _Content(1, tuple(gpus), tuple(links))


def _possible(*rates: float | None) -> bool:
    return all(rate is None or (isfinite(rate) and rate > 0) for rate in rates)


def keep(gpus: Iterable[GpuRates] = (), links: Iterable[LinkRates] = ()) -> str | None:
    """Adds rates to the file, which is replaced atomically. Returns why the file cannot be written, or None."""
    before = load()
    all_gpus = {(gpu.uuid, gpu.versions): gpu for gpu in (*before.gpus, *gpus)}
    all_links = {of.uuids: of for of in (*before.links, *links)}
    kept = _Content(1, tuple(all_gpus.values()), tuple(all_links.values()))
    content = TypeAdapter(_Content).dump_json(kept, indent=2)
    try:
        path = _path()
        close_own_folder(path.parent.resolve())  # which may be a link to another disk
        replace_file(path, content, 0o644)
    except (OSError, UserError) as error:
        return describe(error)
    return None


def _path() -> Path:
    return cache.default_folder() / FILE
