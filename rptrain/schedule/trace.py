"""Trace events for chrome://tracing and Perfetto, from slices of time or from a simulated schedule."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rptrain.schedule.simulate import Lane, Timeline

LANES: dict[Lane, str] = {"compute": "compute", "up": "link up", "down": "link down", "optimizer": "optimizer"}
PRODUCER = "rptrain plan"


@dataclass(frozen=True)
class Slice:
    """An activity in a lane of a process, from `start` to `end` in seconds."""

    process: int
    lane: str
    name: str
    category: str
    start: float
    end: float
    arguments: Mapping[str, Any] = field(default_factory=dict)


def mark(producer: str) -> re.Pattern[bytes]:
    """The beginning of a command's trace files, by which they are recognized."""
    return re.compile(re.escape(json.dumps(_metadata(producer)).removesuffix("}").encode()))


def _metadata(producer: str) -> dict[str, Any]:
    return {"otherData": {"producer": producer}}  # the format's field for data that is not an event


def document(
    slices: Iterable[Slice], processes: Mapping[int, str], lanes: Sequence[str], producer: str
) -> dict[str, Any]:
    """The content of a trace file: times in microseconds, named processes, and threads for lanes.

    Processes are ordered by number, and lanes as given; lanes without a slice are left out. The command that made the
    file, `producer`, comes first.
    """
    events: list[dict[str, Any]] = []
    seen: set[tuple[int, int]] = set()
    for piece in slices:
        thread = lanes.index(piece.lane)
        seen.add((piece.process, thread))
        events.append(
            {
                "name": piece.name,
                "cat": piece.category,
                "ph": "X",
                "ts": piece.start * 1e6,
                "dur": (piece.end - piece.start) * 1e6,
                "pid": piece.process,
                "tid": thread,
                "args": dict(piece.arguments),
            }
        )
    names: list[dict[str, Any]] = []
    for process in sorted({process for process, _ in seen}):
        names.append({"name": "process_name", "ph": "M", "pid": process, "args": {"name": processes[process]}})
        names.append({"name": "process_sort_index", "ph": "M", "pid": process, "args": {"sort_index": process}})
    for process, thread in sorted(seen):
        where = {"pid": process, "tid": thread}
        names.append({"name": "thread_name", "ph": "M", **where, "args": {"name": lanes[thread]}})
        names.append({"name": "thread_sort_index", "ph": "M", **where, "args": {"sort_index": thread}})
    return {**_metadata(producer), "traceEvents": names + events, "displayTimeUnit": "ms"}


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """A simulated schedule, with a process per device and a thread per lane.

    The optimizer has a process of its own, numbered after the last device. Tasks that take no time are left out.
    """
    host = timeline.program.devices
    slices = [
        Slice(
            host if task.lane == "optimizer" else task.device,
            LANES[task.lane],
            f"{task.kind}{task.layers[0]}-{task.layers[-1]}",
            task.kind,
            start,
            end,
            {"micro_batch": task.micro_batch, "round": task.round, "iteration": task.iteration},
        )
        for task, start, end in zip(timeline.program.tasks, timeline.starts, timeline.ends, strict=True)
        if end > start
    ]
    processes = {device: f"device {device}, bubble {timeline.bubble(device):.1%}" for device in range(host)}
    return document(slices, {**processes, host: "host"}, [*LANES.values()], PRODUCER)
