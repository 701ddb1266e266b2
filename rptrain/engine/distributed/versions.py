"""The versions that processes of one run have in common: with others, the same config gives other bits."""

from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from rptrain import __version__

PACKAGES = ("rptrain", "rptrain.kernels", "rptrain.models")  # in a checkout, folders beside each other
UNKNOWN = "unknown"  # in a process of a version that does not say it


@cache
def versions() -> dict[str, str]:
    """Of this process. A checkout may have other code under the same version of rptrain, so a hash of it is added."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    return {
        "rptrain": f"{__version__} (code {_code()})",
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "none",
        "triton": triton,
    }


def differing(found: Sequence[Mapping[str, str]], names: Sequence[str]) -> str:
    """What differs between the versions of the processes with these names, which process has what; "" if nothing."""
    parts = []
    for package in dict.fromkeys(package for each in found for package in each):
        having: dict[str, list[str]] = {}
        for each, name in zip(found, names, strict=True):
            having.setdefault(each.get(package, UNKNOWN), []).append(name)
        if len(having) > 1:
            parts.append(f"{package} " + ", ".join(f"{one} in {' and '.join(who)}" for one, who in having.items()))
    return "; ".join(parts)


def _code() -> str:
    """A hash of the package's Python files."""
    files: dict[str, Path] = {}  # by the name that a file has in any layout: a wheel has all in one folder
    for package in PACKAGES:
        (folder,) = import_module(package).__path__
        for file in Path(folder).rglob("*.py"):
            files[f"{package.replace('.', '/')}/{file.relative_to(folder).as_posix()}"] = file
    digest = sha256()
    for name, file in sorted(files.items()):
        digest.update(f"{name}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]
