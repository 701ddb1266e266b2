"""How much host memory is page-locked for GPUs, in words: what the rest costs, and how to lock more."""

import platform
import resource
from collections.abc import Iterator

from rptrain.utils.units import format_bytes

COST = "copies of pageable memory are three to nine times slower, and the thread that starts one waits for it"
WSL_LIMIT = "WSL2 locks half of its memory or less"


def locked_sentence(locked: int, copied: int, advice: str) -> str:
    """What it costs that only `locked` of the `copied` bytes of host memory are page-locked, and the advice."""
    part = format_bytes(locked) if locked else "none"
    return f"{part} of the {format_bytes(copied)} of host memory that GPUs copy is page-locked: {COST}. {advice}"


def locking_notes(copied: int) -> Iterator[str]:
    """What may keep this machine from page-locking the `copied` bytes that GPUs of a planned run copy."""
    limit = memlock_limit()
    limits = [WSL_LIMIT] if is_wsl() else []
    if limit is not None and limit < copied:
        limits.append(f"`ulimit -l` allows {format_bytes(limit)}, which some drivers obey")
    if limits:
        yield (
            f"GPUs copy {format_bytes(copied)} of it, which a run page-locks, but {' and '.join(limits)}: {COST}. "
            f"{locking_advice()}"
        )


def locking_advice() -> str:
    """How to have more memory page-locked on this machine."""
    ways, limit = [], memlock_limit()
    if is_wsl():
        ways.append(f"raise `memory` in .wslconfig ({WSL_LIMIT})")
    if limit is not None:
        ways.append(f"raise `ulimit -l` ({format_bytes(limit)} now; with docker --ulimit memlock=-1)")
    ways.append("copy less: optim.update=sync, train.method=lora with a quantized lora.base, or a smaller model")
    return f"To lock all, {', or '.join(ways)}"


def memlock_limit() -> int | None:
    """Bytes that `ulimit -l` allows, which drivers may ignore; None: no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def is_wsl() -> bool:
    """Whether this is Windows Subsystem for Linux."""
    return "microsoft" in platform.release().lower()
