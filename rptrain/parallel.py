"""One function called on many items by the threads of a pool, which all have ended when it returns or raises."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

MOST = 32  # threads: fewer have all the bandwidth of a host's memory

T = TypeVar("T")


def cores() -> int:
    """How many the process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_parallel(function: Callable[[T], object], items: Iterable[T], threads: int | None = None) -> None:
    """Calls it on every item, in order, from `threads` threads (default: the cores at hand, MOST at most).

    Raises the first error; items that were not begun by then are left out. Torch's operations have one thread each
    meanwhile, in the whole process, as each of these threads would begin a pool of its own: to be called by one thread
    at a time, while no other work is under way.
    """
    import torch  # a run is checked before it is imported

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads or min(cores(), MOST)) as pool:
            for _ in pool.map(function, items):
                pass
    finally:
        torch.set_num_threads(before)
