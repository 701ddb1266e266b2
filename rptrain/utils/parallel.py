"""A parallel map over many items, whose threads have all ended when it returns or raises."""

import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from rptrain.utils import control_groups
from rptrain.utils.liveness import progressed

MAX_THREADS = 32  # threads: fewer already use all of the memory bandwidth
ITEMS_AHEAD = 1 << 12  # items generated in advance: a large model has a million

T = TypeVar("T")


def cores() -> int:
    """The number of cores that the process may use: those that it is bound to, or fewer as a container's limit."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([bound, *map(math.ceil, control_groups.core_quotas())]))


def own_cores() -> int:
    """The cores of this process: a share of `cores` if torchrun has started several processes on this machine."""
    processes = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, cores() // max(1, int(processes))) if processes.isdecimal() else cores()


def most_threads() -> int:
    """The default number of threads of `in_parallel`."""
    return min(cores(), MAX_THREADS)


def in_parallel(
    function: Callable[[T], object],
    items: Iterable[T],
    threads: int | None = None,
    done: Callable[[T], object] = lambda item: None,
) -> None:
    """Calls a function on every item, in order, from `threads` threads (default: available cores, at most MAX_THREADS).

    Items are generated ITEMS_AHEAD at a time. `done` is called with each of them in this thread, in order. Raises the
    first error; items not yet started are skipped. Meanwhile, torch's operations use one thread in the whole process,
    because each of these threads would start its own pool. Call it from one thread at a time, while no other work runs.
    """
    import torch  # runs are checked before torch is imported

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads or most_threads()) as pool:
            waiting = iter(items)
            while some := list(islice(waiting, ITEMS_AHEAD)):
                for item, _ in zip(some, pool.map(function, some), strict=True):
                    progressed()
                    done(item)
    finally:
        torch.set_num_threads(before)
