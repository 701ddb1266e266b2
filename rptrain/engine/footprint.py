"""The device memory that a plan needs: parameter and gradient slots, rings, and the workspace of the largest stage."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rptrain.engine.store import accumulate_dtype
from rptrain.engine.transfer.inputs import index_bytes
from rptrain.models.spec import ModelShape
from rptrain.schedule.lower import RING, outputs
from rptrain.schedule.plan import Stage

ROTATION = 1024  # bytes per token: cosines, sines and their angles; heads of 128 take 768


@dataclass(frozen=True)
class Shapes:
    """The sizes for which device memory is planned: T tokens per micro-batch."""

    tokens: int
    micro_batches: int
    dtype: torch.dtype
    wide_grad: bool  # gradients are downloaded as float32 partial sums
    fused: bool = False  # the fused kernels run, which keep no upcast copies


@dataclass(frozen=True)
class Footprint:
    """Elements of the slots, and bytes of each part of device memory."""

    param_bytes: int  # one parameter slot
    grad_numel: int
    outputs: int  # entries of the output ring
    params: int  # both slots
    prepared: int  # what a device makes of a stage's parameters: dequantized, in FP8, or codes transposed
    grads: int
    rings: int  # boundary activations
    indices: int  # index tensors of batches: positions, labels, document boundaries
    work: int  # saved tensors and temporaries of the largest stage

    @property
    def slots(self) -> tuple[int, int, int, int]:
        """Bytes of the parts whose size the largest stage sets; see `stage_parts`."""
        return self.params, self.prepared, self.grads, self.work

    @property
    def total(self) -> int:
        return sum(self.slots) + self.rings + self.indices


def stage_units(spec: ModelShape, stage: Stage) -> tuple[int, ...]:
    """The stage's parameter units, in order."""
    return tuple(unit for layer in spec.stack[stage.start : stage.stop] for unit in layer.units)


def stage_bytes(spec: ModelShape, stage: Stage, dtype: torch.dtype) -> int:
    """Bytes of the stage's parameters as they are uploaded."""
    return sum(spec.units[unit].wire_bytes(dtype.itemsize) for unit in stage_units(spec, stage))


def stage_prepared(spec: ModelShape, stage: Stage, dtype: torch.dtype) -> int:
    """Bytes of the stage's parameters that the device makes from the uploaded ones."""
    units = (spec.units[unit] for unit in stage_units(spec, stage))
    return sum(unit.prepared_bytes(dtype.itemsize, backward=stage.backward) for unit in units)


def stage_grad_numel(spec: ModelShape, stage: Stage) -> int:
    """Elements of the gradients that the stage computes."""
    units = spec.trained(stage_units(spec, stage)) if stage.backward else ()
    return sum(spec.units[unit].numel for unit in units)


def stage_parts(spec: ModelShape, stage: Stage, shapes: Shapes) -> tuple[int, int, int, int]:
    """Bytes of parameter slots, prepared parameters, gradient slots and workspace that a stage needs.

    A plan needs the largest of each.
    """
    itemsize, wide = shapes.dtype.itemsize, accumulate_dtype(shapes.dtype).itemsize
    return (
        2 * stage_bytes(spec, stage, shapes.dtype),
        stage_prepared(spec, stage, shapes.dtype),
        stage_grad_numel(spec, stage) * (wide + (wide if shapes.wide_grad else itemsize)),
        _work(spec, stage, shapes) + shapes.tokens * ROTATION,
    )


def ring_parts(spec: ModelShape, stages: Sequence[Stage], shapes: Shapes) -> tuple[int, int, int]:
    """Entries of the output ring, bytes of all rings, and bytes of the index tensors."""
    entries = RING * max(outputs(stages)[0])
    boundary = shapes.tokens * spec.hidden_size * shapes.dtype.itemsize
    return entries, (2 * RING + entries) * boundary, index_bytes(shapes.micro_batches, shapes.tokens)


def footprint(spec: ModelShape, stages: Sequence[Stage], shapes: Shapes) -> Footprint:
    """The device memory that a plan with these stages needs."""
    parts = zip(*(stage_parts(spec, stage, shapes) for stage in stages), strict=True)
    params, prepared, grads, work = (max(part) for part in parts)
    entries, rings, indices = ring_parts(spec, stages, shapes)
    return Footprint(
        max(stage_bytes(spec, stage, shapes.dtype) for stage in stages),
        max(stage_grad_numel(spec, stage) for stage in stages),
        entries,
        params,
        prepared,
        grads,
        rings,
        indices,
        work,
    )


def _work(spec: ModelShape, stage: Stage, shapes: Shapes) -> int:
    layers = spec.stack[stage.start : stage.stop]
    kept = [layer.kept_bytes(shapes.tokens, shapes.dtype.itemsize) for layer in layers]
    workspace = max(layer.workspace_bytes(shapes.tokens, shapes.dtype.itemsize, fused=shapes.fused) for layer in layers)
    return (sum(kept) if stage.backward else max(kept)) + workspace
