"""Uploads of parameters and downloads of gradients, in chunks that are spread over the micro-batches of a slot.

A transfer never blocks its device while there is other work to issue: a chunk whose unit is not ready (the optimizer
has not written the version, or not read the last gradient, or the file was not read) is left to a later window.
"""

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from rptrain.engine.context import Context
from rptrain.engine.devices.base import Device, Event, Stream
from rptrain.engine.memory.unit_state import UnitState
from rptrain.engine.meter import Kind
from rptrain.engine.trace import Arrival
from rptrain.engine.transfer.layouts import GradLayout, ParamLayout, UnitOffsets
from rptrain.engine.transfer.staging import Staging
from rptrain.schedule.lower import CHUNK_BYTES, Chunk, windows
from rptrain.schedule.plan import Slot

DRAINED = 4 * CHUNK_BYTES  # bytes of gradients per window: a few milliseconds of a link


@dataclass(frozen=True)
class DeviceLink:
    """What all uploads and downloads of a device share."""

    context: Context
    device: Device
    staging: Staging | None  # if some units are file-backed
    rounded: Tensor | None  # through which gradients are rounded, a chunk at a time; None: none are


class _Transfer(ABC):
    """A transfer that is issued window by window on one stream, as far as units are ready."""

    def __init__(
        self,
        link: DeviceLink,
        stream: Stream,
        layout: UnitOffsets,
        iteration: int,
        slot: Slot,
        windows: Iterable[Sequence[Chunk]],
    ) -> None:
        self._context, self._stream, self._layout = link.context, stream, layout
        self._recorder = self._context.recorder.devices[slot.device]
        self._iteration = iteration
        self._windows = deque(windows)
        self._late: deque[Chunk] = deque()  # chunks of windows that have passed

    def issue(self, after: Event) -> None:
        """Issues late chunks and the next window, after `after`, up to the first chunk that is not ready."""
        if not self._windows and not self._late:
            return
        self._stream.wait(after)
        if self._windows:
            self._late.extend(self._windows.popleft())
        while self._late and self._ready(self._late[0]):
            self._copy(self._late.popleft())

    def _issue_all(self, units: Collection[int]) -> None:
        """Issues every remaining chunk up to the last of `units`; blocks until they are ready."""
        while self._windows:
            self._late.extend(self._windows.popleft())
        left = sum(chunk.unit in units for chunk in self._late)
        while left:
            chunk = self._late.popleft()
            with self._recorder.waiting_for_optimizer():
                self._context.board.wait(("version", chunk.unit), self._awaited)
            self._copy(chunk)
            left -= chunk.unit in units

    def _ready(self, chunk: Chunk) -> bool:
        return self._context.board.ready(("version", chunk.unit), self._awaited)

    @property
    @abstractmethod
    def _awaited(self) -> int:
        """The version that must have been published before a chunk of a unit can be issued."""

    @abstractmethod
    def _copy(self, chunk: Chunk) -> None: ...

    def _move(self, kind: Kind, where: str, unit: int, target: Tensor, source: Tensor, rounded: Tensor | None) -> None:
        """Appends the copy of a chunk, by way of a place in `rounded` if it is given."""
        with self._context.recorder.timed(self._stream.mark, self._iteration, kind, target.nbytes, unit):
            if rounded is None:
                self._stream.copy(where, target, source)
                return
            place = rounded[: len(source)]
            self._stream.run(f"{where} rounding", lambda: place.copy_(source))
            self._stream.copy(where, target, place)


class Upload(_Transfer):
    """Fills a parameter slot for one dispatched stage, during the slot before it."""

    def __init__(
        self, link: DeviceLink, layout: ParamLayout, iteration: int, slot: Slot, target: Tensor, count: int
    ) -> None:
        """`target`: the slot, in bytes. Requests its file-backed units from the link's staging. `count`: windows, one
        for each micro-batch of the slot before. An empty slot needs no parameters.
        """
        sizes = layout.sizes if slot.micro_batches else ()
        parts = windows(sizes, max(1, count), CHUNK_BYTES)
        super().__init__(link, link.device.param_upload, layout, iteration, slot, parts)
        self._where, self._target = f"{slot} upload", target
        self._version = self._context.read_version(iteration)
        self._staging = link.staging
        if self._staging is not None:
            units = self._context.store.units
            self._staging.request(
                c for window in self._windows for c in window if units[c.unit].file_backed is not None
            )

    def _ready(self, chunk: Chunk) -> bool:
        read = (
            self._context.store.units[chunk.unit].file_backed is None or self._staging is None or self._staging.ready()
        )
        return read and super()._ready(chunk)

    @property
    def _awaited(self) -> int:
        return self._version

    def is_blocked(self) -> bool:
        """Whether a unit's version was not published yet, so that `finish` would wait for the optimizer."""
        board = self._context.board
        return not all(board.ready(("version", unit), self._version) for unit in self._layout.units)

    @property
    def nbytes(self) -> int:
        """The size of the stage's parameters on the device."""
        return self._layout.size

    @property
    def is_issued(self) -> bool:
        """Whether every chunk was issued, so that `finish` would not block."""
        return not self._late and not any(self._windows)

    def finish(self, units: Collection[int] | None = None) -> Event:
        """Issues every chunk up to the last of `units` (default: all); blocks until the optimizer has written them.

        Returns the event of their arrival.
        """
        self._issue_all(self._layout.units if units is None else units)
        return self._stream.record()

    def arrival(self, units: Collection[int] | None = None) -> Arrival | None:
        """After `finish`, in a traced engine: when these units (default: all) were published, and when they arrived."""
        return self._recorder.arrival(self._layout.units if units is None else units, self._version, self._stream)

    def _copy(self, chunk: Chunk) -> None:
        generation = self._context.board.wait(("version", chunk.unit), self._version)
        state = self._context.store.units[chunk.unit]
        offset = self._layout.offsets[chunk.unit]
        target = self._target[offset + chunk.start : offset + chunk.stop]
        self._recorder.uploaded(target.nbytes)
        with staged(self._staging, state, self._stream, generation, chunk) as source:
            self._move("upload", self._where, chunk.unit, target, source, None)


@contextmanager
def staged(
    staging: Staging | None, state: UnitState, stream: Stream, generation: int, chunk: Chunk
) -> Iterator[Tensor]:
    """A chunk of a unit in host memory; its copy must be issued to the stream within the context.

    Blocks until a file-backed chunk was read; chunks are read in the order of their requests.
    """
    if state.file_backed is None:
        yield state.uploaded(generation)[chunk.start : chunk.stop]
        return
    assert staging is not None
    number, buffer = staging.take()
    yield buffer[: chunk.stop - chunk.start]
    staging.emptied(number, stream.record())


class Download(_Transfer):
    """Downloads a stage's gradients during the slot after it, the last layers first, because async updates them first.

    Chunks that are downloaded in another type are first rounded into the link's buffer, which all of them share: the
    stream orders them.

    Windows have DRAINED bytes, or more if there are too few micro-batches, and do not spread over the whole slot: the
    update cannot begin before the last window, and the iteration after the next waits for it.
    """

    def __init__(
        self, link: DeviceLink, layout: GradLayout, iteration: int, slot: Slot, source: Tensor, computed: Event
    ) -> None:
        """`computed`: the event after which `source` has all gradients."""
        itemsize = link.context.store.layout.grad_dtype.itemsize
        count = max(1, min(len(slot.micro_batches), -(-len(source) * itemsize // DRAINED)))
        parts = windows(layout.sizes[::-1], count, CHUNK_BYTES // itemsize)
        super().__init__(link, link.device.grad_download, layout, iteration, slot, parts)
        self._where, self._source, self._rounded = f"{slot} download", source, link.rounded
        self._computed = computed
        first = iteration * self._context.plan.turns + slot.turn
        self._group, self._passes = slot.group, range(first, first + slot.turns)
        self._left = Counter(chunk.unit for window in self._windows for chunk in window)

    @property
    def _awaited(self) -> int:
        """The version made from the previous gradients, after which their buffers may be overwritten."""
        return self._iteration

    def flush(self) -> None:
        """Issues every remaining chunk; blocks until the optimizer has read the previous gradients."""
        self._stream.wait(self._computed)
        self._issue_all(self._layout.units)

    def _copy(self, chunk: Chunk) -> None:
        offset = self._layout.offsets[chunk.unit]
        source = self._source[offset + chunk.start : offset + chunk.stop]
        target = self._context.store.units[chunk.unit].grads[self._group][chunk.start : chunk.stop]
        self._recorder.downloaded(target.nbytes)
        rounded = None if target.dtype == source.dtype else self._rounded
        self._move("download", self._where, chunk.unit, target, source, rounded)
        self._left[chunk.unit] -= 1
        if not self._left[chunk.unit]:
            event = self._stream.record()
            for number in self._passes:
                self._context.board.publish(("grad", chunk.unit, self._group), number, event)
