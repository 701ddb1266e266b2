"""Chooses a run's plan: devices, sizes and limits in, stages out, or an error that says what does not fit."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from rptrain.devices import readable
from rptrain.engine.boundary import BoundaryBuffers
from rptrain.engine.embedding import RowGradients
from rptrain.engine.footprint import Footprint, Shapes, footprint, stage_parts
from rptrain.engine.memory import ModelStore
from rptrain.engine.meter import Measured
from rptrain.errors import UserError
from rptrain.models.spec import ModelSpec
from rptrain.plan.lower import boundaries
from rptrain.plan.costs import LayerCost
from rptrain.plan.partition import objective, partition
from rptrain.plan.schedule import Plan, Stage

SEARCH = 16  # bounds that are tried between one layer a stage and no bound
LIBRARIES = 512 << 20  # bytes of a GPU's limit left to matrix and attention libraries, and to fragments


@dataclass(frozen=True)
class RunPlan:
    """A plan with the memory it takes: bytes on each device (allocator only) and on the host."""

    plan: Plan
    device: Footprint
    store_bytes: int
    boundary_bytes: int
    row_bytes: int  # sums of the embedding's gradient rows

    @property
    def host_bytes(self) -> int:
        return self.store_bytes + self.boundary_bytes + self.row_bytes


def layer_costs(spec: ModelSpec, tokens: int, length: int) -> list[LayerCost]:
    """Estimates from floating-point operations; backward recomputes forward first. The head has no forward stage."""
    costs = []
    for layer in spec.stack:
        forward, backward = (work.flops for work in layer.work(tokens, length, itemsize=2))
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
    measured: Measured | None = None,
) -> RunPlan:
    """The partition that minimises the paper's objective within `device_limit` bytes of GPU memory.

    The layers' times are those that were `measured`, or else estimates.
    Raises UserError where not even single layers fit, with the layer and what it needs.
    """
    tokens = rows * length
    shapes = Shapes(tokens, micro_batches, dtype, micro_batches > round_size)
    if measured is None:
        costs = layer_costs(spec, tokens, length)
    else:
        times = zip(measured.forward, measured.backward, strict=True)
        costs = [LayerCost(forward, forward + backward) for forward, backward in times]
    stages = _fitting(spec, shapes, costs, devices, None if device_limit is None else device_limit - LIBRARIES)
    plan = Plan(stages, devices, micro_batches, round_size)
    return RunPlan(
        plan,
        footprint(spec, stages, shapes),
        ModelStore.nbytes(spec, dtype, generations=1 + asynchronous, wide_grad=shapes.wide_grad),
        BoundaryBuffers.nbytes(boundaries(stages), round_size, tokens, spec.hidden_size, dtype),
        RowGradients.nbytes(spec, dtype, tokens, round_size, micro_batches // round_size),
    )


def _fitting(
    spec: ModelSpec, shapes: Shapes, costs: Sequence[LayerCost], devices: int, limit: int | None
) -> tuple[Stage, ...]:
    """The best partition whose parts fit `limit` together.

    Slots are as large as the largest stage of each kind, so stages that fit alone may not fit together. Each part of
    the memory is bounded at once, from what single layers need (the least there is) to what the whole model does.
    """
    whole = partition(costs, devices, shapes.micro_batches)
    assert whole is not None
    if limit is None or footprint(spec, whole, shapes).total <= limit:
        return whole
    head = len(spec.layers)
    singles = [Stage("F", i, i + 1) for i in range(head)]
    singles += [Stage("FB", head, head + 1), *(Stage("B", i, i + 1) for i in reversed(range(head)))]
    least = footprint(spec, singles, shapes)
    if least.total > limit:
        largest = max(spec.stack, key=lambda layer: sum(spec.units[unit].numel for unit in layer.units))
        raise UserError(
            f"engine.vram_limit leaves {readable(max(limit, 0))} for tensors, but layer {largest.name!r}, the largest, "
            f"needs {readable(least.total)} even as a stage of its own, with {shapes.tokens} tokens a micro-batch: "
            "raise the limit, or lower train.micro_batch_size or data.max_length"
        )
    parts = cache(lambda stage: stage_parts(spec, stage, shapes))
    most = parts(Stage("FB", 0, head + 1))
    fitting = []
    for step in range(SEARCH + 1):
        share = (step / SEARCH) ** 3  # fine where a layer more or less decides
        bound = [low + share * (high - low) for low, high in zip(least.slots, most, strict=True)]

        def fits(stage: Stage, bound: list[float] = bound) -> bool:
            return all(need <= most for need, most in zip(parts(stage), bound, strict=True))

        stages = partition(costs, devices, shapes.micro_batches, fits)
        assert stages is not None
        if footprint(spec, stages, shapes).total <= limit:
            fitting.append((objective(costs, stages, devices, shapes.micro_batches), len(stages), stages))
    return min(fitting, key=lambda found: found[:2])[2] if fitting else tuple(singles)
