"""The device memory that a plan needs: parameters, gradient accumulators, rings, and the largest stage's workspace."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import add
from typing import NamedTuple

import torch

from rptrain.engine.memory.step_layout import StepLayout
from rptrain.engine.transfer.inputs import index_bytes
from rptrain.engine.transfer.layouts import stage_units
from rptrain.models.params import Unit
from rptrain.models.spec import ModelShape
from rptrain.schedule.lower import CHUNK_BYTES, RING, outputs
from rptrain.schedule.plan import Stage

ALIGNMENT = 512  # bytes; a stage's parameters and gradient accumulators take a multiple of it
ROTATION = 16  # bytes per token and frequency of rotary positions: angle, cosine, sine and one of these scaled


class StageMemory(NamedTuple):
    """Bytes that a stage needs on a device."""

    params: int
    prepared: int  # what the device makes of the parameters: dequantized, in FP8, or codes transposed
    sums: int  # gradient accumulators
    work: int  # saved tensors and temporaries


@dataclass(frozen=True)
class Footprint:
    """Bytes of each part of device memory, and the number of entries of the output ring."""

    outputs: int
    params: int  # those of a stage and of the next one
    prepared: int
    sums: int  # those of a stage, and of the one before until they were downloaded
    rounded: int  # a chunk of rounded gradients
    rings: int  # boundary activations
    indices: int  # index tensors of batches: positions, labels, document boundaries
    work: int  # of the largest stage

    @property
    def total(self) -> int:
        return self.params + self.prepared + self.sums + self.rounded + self.rings + self.indices + self.work


def stage_bytes(spec: ModelShape, stage: Stage, dtype: torch.dtype) -> int:
    """Bytes of the stage's parameters as they are uploaded."""
    return sum(spec.units[unit].wire_bytes(dtype.itemsize) for unit in stage_units(spec, stage))


def stage_prepared(spec: ModelShape, stage: Stage, dtype: torch.dtype) -> int:
    """Bytes of the stage's parameters that the device makes from the uploaded ones."""
    units = (spec.units[unit] for unit in stage_units(spec, stage))
    return sum(unit.prepared_bytes(dtype.itemsize, backward=stage.backward) for unit in units)


def stage_memory(spec: ModelShape, stage: Stage, layout: StepLayout) -> StageMemory:
    """The memory that a stage needs, in whole ALIGNMENTs where two stages share a buffer."""
    return StageMemories(spec, layout).of(stage)


class StageMemories:
    """The memory that each of many stages needs, from that of its layers."""

    def __init__(self, spec: ModelShape, layout: StepLayout) -> None:
        self._spec, self._layout = spec, layout
        self._known: dict[Stage, StageMemory] = {}

    def of(self, stage: Stage) -> StageMemory:
        """As the function `stage_memory`."""
        if (found := self._known.get(stage)) is None:
            found = self._known[stage] = self._of(stage)
        return found

    def _of(self, stage: Stage) -> StageMemory:
        start, stop, layers = stage.start, stage.stop, slice(stage.start, stage.stop)
        prepared = self._prepared_backward if stage.backward else self._prepared_forward
        kept = self._kept[layers]
        work = (sum(kept) if stage.backward else max(kept)) + max(self._workspace[layers])
        return StageMemory(
            _whole(self._wire[stop] - self._wire[start]),
            prepared[stop] - prepared[start],
            _whole(self._sums[stop] - self._sums[start]) if stage.backward else 0,
            work + self._layout.tokens * self._rotation,
        )

    @cached_property
    def _rotation(self) -> int:
        """Bytes per token of the tables of all rotary positions."""
        rotaries = self._spec.rotaries
        return ROTATION * sum(len(rotary.inv_freq) + (rotary.query_scaling is not None) for rotary in rotaries)

    def _before(self, nbytes: Callable[[Unit], int]) -> list[int]:
        """The bytes of all layers before each one, and of all."""
        units = self._spec.units
        return [0, *accumulate(sum(nbytes(units[unit]) for unit in layer.units) for layer in self._spec.stack)]

    @cached_property
    def _wire(self) -> list[int]:
        return self._before(lambda unit: unit.wire_bytes(self._layout.dtype.itemsize))

    @cached_property
    def _prepared_forward(self) -> list[int]:
        return self._before(lambda unit: unit.prepared_bytes(self._layout.dtype.itemsize, backward=False))

    @cached_property
    def _prepared_backward(self) -> list[int]:
        return self._before(lambda unit: unit.prepared_bytes(self._layout.dtype.itemsize, backward=True))

    @cached_property
    def _sums(self) -> list[int]:
        itemsize = self._layout.wide.itemsize
        return self._before(lambda unit: unit.numel * itemsize if unit.trainable else 0)

    @cached_property
    def _kept(self) -> list[int]:
        layout = self._layout
        return [layer.kept_bytes(layout.tokens, layout.dtype.itemsize) for layer in self._spec.stack]

    @cached_property
    def _workspace(self) -> list[int]:
        tokens, itemsize, fused = self._layout.tokens, self._layout.dtype.itemsize, self._layout.fused
        return [layer.workspace_bytes(tokens, itemsize, fused=fused) for layer in self._spec.stack]


def shared_bytes(stages: Sequence[StageMemory], width: int, largest_layer: int) -> tuple[int, int, int, int]:
    """Bytes for all stages of a plan: parameters, prepared parameters, gradient accumulators, workspace.

    Parameters are uploaded while the device's previous stage is computed, and accumulators are downloaded while the
    next one is, so that both buffers hold any two stages that follow one another on a device while no iteration is
    short. The stage at one place of `stages` is followed by the one `width` places later. An evaluation uploads single
    layers beside the next stage.
    """
    params, prepared, sums, work = zip(*stages, strict=True)
    turn = width % len(stages)
    return (
        max(max(params) + _whole(largest_layer), *map(add, params, params[turn:] + params[:turn])),
        max(prepared),
        max(map(add, sums, sums[turn:] + sums[:turn])),
        max(work),
    )


def largest_layer(spec: ModelShape, dtype: torch.dtype) -> int:
    """Bytes of the parameters of the largest layer."""
    return max(sum(spec.units[unit].wire_bytes(dtype.itemsize) for unit in layer.units) for layer in spec.stack)


def rounded_bytes(spec: ModelShape, layout: StepLayout) -> int:
    """Bytes of the buffer through which rounded gradients are downloaded; none if the accumulators are."""
    units = [spec.units[unit] for layer in spec.stack for unit in spec.trained(layer.units)]
    rounded = (unit.numel for unit in units if layout.grad_dtype_of(unit) != layout.wide)
    return min(CHUNK_BYTES, max(rounded, default=0) * layout.grad_dtype.itemsize)


def ring_parts(spec: ModelShape, stages: Sequence[Stage], layout: StepLayout) -> tuple[int, int, int]:
    """Entries of the output ring, bytes of all rings, and bytes of the index tensors."""
    entries = RING * max(outputs(stages)[0])
    boundary = layout.tokens * spec.hidden_size * layout.dtype.itemsize
    return entries, (2 * RING + entries) * boundary, index_bytes(layout)


def footprint(spec: ModelShape, stages: Sequence[Stage], layout: StepLayout, width: int = 1) -> Footprint:
    """The device memory that a plan with these stages needs. A device has every `width`-th slot of its group."""
    memories = StageMemories(spec, layout)
    memory = [memories.of(stage) for stage in stages]
    params, prepared, sums, work = shared_bytes(memory, width, largest_layer(spec, layout.dtype))
    entries, rings, indices = ring_parts(spec, stages, layout)
    return Footprint(entries, params, prepared, sums, rounded_bytes(spec, layout), rings, indices, work)


def _whole(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
