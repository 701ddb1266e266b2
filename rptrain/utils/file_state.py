"""What the system says of a file, which differs after every change to it."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

TICK = 0.02  # seconds: the clock of file systems advances every 1 to 10 ms


class FileState(NamedTuple):
    """Equal states of a path mean an equal content, also if a change kept size and time of modification, or if another
    file took its place.
    """

    device: int
    inode: int
    nbytes: int
    modified_ns: int
    changed_ns: int  # by anything, the time of modification included: nobody can set it

    @classmethod
    def of(cls, file: str | os.PathLike[str]) -> Self:
        """Raises OSError if there is no such file."""
        found = os.stat(file)
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def states_of(files: Sequence[Path]) -> tuple[FileState, ...]:
    """The states of files, before they are read: a later change to one of them changes its state.

    If one was changed in this tick of the clock, waits for the next tick. Raises OSError if one does not exist.
    """
    states = tuple(map(FileState.of, files))
    newest = max((state.changed_ns for state in states), default=0)
    if 0 <= time.time_ns() - newest < TICK * 1e9:
        time.sleep(TICK)
        states = tuple(map(FileState.of, files))
    return states
