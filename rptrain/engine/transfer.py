"""Parameters up and gradients down, in chunks that are dealt to the micro-batches of a slot.

Neither ever blocks its device while there is something else to issue: a chunk whose unit is not ready yet (the
optimizer has not written the version, or has not read the last gradient) stays for a later window.
"""

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from rptrain.engine.context import Context
from rptrain.engine.device import Device, Event, Stream
from rptrain.engine.footprint import stage_units
from rptrain.engine.meter import Kind, timed
from rptrain.engine.trace import Arrival
from rptrain.models.spec import ModelSpec
from rptrain.plan.lower import CHUNK_BYTES, Chunk, windows
from rptrain.plan.schedule import Slot, Stage

DRAINED = 16 * CHUNK_BYTES  # of gradients in a window: a few milliseconds of a link


class StageLayout:
    """Where the units of a stage lie in a device's parameter slot, or the trainable ones in its gradient slot, in
    elements.
    """

    def __init__(self, spec: ModelSpec, stage: Stage, *, grads: bool = False) -> None:
        units = stage_units(spec, stage)
        self._spec, self._stage = spec, stage
        self.units = spec.trained(units) if grads else units
        self.offsets: dict[int, int] = {}
        self.numel = 0
        for unit in self.units:
            self.offsets[unit] = self.numel
            self.numel += spec.units[unit].numel

    def bind(self, flat: Tensor) -> list[dict[str, Tensor]]:
        """For each layer of the stage, its parameters (or gradients) as views of a slot."""
        spec = self._spec
        return [
            {
                name: view
                for u in layer.units
                if u in self.offsets
                for name, view in spec.units[u].views(flat[self.offsets[u] :][: spec.units[u].numel]).items()
            }
            for layer in spec.stack[self._stage.start : self._stage.stop]
        ]


class _Transfer(ABC):
    """Chunks that are issued window by window on one stream, as far as their units are ready."""

    def __init__(
        self,
        context: Context,
        stream: Stream,
        layout: StageLayout,
        units: Sequence[int],
        iteration: int,
        count: int,
        dtype: torch.dtype,
    ) -> None:
        """`count` windows."""
        self._context, self._stream, self._layout = context, stream, layout
        self._iteration = iteration
        sizes = [(unit, context.store.spec.units[unit].numel) for unit in units]
        self._windows = deque(windows(sizes, count, CHUNK_BYTES // dtype.itemsize))
        self._late: deque[Chunk] = deque()  # of windows that have passed

    def issue(self, after: Event) -> None:
        """The next window, behind `after`, and what is late; a chunk that is not ready ends it."""
        self._stream.wait(after)
        if self._windows:
            self._late.extend(self._windows.popleft())
        while self._late and self._context.board.ready(("version", self._late[0].unit), self._awaited):
            self._copy(self._late.popleft())

    def _issue_all(self, units: Collection[int]) -> None:
        """Every remaining chunk up to the last of `units`; blocks for those that are not ready."""
        while self._windows:
            self._late.extend(self._windows.popleft())
        left = sum(chunk.unit in units for chunk in self._late)
        while left:
            chunk = self._late.popleft()
            self._context.board.wait(("version", chunk.unit), self._awaited)
            self._copy(chunk)
            left -= chunk.unit in units

    @property
    @abstractmethod
    def _awaited(self) -> int:
        """The version that must have been published before a chunk of a unit can be issued."""

    @abstractmethod
    def _copy(self, chunk: Chunk) -> None: ...

    def _move(self, kind: Kind, target: Tensor, source: Tensor) -> None:
        """Inside the stream."""
        with timed(self._context.meter, self._stream.stamp, self._iteration, kind, source.nbytes):
            target.copy_(source, non_blocking=True)


class Upload(_Transfer):
    """Fills a parameter slot for one dispatched stage, during the slot before it."""

    def __init__(
        self, context: Context, device: Device, layout: StageLayout, iteration: int, slot: Slot, target: Tensor
    ) -> None:
        count = len(slot.micro_batches)
        super().__init__(context, device.param_upload, layout, layout.units, iteration, count, target.dtype)
        self._where, self._target, self._lane = f"{slot} upload", target, context.lanes[slot.device]
        self._version = context.read_version(iteration)

    @property
    def _awaited(self) -> int:
        return self._version

    def is_blocked(self) -> bool:
        """Whether a unit's version is not there yet: `finish` would wait for the optimizer."""
        board = self._context.board
        return not all(board.ready(("version", unit), self._version) for unit in self._layout.units)

    @property
    def is_issued(self) -> bool:
        """Whether every chunk has been: `finish` would not block."""
        return not self._late and not any(self._windows)

    def finish(self, units: Collection[int] | None = None) -> Event:
        """Issues every chunk up to the last of `units` (all without); blocks until the optimizer has written them.

        The event passes when they have arrived.
        """
        self._issue_all(self._layout.units if units is None else units)
        return self._stream.record()

    def arrival(self, units: Collection[int] | None = None) -> Arrival | None:
        """In a traced engine, behind `finish`: when these units (all without) were published, and arrived."""
        trace = self._context.trace
        if trace is None:
            return None
        wanted = self._layout.units if units is None else units
        published = max(trace.board.published(("version", unit), self._version) for unit in wanted)
        return Arrival(published, self._stream.mark())

    def _copy(self, chunk: Chunk) -> None:
        generation = self._context.board.wait(("version", chunk.unit), self._version)
        source = self._context.store.units[chunk.unit].params[generation][chunk.start : chunk.stop]
        offset = self._layout.offsets[chunk.unit]
        target = self._target[offset + chunk.start : offset + chunk.stop]
        self._lane.up += source.nbytes
        self._stream.run(self._where, lambda: self._move("upload", target, source))


class Download(_Transfer):
    """Drains a gradient slot to the host, during the slot after it, the last layers first: async updates them first.

    Not over the whole of that slot, but in windows of DRAINED bytes, or larger where there are too few micro-batches:
    the update, which the iteration after the next waits for, cannot begin before the last of them.
    """

    def __init__(
        self, context: Context, device: Device, layout: StageLayout, iteration: int, slot: Slot, source: Tensor
    ) -> None:
        count = min(len(slot.micro_batches), -(-source.nbytes // DRAINED))
        super().__init__(context, device.grad_download, layout, layout.units[::-1], iteration, count, source.dtype)
        self._where, self._source, self._lane = f"{slot} download", source, context.lanes[slot.device]
        self._pass = iteration * context.plan.rounds + slot.round
        self._left = Counter(chunk.unit for window in self._windows for chunk in window)

    @property
    def _awaited(self) -> int:
        """The version made from the last gradients, which they were read for."""
        return self._iteration

    def flush(self) -> None:
        """Every remaining chunk; blocks until the optimizer has read the last iteration's gradients."""
        self._issue_all(self._layout.units)

    def _copy(self, chunk: Chunk) -> None:
        offset = self._layout.offsets[chunk.unit]
        source = self._source[offset + chunk.start : offset + chunk.stop]
        target = self._context.store.units[chunk.unit].grad[chunk.start : chunk.stop]
        self._lane.down += source.nbytes
        self._stream.run(self._where, lambda: self._move("download", target, source))
        self._left[chunk.unit] -= 1
        if not self._left[chunk.unit]:
            self._context.board.publish(("grad", chunk.unit), self._pass, self._stream.record())
