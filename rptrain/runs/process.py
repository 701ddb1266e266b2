"""Which process trains a run, and whether it still does."""

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True)
class ProcessId:
    """A process, told apart from a later one with its number: `birth` is the system's start and the process's in it."""

    host: str
    pid: int
    birth: str

    @classmethod
    def of(cls, pid: int) -> Self:
        """A process of this machine that runs."""
        return cls(socket.gethostname(), pid, _birth(pid) or "")

    @property
    def here(self) -> bool:
        """Whether it ran on this machine."""
        return self.host == socket.gethostname()

    @property
    def alive(self) -> bool:
        """Whether it still runs; to be asked on its own machine."""
        return _birth(self.pid) == self.birth


def _birth(pid: int) -> str | None:
    """None where there is no such process, or one that has ended and waits for its parent to notice."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = status.rpartition(")")[2].split()  # behind the name, which may hold anything: the state is the first
    if fields[0] in "ZX":
        return None
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{fields[19]}"
