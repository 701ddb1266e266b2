"""Times pieces of work in turn, so that figures of one run can be set against each other."""

import logging
import time
from collections.abc import Callable, Hashable, Mapping
from statistics import median
from typing import TypeVar

import torch

from rptrain.utils.errors import describe

log = logging.getLogger(__name__)

Work = Callable[[], object]
K = TypeVar("K", bound=Hashable)
FLUSH = 256 << 20  # bytes written between two timings, more than any cache holds
TURNS = 20


def seconds(works: Mapping[K, Work], device: torch.device, *, turns: int = TURNS, cold: bool) -> dict[K, float]:
    """The median of each. On CUDA a work is a captured graph, so that launches cost nothing.

    Turns go round without a pause, so that what disturbs the machine, or warms it until it slows down, hits all works
    alike. `cold`: the caches hold nothing of a work's operands when it begins, but the device also cools meanwhile.
    """
    if device.type != "cuda":
        return {name: median(_on_cpu(work) for _ in range(turns)) for name, work in works.items()}
    with torch.cuda.device(device):
        return _on_cuda(works, turns, cold=cold)


def _on_cuda(works: Mapping[K, Work], turns: int, *, cold: bool) -> dict[K, float]:
    """The median of each on the current device."""
    runs = {name: captured(work) for name, work in works.items()}
    flush = torch.empty(FLUSH, dtype=torch.uint8, device="cuda")
    found: dict[K, list[float]] = {name: [] for name in runs}
    for turn in range(-1, turns):  # the first is not counted
        stamps = {}
        for name, run in runs.items():
            if cold:
                flush.zero_()
            stamps[name] = start, end = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        if turn >= 0:
            for name, (start, end) in stamps.items():
                found[name].append(start.elapsed_time(end) / 1e3)
    return {name: median(taken) for name, taken in found.items()}


def captured(work: Work) -> Work:
    """`work` of the current device, warmed up, as a CUDA graph; unchanged if it cannot be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:  # with this stream, because torch's default one stays on the device that captured first
        with torch.cuda.graph(graph, stream=stream):
            work()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # it allocates by the driver, or waits
        log.warning("timed with its launches, because it cannot be captured: %s", describe(error))
        torch.cuda.synchronize()
        return work
    return graph.replay


def _on_cpu(work: Work) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
