"""What control groups, which limit containers and jobs, leave this process of a machine."""

from collections.abc import Iterator
from pathlib import Path

MEMBERSHIPS, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
MEMORY = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}


def memory_left(memberships: Path = MEMBERSHIPS, root: Path = ROOT) -> Iterator[int]:
    """The bytes of memory that each of the process's control groups has left, if it has a limit."""
    for folder, version in _folders("memory", memberships, root):
        limit, used = (folder / name for name in MEMORY[version])
        if limit.exists() and (most := limit.read_text().strip()) != "max":
            yield max(int(most) - int(used.read_text()), 0)


def core_quotas(memberships: Path = MEMBERSHIPS, root: Path = ROOT) -> Iterator[float]:
    """The processor time that each of the process's control groups may use, in cores, if it has a limit."""
    for folder, version in _folders("cpu", memberships, root):
        if version == 2:
            file = folder / "cpu.max"
            quota, period = file.read_text().split() if file.exists() else ("max", "1")
        else:
            files = (folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us")
            quota, period = (file.read_text().strip() for file in files) if files[0].exists() else ("-1", "1")
        if quota not in ("max", "-1"):
            yield int(quota) / int(period)


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
