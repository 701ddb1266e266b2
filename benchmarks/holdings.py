"""What this process holds and could leave behind: threads, descriptors, locks, child processes, temporary files."""

import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

PROCESS = Path("/proc/self")
NUMBER = re.compile(r"(?<=\[)\d+(?=\])")  # of a pipe or a socket

Holdings = Mapping[str, Counter[str]]  # by kind: names, and how often there is one of that name


def holdings() -> Holdings:
    """Threads are those of libraries, too. Temporary files are those in `tempfile.gettempdir()`."""
    return {
        "threads": Counter(_texts(PROCESS.glob("task/*/comm"))),
        "descriptors": Counter(NUMBER.sub("", target) for _, target in _descriptors()),
        "locks": Counter(target for number, target in _descriptors() if _locks(number)),
        "child processes": Counter(" ".join(_texts(PROCESS.glob("task/*/children"))).split()),
        "temporary files": Counter(str(path) for path in Path(tempfile.gettempdir()).rglob("*")),
    }


def counts(held: Holdings) -> dict[str, int]:
    return {kind: names.total() for kind, names in held.items()}


def added(before: Holdings, after: Holdings) -> dict[str, list[str]]:
    """What is held after, and was not before."""
    return {kind: list((after[kind] - names).elements()) for kind, names in before.items()}


def _descriptors() -> Iterator[tuple[str, str]]:
    """The number of each open descriptor and what it refers to, except the one of the listing itself."""
    for number in os.listdir(PROCESS / "fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            yield number, os.readlink(PROCESS / "fd" / number)


def _locks(number: str) -> bool:
    """Whether the file is locked by flock, which belongs to the descriptor."""
    return any("FLOCK" in text for text in _texts([PROCESS / "fdinfo" / number]))


def _texts(files: Iterator[Path] | list[Path]) -> Iterator[str]:
    for file in files:
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            yield file.read_text().strip()
