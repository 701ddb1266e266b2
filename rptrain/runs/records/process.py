"""The processes that train a run: whether they are still alive, and where they keep their records."""

import os
import re
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

from rptrain.utils.errors import UserError
from rptrain.utils.paths import inside, leads_inside

FOLDER = "processes"  # in a run's folder; it has a folder for each process except the first, named by its rank
_RANK = re.compile(r"[1-9]\d{0,2}", re.ASCII)


@dataclass(frozen=True)
class ProcessId:
    """Identifies a process. `birth` (boot ID and start time) tells it from a later process with the same PID."""

    host: str
    pid: int
    birth: str

    @classmethod
    def of(cls, pid: int) -> Self:
        """A running process of this machine."""
        return cls(socket.gethostname(), pid, _birth(pid) or "")

    @property
    def here(self) -> bool:
        """Whether it ran on this machine."""
        return self.host == socket.gethostname()

    @property
    def alive(self) -> bool:
        """Whether the process still runs. Meaningful only on its own machine."""
        return _birth(self.pid) == self.birth

    @property
    def rebooted(self) -> bool:
        """Whether the machine was restarted since. Meaningful only on its own machine."""
        return self._boot != _boot_id()

    def rebooted_before(self, later: Self) -> bool:
        """Whether its machine was restarted before a later process began on it."""
        return later.host == self.host and later._boot != self._boot

    @property
    def _boot(self) -> str:
        return self.birth.partition("/")[0]


def other_folders(run: Path) -> dict[int, Path]:
    """The folders in which all processes except the first have written records, by rank. Some may be left from an
    earlier start with more processes. Links that lead out of the run's folder are left out.
    """
    try:
        names = os.listdir(inside(run, FOLDER))
    except (OSError, UserError):  # usually there is none
        return {}
    folders = {rank: run / FOLDER / str(rank) for rank in sorted(int(name) for name in names if _RANK.fullmatch(name))}
    return {rank: folder for rank, folder in folders.items() if leads_inside(run, folder)}


def _birth(pid: int) -> str | None:
    """Boot ID and start time of a process; None if it does not exist or is a zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = status.rpartition(")")[2].split()  # after the name, which may contain anything: the first is the state
    if fields[0] in "ZX":
        return None
    return f"{_boot_id()}/{fields[19]}"


@cache
def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # some sandboxes have none
        return ""
