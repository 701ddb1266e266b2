"""Names of the files of trainable units in a checkpoint, and the elements of the unit that each file has.

    units/00003-layers.2.safetensors                    all elements
    units/00003-layers.2.elements-0-65536.safetensors   elements 0 to 65535 of the unit's flat buffer

Of a run in several processes, each process writes the elements whose optimizer state it has (`UnitState.own`), in a
file of its own unless they are the whole unit. The files of a unit have each element once.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rptrain.checkpoint.atomic_dir import Damaged

SUFFIX = ".safetensors"
PART = re.compile(rf"(.+)\.elements-([0-9]{{1,18}})-([0-9]{{1,18}}){re.escape(SUFFIX)}")


def unit_file(index: int, name: str) -> str:
    """The path of a whole unit's file within a checkpoint."""
    return f"units/{index:05}-{name}{SUFFIX}"


def part_file(whole: str, elements: slice, numel: int) -> str:
    """The path of the file with these elements of a unit, whose path is `whole` if it has all."""
    if elements == slice(0, numel):
        return whole
    return f"{whole.removesuffix(SUFFIX)}.elements-{elements.start}-{elements.stop}{SUFFIX}"


def by_unit(names: Iterable[str]) -> Mapping[str, Sequence[str]]:
    """Names of files, by the name of the file that has the whole unit."""
    found: dict[str, list[str]] = {}
    for name in names:
        part = PART.fullmatch(name)
        found.setdefault(part[1] + SUFFIX if part else name, []).append(name)
    return found


def elements(directory: Path, names: Iterable[str], numel: int) -> Mapping[str, slice]:
    """The elements that each file of a unit has, in order. Damaged unless they have each of `numel` elements once."""
    parts = {name: PART.fullmatch(name) for name in names}
    found = {name: slice(int(part[2]), int(part[3])) if part else slice(0, numel) for name, part in parts.items()}
    found = dict(sorted(found.items(), key=lambda item: (item[1].start, item[1].stop)))
    ends = [0, *(part.stop for part in found.values())]
    for (name, part), end in zip(found.items(), ends, strict=False):
        if part.start != end:
            raise Damaged(f"{directory} is damaged: {name} should begin with element {end} of its unit")
    if ends[-1] != numel:
        raise Damaged(f"{directory} is damaged: {[*found][-1]} should end with the last of {numel} elements")
    return found
