"""What a plan needs on a device, in bytes: two parameter slots, gradient slots, rings, and the largest stage's work."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rptrain.engine.memory import accumulate_dtype
from rptrain.models.spec import ModelSpec
from rptrain.plan.lower import boundaries
from rptrain.plan.schedule import Stage

RING = 2  # entries of each input ring: one is computed on, one arrives


@dataclass(frozen=True)
class Shapes:
    """Sizes a device's memory is planned for: T tokens a micro-batch, in rows of `length`."""

    tokens: int
    length: int
    micro_batches: int
    dtype: torch.dtype
    wide_grad: bool  # gradients leave the device as float32 partial sums


@dataclass(frozen=True)
class Footprint:
    """Elements of the slots and bytes of each part of a device's memory."""

    param_numel: int  # of one parameter slot
    grad_numel: int
    outputs: int  # entries of the output ring
    params: int
    grads: int
    rings: int
    work: int  # saved tensors and temporaries of the stage that needs most

    @property
    def total(self) -> int:
        return self.params + self.grads + self.rings + self.work


def stage_numel(spec: ModelSpec, stage: Stage) -> int:
    """Elements of the stage's parameter units."""
    return sum(spec.units[u].numel for layer in spec.stack[stage.start : stage.stop] for u in layer.units)


def footprint(spec: ModelSpec, stages: Sequence[Stage], shapes: Shapes) -> Footprint:
    itemsize, wide = shapes.dtype.itemsize, accumulate_dtype(shapes.dtype).itemsize
    param_numel = max(stage_numel(spec, stage) for stage in stages)
    grad_numel = max(stage_numel(spec, stage) for stage in stages if stage.backward)
    outputs = RING * max(max(len(io.x_out), 1) for io in boundaries(stages).stages)
    boundary = shapes.tokens * spec.hidden_size * itemsize
    indices = 2 * shapes.micro_batches * shapes.tokens * (8 + 8 + 4)
    return Footprint(
        param_numel,
        grad_numel,
        outputs,
        params=2 * param_numel * itemsize,
        grads=grad_numel * (wide + (wide if shapes.wide_grad else itemsize)),
        rings=(2 * RING + outputs) * boundary + indices,
        work=max(_work(spec, stage, shapes) for stage in stages) + shapes.tokens * 1024,
    )


def _work(spec: ModelSpec, stage: Stage, shapes: Shapes) -> int:
    layers = spec.stack[stage.start : stage.stop]
    kept = [layer.kept_bytes(shapes.tokens, shapes.dtype.itemsize) for layer in layers]
    workspace = max(layer.workspace_bytes(shapes.tokens, shapes.dtype.itemsize) for layer in layers)
    return (sum(kept) if stage.backward else max(kept)) + workspace
