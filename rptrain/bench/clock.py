"""Times pieces of work in turn, so that figures of one run can be set against each other."""

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

Work = Callable[[], object]
FLUSH = 256 << 20  # bytes written between two timings, more than any cache holds
TURNS = 20


def seconds(
    works: Mapping[str, Work], device: torch.device, *, turns: int = TURNS, cold: bool = True
) -> dict[str, float]:
    """The median of each. On CUDA a work is a captured graph, so that launches cost nothing.

    Turns go round, so that what disturbs the machine, or warms it, hits all of them alike. `cold`: the caches hold
    nothing of a work's operands when it begins.
    """
    cuda = device.type == "cuda"
    runs = {name: captured(work, device) for name, work in works.items()}
    found: dict[str, list[float]] = {name: [] for name in runs}
    flush = torch.empty(FLUSH if cuda and cold else 0, dtype=torch.uint8, device=device)
    for _ in range(turns):
        for name, run in runs.items():
            flush.zero_()
            found[name].append(_on_cuda(run) if cuda else _on_cpu(run))
    return {name: median(taken) for name, taken in found.items()}


def captured(work: Work, device: torch.device) -> Work:
    """`work`, warmed up, as a graph where the device has such and can capture it."""
    if device.type != "cuda":
        work()
        return work
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            work()
    except RuntimeError:  # it allocates by the driver, or waits
        torch.cuda.synchronize(device)
        return work
    return graph.replay


def _on_cuda(run: Work) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _on_cpu(run: Work) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
