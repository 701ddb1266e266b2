"""The rates of copies to and from all GPUs at once, which may share a link, measured and kept for plans."""

import time
from collections.abc import Sequence
from datetime import date

import torch

from rptrain.doctor.checks import Check, check
from rptrain.doctor.failures import FAILURES, failed
from rptrain.doctor.gpu import COPIED, host_buffers
from rptrain.machine import rates as kept
from rptrain.machine.rates import LinkRates

IN_A_ROW = 16  # copies each way
TURNS = 4  # timings, of which the shortest counts


def examine(*, idle: bool) -> list[Check]:
    """One check for all GPUs together; none without GPUs. `idle`: whether no other work uses them."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return []
    if not idle:
        advice = "run rptrain doctor again when nothing else uses the GPUs: plans are made with measured rates"
        return [check("links", "not measured: other work uses a GPU", advice)]
    try:
        found = measure(range(count))
        torch.cuda.empty_cache()
    except FAILURES as error:
        return [failed("links", error)]
    problem = kept.keep(links=[found])
    advice = problem and f"plans use estimates, because the rates cannot be kept ({problem})"
    return [describe(found, advice)]


def measure(indices: Sequence[int]) -> LinkRates:
    """Measures copies in both directions at once, for each GPU alone and for all of them together.

    Takes 128 MiB of each GPU, and as much host memory for each, page-locked if the system allows it. Raises
    RuntimeError if there is too little.
    """
    links = [_Link(index) for index in indices]
    alone = min(IN_A_ROW * COPIED / _seconds([link]) for link in links)
    together = len(links) * IN_A_ROW * COPIED / _seconds(links)
    uuids = tuple(sorted(kept.uuid(index) for index in indices))
    return LinkRates(uuids, alone, together, date.today().isoformat())


class _Link:
    """A GPU with buffers and a stream for each direction."""

    def __init__(self, index: int) -> None:
        device = [torch.empty(COPIED, dtype=torch.uint8, device=f"cuda:{index}") for _ in range(2)]
        host = host_buffers()
        up, down = (torch.cuda.Stream(index) for _ in range(2))
        self._ways = ((up, device[0], host[0]), (down, host[1], device[1]))  # stream, target, source

    def copy(self) -> None:
        """Issues IN_A_ROW copies in each direction."""
        for stream, target, source in self._ways:
            with torch.cuda.stream(stream):
                for _ in range(IN_A_ROW):
                    target.copy_(source, non_blocking=True)

    def wait(self) -> None:
        for stream, _, _ in self._ways:
            stream.synchronize()


def _seconds(links: Sequence[_Link]) -> float:
    """The seconds until all copies of these links have ended. The first copies also wake the links."""
    taken = []
    for _ in range(TURNS):
        start = time.perf_counter()
        for link in links:
            link.copy()
        for link in links:
            link.wait()
        taken.append(time.perf_counter() - start)
    return min(taken)


def describe(links: LinkRates, advice: str | None = None) -> Check:
    """The rates in one line."""
    count = len(links.uuids)
    text = f"{links.alone / 1e9:.1f} GB/s each way with copies both ways"
    if count > 1:
        share = links.together / (count * links.alone)
        text += f"; {count} GPUs at once {links.together / 1e9:.1f} GB/s ({share:.2f} of {count} links)"
    return check("links", text, advice, alone=links.alone, together=links.together, date=links.date)
