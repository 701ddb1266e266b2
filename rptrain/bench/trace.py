"""A measured run as trace events: what each device computed and copied, what it waited for, and the optimizer."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rptrain.bench.idle import gaps
from rptrain.errors import UserError
from rptrain.plan.trace import Slice, document

if TYPE_CHECKING:
    from rptrain.bench.timeline import Lane

LANES = (
    "compute", "idle", "parameter upload", "activation upload", "gradient download", "launching", "optimizer",
)  # fmt: skip


def check(path: Path) -> None:
    """UserError where a trace could not be written, which is found out by trying; nothing is left behind."""
    folder = path.absolute().parent
    if not os.path.isdir(folder):
        raise UserError(f"--trace: there is no folder {folder}: make it, or name another file")
    if os.path.exists(path) and not os.path.isfile(path):  # a device may refuse what is written in the end
        raise UserError(f"--trace: {path} is no ordinary file: name another file")
    new = not os.path.lexists(path)
    try:
        path.open("ab").close()
    except OSError as error:
        raise UserError(f"--trace: {path} cannot be written: {error.strerror}: name another file") from None
    if new:
        path.unlink()


def write(
    path: Path, lanes: Sequence["Lane"], updates: Sequence[tuple[float, float]], window: tuple[float, float]
) -> None:
    """A process a device, and one for the optimizer; what took place within the window, at least in part.

    Times are from the window's start. UserError where the file cannot be written.
    """
    processes = {index: lane.device for index, lane in enumerate(lanes)} | {len(lanes): "host"}
    found = [*_slices(lanes, window), *(Slice(len(lanes), "optimizer", "update", "update", *of) for of in updates)]
    start, stop = window
    moved = [
        Slice(s.process, s.lane, s.name, s.category, s.start - start, s.end - start, s.arguments)
        for s in found
        if s.end > start and s.start < stop
    ]
    try:
        path.write_text(json.dumps(document(moved, processes, LANES)), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None


def _slices(lanes: Sequence["Lane"], window: tuple[float, float]) -> Iterator[Slice]:
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
