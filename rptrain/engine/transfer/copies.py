"""Uploads of parameters and downloads of gradients, in chunks that are spread over the micro-batches of a slot.

A transfer never blocks its device while there is other work to issue: a chunk whose unit is not ready (the optimizer
has not written the version, or not read the last gradient, or the file was not read) is left to a later window.
"""

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from rptrain.engine.context import Context
from rptrain.engine.devices.base import Device, Event, Stream
from rptrain.engine.footprint import stage_units
from rptrain.engine.meter import Kind
from rptrain.engine.store import UnitState
from rptrain.engine.trace import Arrival
from rptrain.engine.transfer.staging import Staging
from rptrain.kernels import fp8
from rptrain.kernels.linear import Weight
from rptrain.kernels.quant import Quantized
from rptrain.kernels.requantize import requantize
from rptrain.models.spec import ModelSpec
from rptrain.schedule.lower import CHUNK_BYTES, Chunk, windows
from rptrain.schedule.plan import Slot, Stage

DRAINED = 4 * CHUNK_BYTES  # bytes of gradients per window: a few milliseconds of a link


class _Layout:
    """The offsets of units in a buffer, one after the other."""

    def __init__(self, sizes: Sequence[tuple[int, int]]) -> None:
        """`sizes`: the units in order, each with its size."""
        self.sizes = sizes
        self.units = tuple(unit for unit, _ in sizes)
        self.offsets: dict[int, int] = {}
        self.size = 0
        for unit, size in sizes:
            self.offsets[unit] = self.size
            self.size += size

    def of(self, unit: int, buffer: Tensor) -> Tensor:
        """The unit's part of the buffer."""
        return buffer[self.offsets[unit] :][: dict(self.sizes)[unit]]


@dataclass(frozen=True)
class Bound:
    """A layer's parameters on a device as the layer reads them, and those that are prepared: where from, where to."""

    params: dict[str, Weight]
    quantized: list[tuple[Quantized, Tensor]]
    in_fp8: list[tuple[Tensor | Quantized, fp8.FP8Weight]]
    dtype: torch.dtype  # of the model
    uploaded: list[fp8.FP8Weight]  # whose codes arrived, and of which a backward stage transposes a copy

    @property
    def prepared(self) -> bool:
        """Whether `prepare` does anything."""
        return bool(self.quantized or self.in_fp8 or self.uploaded)

    def prepare(self) -> None:
        """Dequantizes, quantizes to FP8, and transposes codes that were uploaded.

        Runs in the compute stream, after the layer's units have arrived.
        """
        for held, place in self.quantized:
            held.dequantize(place)
        for held, weight in self.in_fp8:
            if isinstance(held, Quantized):
                requantize(held, weight, self.dtype)
            else:
                weight.write(held)
        for weight in self.uploaded:
            weight.write_columns()


class ParamLayout(_Layout):
    """The offsets of a stage's units in a device's parameter slot, in bytes."""

    def __init__(self, spec: ModelSpec, stage: Stage, dtype: torch.dtype) -> None:
        units = stage_units(spec, stage)
        super().__init__([(unit, spec.units[unit].wire_bytes(dtype.itemsize)) for unit in units])
        self._spec, self._stage, self._dtype = spec, stage, dtype
        self._prepared = _Layout(
            [(unit, spec.units[unit].prepared_bytes(dtype.itemsize, backward=stage.backward)) for unit in units]
        )

    def bind(self, slot: Tensor, prepared: Tensor) -> list[Bound]:
        """For each layer of the stage, its parameters as views of a slot and of the buffer of prepared weights."""
        bound = []
        for layer in self._spec.stack[self._stage.start : self._stage.stop]:
            params, narrow = dict[str, Weight](), list[tuple[Quantized, Tensor]]()
            in_fp8: list[tuple[Tensor | Quantized, fp8.FP8Weight]] = []
            uploaded: list[fp8.FP8Weight] = []
            for index in layer.units:
                unit, buffer = self._spec.units[index], self._prepared.of(index, prepared)
                if unit.wired:
                    plain, weights = unit.wire_views(self.of(index, slot), self._dtype)
                    quantized = {}
                else:
                    plain, quantized = unit.held(self.of(index, slot), self._dtype)
                    weights = {param.name: param.fp8_of(quantized[param.name]) for param in unit.codes_uploaded}
                wide = unit.dequantized_bytes(self._dtype.itemsize)
                columns = unit.columns_views(buffer[wide:], backward=self._stage.backward)
                weights |= {name: weights[name]._replace(columns=place) for name, place in columns.items()}
                uploaded += [weights[name] for name in columns]
                places = unit.places(buffer[:wide].view(self._dtype))
                stored = plain | {param.name: param.dequantized_view(places[param.name]) for param in unit.dequantized}
                narrow += [(quantized[name], place) for name, place in places.items()]
                held = plain | quantized
                fp8_views = unit.fp8_views(buffer[wide:], backward=self._stage.backward)
                in_fp8 += [(held[name], weight) for name, weight in fp8_views.items()]
                params |= stored | weights | fp8_views
            bound.append(Bound(params, narrow, in_fp8, self._dtype, uploaded))
        return bound


class GradLayout(_Layout):
    """The offsets of a stage's trainable units among its gradient accumulators, in elements."""

    def __init__(self, spec: ModelSpec, stage: Stage) -> None:
        super().__init__([(unit, spec.units[unit].numel) for unit in spec.trained(stage_units(spec, stage))])
        self._spec, self._stage = spec, stage

    def bind(self, sums: Tensor) -> list[dict[str, Tensor]]:
        """For each layer of the stage, its gradients as views of the accumulators."""
        return [
            {
                name: view
                for unit in layer.units
                if unit in self.offsets
                for name, view in self._spec.units[unit].views(self.of(unit, sums)).items()
            }
            for layer in self._spec.stack[self._stage.start : self._stage.stop]
        ]


class _Transfer(ABC):
    """A transfer that is issued window by window on one stream, as far as units are ready."""

    def __init__(
        self,
        context: Context,
        stream: Stream,
        layout: _Layout,
        sizes: Sequence[tuple[int, int]],
        iteration: int,
        slot: Slot,
        count: int,
        chunk: int,
    ) -> None:
        """`count` windows of units with their sizes, in chunks of at most `chunk`."""
        self._context, self._stream, self._layout = context, stream, layout
        self._recorder = context.recorder.devices[slot.device]
        self._iteration = iteration
        self._windows = deque(windows(sizes, count, chunk))
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
        self,
        context: Context,
        device: Device,
        layout: ParamLayout,
        iteration: int,
        slot: Slot,
        target: Tensor,
        staging: Staging | None,
        count: int,
    ) -> None:
        """`target`: the slot, in bytes. Requests its file-backed units from `staging`. `count`: windows, one for each
        micro-batch of the slot before. An empty slot needs no parameters.
        """
        sizes = layout.sizes if slot.micro_batches else ()
        super().__init__(context, device.param_upload, layout, sizes, iteration, slot, max(1, count), CHUNK_BYTES)
        self._where, self._target = f"{slot} upload", target
        self._version = context.read_version(iteration)
        self._staging = staging
        if staging is not None:
            units = context.store.units
            staging.request(c for window in self._windows for c in window if units[c.unit].file_backed is not None)

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

    Each chunk is first rounded into `rounded`, if that is given, which all chunks share: the stream orders them.

    Windows have DRAINED bytes, or more if there are too few micro-batches, and do not spread over the whole slot: the
    update cannot begin before the last window, and the iteration after the next waits for it.
    """

    def __init__(
        self,
        context: Context,
        device: Device,
        layout: GradLayout,
        iteration: int,
        slot: Slot,
        source: Tensor,
        rounded: Tensor | None,
        computed: Event,
    ) -> None:
        """`computed`: the event after which `source` has all gradients."""
        itemsize = context.store.grad_dtype.itemsize
        count = max(1, min(len(slot.micro_batches), -(-len(source) * itemsize // DRAINED)))
        chunk = CHUNK_BYTES // itemsize
        super().__init__(context, device.grad_download, layout, layout.sizes[::-1], iteration, slot, count, chunk)
        self._where, self._source, self._rounded = f"{slot} download", source, rounded
        self._computed = computed
        first = iteration * context.plan.turns + slot.turn
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
        self._move("download", self._where, chunk.unit, target, source, self._rounded)
        self._left[chunk.unit] -= 1
        if not self._left[chunk.unit]:
            event = self._stream.record()
            for number in self._passes:
                self._context.board.publish(("grad", chunk.unit, self._group), number, event)
