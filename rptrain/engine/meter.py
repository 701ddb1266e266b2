"""What layers, copies and the optimizer took, from time stamps around each of them.

The stamps lie in the streams, so nothing waits for them, and nothing that is computed depends on them.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from statistics import median
from typing import Literal

from rptrain.models.spec import HeadLayer, Layer, ModelSpec

WARM_UP = 1  # iterations that are left out: caches, allocators and libraries settle in them

Stamp = Callable[[], float]  # seconds on `time.perf_counter`'s scale, once the point in the stream has passed
Kind = Literal["forward", "backward", "upload", "download", "update"]


@dataclass(frozen=True)
class Measured:
    """Times of a run; those of layers are lower quartiles over micro-batches and iterations, in seconds a micro-batch,
    and empty where the meter does not read layers.

    `forward` and `backward` are by layer of the stack, the head last; layers that differ in name and place only share
    theirs. `backward` has no recomputed forward in it, which takes what `forward` says. The head is computed forward
    and backward at once: its forward is 0.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    upload: float | None  # bytes a second of parameters to a device; None where none were moved
    download: float | None  # of gradients to the host
    update: float  # seconds of the optimizer for a step, from when it may begin
    steps: int  # steps that were measured


@dataclass(frozen=True)
class Reading:
    """One operation between two stamps; `thread` begins with the name of the device."""

    thread: str
    iteration: int
    kind: Kind
    subject: int  # the layer in the stack; of a copy its bytes
    start: Stamp
    end: Stamp
    unit: int | None = None  # that is copied


class Meter:
    """Collects the readings of an engine's threads. Thread-safe.

    `layers`: reads each pass over a layer too, for which a stage cannot be launched as one graph.
    """

    def __init__(self, *, layers: bool = True) -> None:
        self.layers = layers
        self._lock = threading.Lock()
        self._readings: list[Reading] = []

    @contextmanager
    def timed(
        self, stamp: Callable[[], Stamp], iteration: int, kind: Kind, subject: int, unit: int | None
    ) -> Iterator[None]:
        """Reads what is done inside; see `timed` below."""
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
        """What is typical of the steps that are complete; None where there are none yet.

        A step is complete once its update is, which follows all else. One that was skipped had no update, and does
        not count. A rate is that of all copies of an iteration together; the median is over iterations.
        """
        readings = self.readings
        complete = {reading.iteration for reading in readings if reading.kind == "update"}
        if not complete:
            return None
        layers: dict[tuple[Kind, Likeness], list[float]] = defaultdict(list)
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
    """The lower quartile: a thread that was late to launch, or a busy core, only adds to a layer's time."""
    return sorted(seconds)[(len(seconds) - 1) // 4]


def timed(
    meter: Meter | None,
    stamp: Callable[[], Stamp],
    iteration: int,
    kind: Kind,
    subject: int = 0,
    unit: int | None = None,
) -> AbstractContextManager[None]:
    """Around work inside a stream, with the stream's `stamp`: lets `meter` read it, or does nothing without one."""
    if meter is None or iteration < WARM_UP:
        return nullcontext()
    return meter.timed(stamp, iteration, kind, subject, unit)


Likeness = tuple[type, tuple[tuple[str, object], ...], tuple[str, ...]]


def likeness(spec: ModelSpec, layer: Layer | HeadLayer) -> Likeness:
    """Equal for layers that compute the same on other parameters, with the same of them trained."""
    assert is_dataclass(layer)
    names = [f.name for f in fields(layer) if f.name not in ("name", "units")]
    trained = (param.name for unit in spec.trained(layer.units) for param in spec.units[unit].params)
    return type(layer), tuple((name, getattr(layer, name)) for name in names), tuple(sorted(trained))
