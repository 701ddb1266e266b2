"""Trace events of a measured run: computations, copies and waits of each device, and updates."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rptrain.bench.idle import gaps
from rptrain.schedule import trace
from rptrain.schedule.trace import Slice

if TYPE_CHECKING:
    from rptrain.bench.timeline import DeviceTimeline

LANES = (
    "compute", "idle", "parameter upload", "activation upload", "gradient download", "launching", "optimizer",
)  # fmt: skip
PRODUCER = "rptrain bench"


def document(
    lanes: Sequence["DeviceTimeline"], updates: Sequence[tuple[float, float]], window: tuple[float, float]
) -> dict[str, Any]:
    """A trace document with a process per device and one for the optimizer, for everything that overlaps the window.

    Times are relative to the start of the window.
    """
    processes = {index: lane.device for index, lane in enumerate(lanes)} | {len(lanes): "host"}
    found = [*_slices(lanes, window), *(Slice(len(lanes), "optimizer", "update", "update", *of) for of in updates)]
    start, stop = window
    moved = [
        Slice(s.process, s.lane, s.name, s.category, s.start - start, s.end - start, s.arguments)
        for s in found
        if s.end > start and s.start < stop
    ]
    return trace.document(moved, processes, LANES, PRODUCER)


def _slices(lanes: Sequence["DeviceTimeline"], window: tuple[float, float]) -> Iterator[Slice]:
    moves = {"upload": ("parameter upload", "parameters"), "download": ("gradient download", "gradients")}
    for process, lane in enumerate(lanes):
        for of in lane.computations:
            yield Slice(process, "compute", of.name, "compute", of.start, of.end)
            for copy in of.inputs:
                yield Slice(process, "activation upload", of.name, "copy", copy.began, copy.arrived)
        for gap in gaps(lane.computations, lane.host, window):
            yield Slice(process, "idle", gap.cause, "idle", gap.start, gap.end)
        for transfer in lane.transfers:
            place, name = moves[transfer.kind]
            yield Slice(process, place, name, "copy", transfer.start, transfer.end, {"bytes": transfer.nbytes})
        for name, start, end in lane.issuing:
            yield Slice(process, "launching", name, "launch", start, end)
