"""What control groups, which limit containers and jobs, leave this process of a machine."""

from collections.abc import Iterator
from pathlib import Path

MEMBERSHIPS, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
MEMORY = {  # files of limits, the file of the use, and the prefix of the entries in memory.stat that cover inner groups
    1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_"),
    2: (("memory.max", "memory.high"), "memory.current", ""),
}
RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")  # as in MemAvailable of the whole machine


def memory_left(memberships: Path = MEMBERSHIPS, root: Path = ROOT) -> Iterator[int]:
    """The bytes of memory that each of the process's control groups has left, if it has a limit.

    The kernel reclaims the page cache, such as that of a model that was read, before a group exceeds its limit.
    """
    for folder, version in _folders("memory", memberships, root):
        limits, use, prefix = MEMORY[version]
        given = [limit for name in limits if (limit := _number(folder / name)) is not None]
        used = _number(folder / use)
        if given and used is not None:
            yield max(min(given) - max(used - _reclaimable(folder, prefix), 0), 0)


def core_quotas(memberships: Path = MEMBERSHIPS, root: Path = ROOT) -> Iterator[float]:
    """The processor time that each of the process's control groups may use, in cores, if it has a limit."""
    for folder, version in _folders("cpu", memberships, root):
        names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        match [word for name in names for word in _words(folder / name)]:
            case [quota, period] if quota.isdecimal():  # not "max" or "-1"
                yield int(quota) / int(period)


def _words(file: Path) -> list[str]:
    """The words in a file of a group; none if it cannot be read."""
    try:
        return file.read_text().split()
    except OSError:
        return []


def _number(file: Path) -> int | None:
    """The number in a file of a group; None if it is "max", or if it cannot be read."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _reclaimable(folder: Path, prefix: str) -> int:
    """Bytes of a group's memory that the kernel reclaims for other uses; 0 if they are unknown."""
    try:
        entries = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return sum(int(entries.get(prefix + name, 0)) for name in RECLAIMABLE)
    except (OSError, ValueError):
        return 0


def _folders(controller: str, memberships: Path, root: Path) -> Iterator[tuple[Path, int]]:
    """The folders of the process's control groups, from its own up to the root, with their version: 2 or 1.

    If a container shows its own group as the root, the groups in between do not exist, and the root counts.
    """
    lines = memberships.read_text().splitlines() if memberships.exists() else []
    for line in [*lines, "0::/", f"0:{controller}:/"]:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top, version = (root / controller, 1) if controllers else (root, 2)
        own = top / path.lstrip("/")
        yield from ((folder, version) for folder in (own, *own.parents) if folder.is_relative_to(top))
