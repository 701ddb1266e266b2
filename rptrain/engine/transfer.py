"""Parameters up and gradients down, in chunks that are dealt to the micro-batches of a slot.

Neither ever blocks its device while there is something else to issue: a chunk whose unit is not ready yet (the
optimizer has not written the version, or has not read the last gradient) stays for a later window.
"""

from collections import Counter

import torch
from torch import Tensor

from rptrain.engine.context import Context
from rptrain.engine.device import Device, Event
from rptrain.engine.footprint import stage_numel
from rptrain.plan.lower import Chunk, windows
from rptrain.plan.schedule import Slot, Stage

CHUNK_BYTES = 16 << 20  # copies have no priority in a copy engine: an activation waits for one chunk at most


class StageLayout:
    """Where each unit of a stage lies in a device's parameter and gradient slots, in elements."""

    def __init__(self, context: Context, stage: Stage) -> None:
        spec = context.store.spec
        self.units = tuple(u for layer in spec.stack[stage.start : stage.stop] for u in layer.units)
        self.numel = stage_numel(spec, stage)
        self.sizes = tuple((u, spec.units[u].numel) for u in self.units)
        self.offsets: dict[int, int] = {}
        offset = 0
        for unit, numel in self.sizes:
            self.offsets[unit] = offset
            offset += numel

    def bind(self, context: Context, stage: Stage, flat: Tensor) -> list[dict[str, Tensor]]:
        """For each layer of the stage, its parameters (or gradients) as views of a slot."""
        spec = context.store.spec
        return [
            {
                name: view
                for u in layer.units
                for name, view in spec.units[u].views(flat[self.offsets[u] :][: spec.units[u].numel]).items()
            }
            for layer in spec.stack[stage.start : stage.stop]
        ]


def _deal(layout: StageLayout, slot: Slot, dtype: torch.dtype) -> tuple[tuple[Chunk, ...], ...]:
    return windows(layout.sizes, len(slot.micro_batches), CHUNK_BYTES // dtype.itemsize)


class Upload:
    """Fills a parameter slot for one dispatched stage, during the slot before it."""

    def __init__(
        self,
        context: Context,
        device: Device,
        layout: StageLayout,
        iteration: int,
        slot: Slot,
        target: Tensor,
    ) -> None:
        self._context, self._device, self._layout, self._target = context, device, layout, target
        self._where = f"{slot} upload"
        self._version = context.read_version(iteration)
        self._rest = [c for window in _deal(layout, slot, target.dtype) for c in window]
        self._window = -(-len(self._rest) // len(slot.micro_batches))

    def issue(self, after: Event) -> None:
        """One window: the next chunks that are ready, behind `after`."""
        self._device.param_upload.wait(after)
        for _ in range(min(self._window, len(self._rest))):
            if not self._context.board.ready(("version", self._rest[0].unit), self._version):
                return
            self._copy(self._rest.pop(0))

    def blocked_by(self) -> int | None:
        """The unit whose version the next chunk waits for, if it is not there yet."""
        for chunk in self._rest:
            if not self._context.board.ready(("version", chunk.unit), self._version):
                return chunk.unit
        return None

    def finish(self) -> Event:
        """Every remaining chunk; blocks until the optimizer has written them. Passes when the slot is filled."""
        while self._rest:
            self._copy(self._rest.pop(0))
        return self._device.param_upload.record()

    def _copy(self, chunk: Chunk) -> None:
        generation = self._context.board.wait(("version", chunk.unit), self._version)
        source = self._context.store.units[chunk.unit].params[generation][chunk.start : chunk.stop]
        offset = self._layout.offsets[chunk.unit]
        target = self._target[offset + chunk.start : offset + chunk.stop]
        self._device.param_upload.run(self._where, lambda: _copy(target, source))


class Download:
    """Drains a gradient slot to the host, during the slot after it."""

    def __init__(
        self,
        context: Context,
        device: Device,
        layout: StageLayout,
        iteration: int,
        slot: Slot,
        source: Tensor,
    ) -> None:
        self._context, self._device, self._layout, self._source = context, device, layout, source
        self._where = f"{slot} download"
        self._iteration = iteration
        self._pass = iteration * context.plan.rounds + slot.round
        self._rest = [c for window in _deal(layout, slot, source.dtype) for c in window]
        self._window = -(-len(self._rest) // len(slot.micro_batches))
        self._left = Counter(chunk.unit for chunk in self._rest)

    def issue(self, after: Event) -> None:
        """One window: the next chunks whose host buffers the optimizer has read, behind `after`."""
        self._device.grad_download.wait(after)
        for _ in range(min(self._window, len(self._rest))):
            if not self._context.board.ready(("version", self._rest[0].unit), self._iteration):
                return
            self._copy(self._rest.pop(0))

    def flush(self) -> None:
        """Every remaining chunk; blocks until the optimizer has read the last iteration's gradients."""
        while self._rest:
            self._context.board.wait(("version", self._rest[0].unit), self._iteration)
            self._copy(self._rest.pop(0))

    def _copy(self, chunk: Chunk) -> None:
        offset = self._layout.offsets[chunk.unit]
        source = self._source[offset + chunk.start : offset + chunk.stop]
        target = self._context.store.units[chunk.unit].grad[chunk.start : chunk.stop]
        self._device.grad_download.run(self._where, lambda: _copy(target, source))
        self._left[chunk.unit] -= 1
        if not self._left[chunk.unit]:
            self._context.board.publish(("grad", chunk.unit), self._pass, self._device.grad_download.record())


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)
