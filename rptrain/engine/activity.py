"""What an engine does at a moment: notes that its threads make in passing, which anybody may read.

Marks lie in the streams, so nothing waits for them, and nothing that is computed depends on them.
"""

import time
from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from rptrain.engine.devices.base import Mark, Stream
from rptrain.schedule.plan import Kind, Slot

REASONS = {  # what a device's thread waits for, by the first word of the board's key
    "boundary": "activations",
    "version": "the optimizer",
    "grad": "gradient sums",
    "scale": "the loss scale",
    "staged": "the model's files",
}


@dataclass(frozen=True)
class Pass:
    """A micro-batch that was issued to a device, in the pieces that are computed without a wait in between."""

    iteration: int  # counts from 0 since the engine was opened
    slot: Slot
    micro_batch: int
    pieces: list[tuple[Mark, Mark]] = field(default_factory=list)

    @property
    def computing(self) -> bool:
        return any(start.passed() and not end.passed() for start, end in tuple(self.pieces))

    @property
    def seconds(self) -> float:
        """Of computation up to now."""
        now = time.perf_counter()
        return sum((end() if end.passed() else now) - start() for start, end in tuple(self.pieces) if start.passed())


@dataclass(frozen=True)
class LaneState:
    """A device now; `busy`, `up` and `down` count from when the engine was opened."""

    current: Pass | None  # that it computes, or will once what it waits for is there
    computing: bool
    waiting: str | None  # for what, where it does not compute ("inputs": on their way); None where it was given nothing
    busy: Mapping[Kind, float]  # seconds of computation, by kind of stage
    up: int  # bytes of copies to the device that were issued
    down: int


class DeviceActivity:
    """A device's notes. Its thread writes them; others read `state`, which knows of times if the lane is `watched`."""

    def __init__(self, *, watched: bool) -> None:
        self._watched = watched
        self.up = self.down = 0
        self._busy: dict[Kind, float] = {"F": 0.0, "FB": 0.0, "B": 0.0}
        self._under_way: deque[Pass] = deque()

    def begin(self, iteration: int, slot: Slot, micro_batch: int) -> None:
        """A micro-batch is issued from now on."""
        self._under_way.append(Pass(iteration, slot, micro_batch))

    @contextmanager
    def computing(self, stream: Stream) -> Iterator[None]:
        """Around what is computed of it, behind what the stream waits for."""
        if not self._watched:
            yield
            return
        start = stream.mark()
        yield
        self._under_way[-1].pieces.append((start, stream.mark()))

    def finish(self) -> None:
        """The oldest micro-batch under way is done: the device was waited for."""
        done = self._under_way.popleft()
        self._busy[done.slot.stage.kind] += done.seconds

    def state(self, waits_for: Hashable | None) -> LaneState:
        """`waits_for` is the board's key for which the device's thread waits. Right to within a micro-batch's time."""
        busy, under_way = dict(self._busy), tuple(self._under_way)
        for one in under_way:
            busy[one.slot.stage.kind] += one.seconds
        left = [one for one in under_way if not one.pieces or not one.pieces[-1][1].passed()]
        computing = bool(left) and left[0].computing
        waiting = None
        if waits_for is not None and not computing:
            waiting = REASONS[waits_for[0]] if isinstance(waits_for, tuple) else str(waits_for)
        elif left and not computing:
            waiting = "inputs" if left[0].pieces else "launch"
        return LaneState(left[0] if left else None, computing, waiting, busy, self.up, self.down)


@dataclass(frozen=True)
class Activity:
    """An engine now."""

    lanes: tuple[LaneState, ...]
    optimizer: str  # what its thread does
    update_seconds: float | None  # of the last update; None before the first
    queue: int  # steps that were submitted and not applied
