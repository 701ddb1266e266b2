"""Reads of file-backed weights per step, and the speed of the disk."""

import time
from dataclasses import dataclass
from typing import Any

from rptrain.engine.transfer.layouts import stage_units
from rptrain.engine.transfer.staging import READERS
from rptrain.models.spec import ModelShape
from rptrain.models.weights.file_backed import file_backed_units
from rptrain.models.weights.pretrained import WeightFiles
from rptrain.planner.memory import MemoryPlace
from rptrain.schedule.plan import Plan
from rptrain.utils.file_ranges import OpenFile
from rptrain.utils.parallel import in_parallel
from rptrain.utils.units import format_bytes, format_seconds

STRETCH, PIECE = 64 << 20, 4 << 20  # bytes to measure the disk with, and bytes per read


@dataclass(frozen=True)
class DiskReading:
    """Reads of file-backed weights that a step needs, and what the disk delivers."""

    file_backed: int  # bytes of file-backed weights
    step: int  # bytes that all devices together read in a step
    page_cache: int | None  # bytes of free memory for the page cache; None: unknown
    rate: float  # bytes per second from the disk
    planned: float  # seconds per step, planned without the disk

    @property
    def seconds(self) -> float:
        """The least duration of a step if every read goes to the disk."""
        return self.step / self.rate

    @property
    def kept(self) -> bool:
        """Whether free memory holds the file-backed weights, so that only the first step reads the disk."""
        return self.page_cache is not None and self.file_backed <= self.page_cache

    @property
    def limits(self) -> bool:
        """Whether the disk makes steps longer."""
        return not self.kept and self.seconds > self.planned

    def __str__(self) -> str:
        text = f"A step reads {format_bytes(self.step)} of the model's files; the disk gives {self.rate / 1e9:.2f} GB/s"
        if self.kept:
            return f"{text}, and free memory holds the {format_bytes(self.file_backed)} of these files."
        if self.limits:
            return (
                f"{text}, so it takes {format_seconds(self.seconds)} or more instead of "
                f"{format_seconds(self.planned)}, as free memory does not hold the {format_bytes(self.file_backed)} "
                "of these files: a larger train.global_batch_size computes more per read."
            )
        return f"{text}, which is enough."

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        names = {"mapped": self.file_backed, "bytes_per_step": self.step, "room": self.page_cache, "rate": self.rate}
        return {**names, "seconds": self.seconds, "limits": self.limits}


def disk_reading(
    files: WeightFiles, spec: ModelShape, itemsize: int, plan: Plan, period: float, host: MemoryPlace
) -> DiskReading:
    """The reads of a plan with steps of `period` seconds. Reads a part of the largest file; UserError if that fails."""
    sizes = {index: spec.units[index].nbytes(itemsize) for index in file_backed_units(spec)}
    a_round = sum(sizes.get(unit, 0) for stage in plan.stages for unit in stage_units(spec, stage))
    page_cache = None if host.limit is None else max(host.limit - host.total, 0)
    return DiskReading(sum(sizes.values()), plan.rounds * a_round, page_cache, _rate(files), period)


def _rate(files: WeightFiles) -> float:
    path = max(files.stamps, key=lambda file: files.stamps[file].nbytes)
    whole = files.stamps[path].nbytes
    size = min(STRETCH, whole)
    begin = (whole - size) // 2
    with OpenFile(path) as file:
        file.forget(begin, size)
        started = time.perf_counter()
        in_parallel(
            lambda at: file.read(at, memoryview(bytearray(min(PIECE, begin + size - at)))),
            range(begin, begin + size, PIECE),
            READERS,
        )
        return size / (time.perf_counter() - started)
