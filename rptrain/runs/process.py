"""The process that trains a run, and whether it is still alive."""

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Self


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


def _birth(pid: int) -> str | None:
    """Boot ID and start time of a process; None if it does not exist or is a zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = status.rpartition(")")[2].split()  # after the name, which may contain anything: the first is the state
    if fields[0] in "ZX":
        return None
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{fields[19]}"
