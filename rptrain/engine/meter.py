"""Measured times of layers, copies and the optimizer, from time stamps around each of them.

The time stamps are in the streams: nothing waits for them, and nothing that is computed depends on them.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from statistics import median
from typing import Literal

from rptrain.models.layer import HeadLayer, Layer
from rptrain.models.spec import ModelSpec
from rptrain.schedule.plan import Stage

Stamp = Callable[[], float]  # seconds on the scale of `time.perf_counter`; waits until the stream has passed it
Kind = Literal["forward", "backward", "upload", "download", "update"]


@dataclass(frozen=True)
class Measured:
    """The measured times of a run.

    `forward` and `backward` list seconds per micro-batch by layer of the stack, the head last: lower quartiles over
    micro-batches and iterations, shared by layers that differ only in name and place, and empty if the meter does not
    measure layers. `backward` does not include the recomputed forward. The head computes forward and backward at once,
    so its `forward` is 0.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    upload: float | None  # bytes per second of parameters to a device; None if there were none
    download: float | None  # bytes per second of gradients to the host
    update: float  # seconds of the optimizer per step, from when it may begin
    steps: int  # steps that were measured


@dataclass(frozen=True)
class Reading:
    """One operation between two time stamps; `thread` begins with the name of the device."""

    thread: str
    iteration: int
    kind: Kind
    subject: int  # a layer's place in the stack, or the bytes of a copy
    start: Stamp
    end: Stamp
    unit: int | None = None  # the unit that is copied


class Meter:
    """Collects readings from an engine's threads. Thread-safe.

    `layers`: also measures each pass over a layer of the `measured_stages`, which are not replayed as graphs then.
    `warm_up`: iterations that are left out, in which graphs are captured, and caches and allocators warm up.
    """

    def __init__(self, *, layers: bool = True, warm_up: int = 1) -> None:
        self.layers, self.warm_up = layers, warm_up
        self._lock = threading.Lock()
        self._readings: list[Reading] = []

    @contextmanager
    def timed(
        self, stamp: Callable[[], Stamp], iteration: int, kind: Kind, subject: int, unit: int | None
    ) -> Iterator[None]:
        """Measures the work inside; see `timed` below."""
        start = stamp()
        yield
        reading = Reading(threading.current_thread().name, iteration, kind, subject, start, stamp(), unit)
        with self._lock:
            self._readings.append(reading)

    @property
    def readings(self) -> tuple[Reading, ...]:
        with self._lock:
            return tuple(self._readings)

    def measured(self, spec: ModelSpec) -> Measured | None:
        """Typical times of the complete steps; None if there are none, or if some kind of layer was measured in none.

        A step is complete once its update is, which comes last. Skipped steps have no update and do not count. A rate
        is the rate of all copies of an iteration together; the median over iterations is taken.
        """
        readings = self.readings
        complete = {reading.iteration for reading in readings if reading.kind == "update"}
        if not complete:
            return None
        layers: dict[Pass, list[float]] = defaultdict(list)
        totals: dict[tuple[Kind, int], tuple[int, float]] = defaultdict(lambda: (0, 0.0))  # bytes, seconds
        for reading in readings:
            if reading.iteration not in complete:
                continue
            seconds = reading.end() - reading.start()
            if reading.kind in ("forward", "backward"):
                layers[reading.kind, likeness(spec, spec.stack[reading.subject])].append(seconds)
            else:
                nbytes, before = totals[reading.kind, reading.iteration]
                totals[reading.kind, reading.iteration] = nbytes + reading.subject, before + seconds

        if self.layers and _passes(spec) - layers.keys():
            return None

        def rate(kind: Kind) -> float | None:
            rates = [nbytes / seconds for (of, _), (nbytes, seconds) in totals.items() if of == kind]
            return median(rates) if rates else None

        forward = (
            (*(_typical(layers["forward", likeness(spec, layer)]) for layer in spec.layers), 0.0) if self.layers else ()
        )
        backward = (
            (*(_typical(layers["backward", likeness(spec, layer)]) for layer in spec.stack),) if self.layers else ()
        )
        return Measured(
            forward=forward,
            backward=backward,
            upload=rate("upload"),
            download=rate("download"),
            update=median(totals["update", iteration][1] for iteration in complete),
            steps=len(complete),
        )


def _typical(seconds: list[float]) -> float:
    """The lower quartile, because late launches and busy cores only add to a layer's time."""
    return sorted(seconds)[(len(seconds) - 1) // 4]


def timed(
    meter: Meter | None,
    stamp: Callable[[], Stamp],
    iteration: int,
    kind: Kind,
    subject: int = 0,
    unit: int | None = None,
) -> AbstractContextManager[None]:
    """Measures work inside a stream, given the stream's `stamp`. Does nothing without a meter."""
    if meter is None or iteration < meter.warm_up:
        return nullcontext()
    return meter.timed(stamp, iteration, kind, subject, unit)


Likeness = tuple[type, tuple[tuple[str, object], ...], tuple[str, ...]]
Pass = tuple[Kind, Likeness]  # forward or backward through layers of one kind


def likeness(spec: ModelSpec, layer: Layer | HeadLayer) -> Likeness:
    """A key that is equal for layers with the same computation and the same trained parameters."""
    assert is_dataclass(layer)
    names = [f.name for f in fields(layer) if f.name not in ("name", "units")]
    trained = (param.name for unit in spec.trained(layer.units) for param in spec.units[unit].params)
    return type(layer), tuple((name, getattr(layer, name)) for name in names), tuple(sorted(trained))


def measured_stages(spec: ModelSpec, stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """A few short stages in which every kind of layer is timed, forward and backward.

    The fused stage, because only it has the head, and then the stage that times most of what is left, the shortest one
    of several, until nothing is left. In dispatch order: in consecutive iterations they then hardly overlap.
    """
    timed_in = {stage: _timed(spec, stage) for stage in stages}
    chosen = [stage for stage in stages if stage.kind == "FB"]
    left = _passes(spec).difference(*(timed_in[stage] for stage in chosen))
    while left:
        best = max(stages, key=lambda stage: (len(left & timed_in[stage]), -len(stage.layers)))
        assert left & timed_in[best], "a plan has every layer"
        chosen.append(best)
        left -= timed_in[best]
    return tuple(stage for stage in stages if stage in chosen)


def _passes(spec: ModelSpec) -> set[Pass]:
    """All passes that are timed. The head has none forward."""
    forward: set[Pass] = {("forward", likeness(spec, layer)) for layer in spec.layers}
    backward: set[Pass] = {("backward", likeness(spec, layer)) for layer in spec.stack}
    return forward | backward


def _timed(spec: ModelSpec, stage: Stage) -> set[Pass]:
    """The passes that are timed in a stage. Of its last layer, a backward stage computes less than the forward pass."""
    kinds = [likeness(spec, spec.stack[layer]) for layer in stage.layers]
    forward: set[Pass] = {("forward", kind) for kind in (kinds[:-1] if stage.backward else kinds)}
    backward: set[Pass] = {("backward", kind) for kind in kinds if stage.backward}
    return forward | backward
