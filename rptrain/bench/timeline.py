"""The timeline of a traced run: computations, copies, waits and launches of each device."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from rptrain.bench.idle import Cause, Host, Input, Interval, TimedComputation
from rptrain.engine.meter import Kind, Reading
from rptrain.engine.trace import Blocked, Span

WORKER: dict[str, Cause] = {
    "boundary": "producers",
    "version": "optimizer",
    "scale": "optimizer",
    "grad": "gradients",
}
CALLER: dict[str, Cause] = {"step": "optimizer"}  # waiting for a loss that was not submitted counts as "boundary"


@dataclass(frozen=True)
class Transfer:
    """A copy of parameters to a device or of gradients from it: seconds and bytes."""

    kind: Literal["upload", "download"]
    start: float
    end: float
    nbytes: int


@dataclass(frozen=True)
class Launch:
    """The seconds of a worker's thread for issuing a micro-batch, without waits, and of the device for computing it."""

    stage: str
    host: float
    device: float


@dataclass(frozen=True)
class DeviceTimeline:
    """The timeline of a device. `issuing` has the name, start and end of everything that its thread issued."""

    device: str
    computations: tuple[TimedComputation, ...]
    host: Host
    transfers: tuple[Transfer, ...]
    launches: tuple[Launch, ...]
    issuing: tuple[tuple[str, float, float], ...]


def lanes(devices: Sequence[str], spans: Sequence[Span], readings: Iterable[Reading]) -> list[DeviceTimeline]:
    """The timelines of all devices after a run; `spans` are in the order in which they were issued."""
    submissions = {span.iteration: span.submission for span in spans}
    caller = _intervals((b for _, s in sorted(submissions.items()) for b in s.blocked), CALLER)
    transfers = _transfers(readings)
    found = []
    for index, device in enumerate(devices):
        own = [span for span in spans if span.slot.device == index]
        host = Host(_intervals((blocked for span in own for blocked in span.blocked), WORKER), caller)
        found.append(
            DeviceTimeline(
                device,
                tuple(computation for span in own for computation in _computations(span)),
                host,
                tuple(transfers.get(device, ())),
                tuple(_launch(span, host) for span in own if span.micro_batch is not None),
                tuple((_name(span), span.begun, span.issued) for span in own),
            )
        )
    return found


def updates(readings: Iterable[Reading]) -> Iterator[tuple[float, float]]:
    """Start and end of each update of the weights."""
    return ((reading.start(), reading.end()) for reading in readings if reading.kind == "update")


def copied(readings: Iterable[Reading], kind: Kind, iterations: range, units: Collection[int] | None = None) -> float:
    """Bytes per iteration of all copies of a kind, on all devices; only of `units` if given."""
    mine = (reading for reading in readings if reading.kind == kind and reading.iteration in iterations)
    return sum(reading.subject for reading in mine if units is None or reading.unit in units) / len(iterations)


def _transfers(readings: Iterable[Reading]) -> dict[str, list[Transfer]]:
    """Transfers by device; the thread of a reading is named after it."""
    found: dict[str, list[Transfer]] = defaultdict(list)
    for reading in readings:
        if reading.kind in ("upload", "download"):
            transfer = Transfer(reading.kind, reading.start(), reading.end(), reading.subject)
            found[reading.thread.partition(" ")[0]].append(transfer)
    return found


@dataclass(frozen=True)
class StageLaunches:
    """Launches of a stage for a micro-batch: median times of the host and of the device."""

    stage: str
    host: float
    device: float


def by_stage(launches: Iterable[Launch]) -> list[StageLaunches]:
    """Launches by stage, in the order in which stages appear."""
    found: dict[str, list[Launch]] = defaultdict(list)
    for launch in launches:
        found[launch.stage].append(launch)
    return [
        StageLaunches(
            stage,
            median(launch.host for launch in of),
            median(launch.device for launch in of),
        )
        for stage, of in found.items()
    ]


def _name(span: Span) -> str:
    return f"{span.slot.stage} {span.work if span.micro_batch is None else f'm{span.micro_batch}'}"


def _computations(span: Span) -> Iterator[TimedComputation]:
    """The computations of a span. The first waits for all inputs, and a later one only for its layer's parameters."""
    stage = span.slot.stage
    sums_come = stage.backward and span.slot.turn > 0 and span.micro_batch == span.slot.micro_batches.start
    rest: Cause = "gradients" if span.work == "zeroing" or sums_come else "other"
    inputs = tuple(Input(copy.issued, copy.began(), copy.arrived()) for copy in span.copies)
    freed = max((stamp() for stamp in span.freed), default=None)
    for index, piece in enumerate(span.pieces):
        first = index == 0
        yield TimedComputation(
            _name(span),
            piece.start(),
            piece.end(),
            span.submission.time,
            piece.launched,
            inputs if first else (),
            piece.parameters and (piece.parameters.published, piece.parameters.arrived()),
            freed if first else None,
            span.embedded,
            rest if first else "other",
        )


def _launch(span: Span, host: Host) -> Launch:
    return Launch(
        str(span.slot.stage),
        span.issued - span.begun - span.waited - host.blocked_for(span.begun, span.issued),
        sum(piece.end() - piece.start() for piece in span.pieces),
    )


def _intervals(blocked: Iterable[Blocked], causes: dict[str, Cause]) -> list[Interval]:
    return [Interval(causes[b.kind], b.start, b.end) for b in blocked if b.kind in causes]
