"""Chooses a run's plan: devices, sizes and limits in, stages out, or an error that says what does not fit."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rptrain.devices import readable
from rptrain.engine.boundary import BoundaryBuffers
from rptrain.engine.footprint import Footprint, Shapes, footprint
from rptrain.engine.memory import ModelStore
from rptrain.errors import UserError
from rptrain.models.spec import ModelSpec
from rptrain.plan.lower import boundaries
from rptrain.plan.partition import LayerCost, partition
from rptrain.plan.schedule import Plan, Stage

LIBRARIES = 512 << 20  # bytes of a GPU's limit left to matrix and attention libraries, and to fragments


@dataclass(frozen=True)
class RunPlan:
    """A plan with the memory it takes: bytes on each device (allocator only) and on the host."""

    plan: Plan
    device: Footprint
    store_bytes: int
    boundary_bytes: int

    @property
    def host_bytes(self) -> int:
        return self.store_bytes + self.boundary_bytes


def layer_costs(spec: ModelSpec, tokens: int, length: int) -> list[LayerCost]:
    """Estimates from floating-point operations; backward recomputes forward first. The head has no forward stage."""
    costs = []
    for layer in spec.stack:
        forward, backward = layer.flops(tokens, length)
        costs.append(LayerCost(0.0 if layer is spec.head else forward, forward + backward))
    return costs


def make_plan(
    spec: ModelSpec,
    *,
    devices: int,
    rows: int,
    length: int,
    micro_batches: int,
    round_size: int,
    dtype: torch.dtype,
    asynchronous: bool,
    device_limit: int | None,
) -> RunPlan:
    """The partition that minimises the paper's objective within `device_limit` bytes of GPU memory.

    Raises UserError where not even single layers fit, with the layer and what it needs.
    """
    tokens = rows * length
    shapes = Shapes(tokens, length, micro_batches, dtype, micro_batches > round_size)
    costs = layer_costs(spec, tokens, length)
    stages = _fitting(spec, shapes, costs, devices, None if device_limit is None else device_limit - LIBRARIES)
    plan = Plan(stages, devices, micro_batches, round_size)
    return RunPlan(
        plan,
        footprint(spec, stages, shapes),
        ModelStore.nbytes(spec, dtype, generations=1 + asynchronous, wide_grad=shapes.wide_grad),
        BoundaryBuffers.nbytes(boundaries(stages), round_size, tokens, spec.hidden_size, dtype),
    )


def _fitting(
    spec: ModelSpec, shapes: Shapes, costs: Sequence[LayerCost], devices: int, limit: int | None
) -> tuple[Stage, ...]:
    """Slots are as large as the largest stage of each kind together, so stages that fit alone may not fit together:
    then smaller ones are tried.
    """

    def need(stage: Stage) -> int:
        alone = Stage("FB", stage.start, stage.stop) if stage.backward else stage
        head = len(spec.layers)
        return footprint(spec, (alone,) if alone.backward else (alone, Stage("FB", head, head + 1)), shapes).total

    for part in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3):
        least = max(need(Stage("FB", i, i + 1)) for i in range(len(spec.stack)))
        bound = None if limit is None else max(limit * part, min(least, limit))
        stages = partition(
            costs, devices, shapes.micro_batches, lambda s, bound=bound: bound is None or need(s) <= bound
        )
        if stages is not None and (limit is None or footprint(spec, stages, shapes).total <= limit):
            return stages
    assert limit is not None
    worst = max(range(len(spec.stack)), key=lambda i: need(Stage("FB", i, i + 1)))
    needed = need(Stage("FB", worst, worst + 1))
    raise UserError(
        f"engine.vram_limit leaves {readable(max(limit, 0))} for tensors, but layer {spec.stack[worst].name!r} alone "
        f"needs {readable(needed)} with {shapes.tokens} tokens a micro-batch: raise the limit, or lower "
        "train.micro_batch_size or data.max_length"
    )
