"""One function called on many items by the threads of a pool, which all have ended when it returns or raises."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

MAX_THREADS = 32  # threads: fewer have all the bandwidth of a host's memory
ITEMS_AHEAD = 1 << 12  # items that are made before they are begun: a large model has a million

T = TypeVar("T")


def cores() -> int:
    """How many the process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def most_threads() -> int:
    """How many `in_parallel` has by default."""
    return min(cores(), MAX_THREADS)


def in_parallel(function: Callable[[T], object], items: Iterable[T], threads: int | None = None) -> None:
    """Calls it on every item, in order, from `threads` threads (default: the cores at hand, MAX_THREADS at most).

    Items are made ITEMS_AHEAD at a time. Raises the first error; items that were not begun by then are left out.
    Meanwhile each of torch's operations has one thread, in the whole process, as each of these threads would begin a
    pool of its own: to be called by one thread at a time, while no other work is under way.
    """
    import torch  # a run is checked before it is imported

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads or most_threads()) as pool:
            waiting = iter(items)
            while some := list(islice(waiting, ITEMS_AHEAD)):
                for _ in pool.map(function, some):
                    pass
    finally:
        torch.set_num_threads(before)
