"""Choice of a run's plan: the partition with the shortest step that fits in memory."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

import torch

from rptrain.config.schema import Config
from rptrain.engine.distributed.exchange import GradientExchange
from rptrain.engine.distributed.rows import SharedRowGradients
from rptrain.engine.distributed.sums import SumChannel
from rptrain.engine.distributed.traffic import Traffic
from rptrain.engine.footprint import (
    Footprint,
    StageMemories,
    footprint,
    largest_layer,
    ring_parts,
    rounded_bytes,
    shared_bytes,
)
from rptrain.engine.memory.boundary import BoundaryBuffers
from rptrain.engine.memory.share import Share
from rptrain.engine.memory.step_layout import StepLayout
from rptrain.engine.memory.store import ModelStore
from rptrain.engine.meter import Measured
from rptrain.engine.optim.row_gradients import RowGradients
from rptrain.engine.optim.traffic import thread_rate, update_bytes_of
from rptrain.kernels import launch
from rptrain.models.layer import LayerShape
from rptrain.models.spec import ModelShape
from rptrain.schedule.costs import LayerCost, Work
from rptrain.schedule.dispatch import Links
from rptrain.schedule.estimate import Estimate, Setting, estimate
from rptrain.schedule.lower import outputs
from rptrain.schedule.machine import CPU, Card, Machine
from rptrain.schedule.plan import Plan, Stage
from rptrain.schedule.search import search
from rptrain.utils.dtypes import DTYPES
from rptrain.utils.errors import UserError
from rptrain.utils.units import format_bytes

LIBRARIES = 512 << 20  # bytes of a GPU's limit for matrix and attention libraries, and for fragmentation


def step_layout(config: Config, card: Card, share: Share | None = None) -> StepLayout:
    """The step of a config without "auto", on cards of this kind."""
    train = config.train
    groups = config.replicas if share is None else len(share.groups)
    dtype = DTYPES[config.model.dtype]
    return StepLayout(
        sequences=train.sequences,
        length=config.data.max_length,
        micro_batches=train.micro_batches // config.replicas * groups,
        round_size=config.round_size,
        dtype=dtype,
        asynchronous=config.optim.update == "async",
        moments=config.optim.moments,
        fused=card != CPU and dtype in launch.DTYPES and (launch.HAS_TRITON or not torch.cuda.is_available()),
        file_backed=config.model.hold == "map",
        half_sums=config.engine.fp16_accumulation,
        replicas=groups,
        share=share,
        reduce_dtype=config.engine.reduce_dtype,
    )


@dataclass(frozen=True)
class RunPlan:
    """A plan, the memory it needs (bytes in each device's allocator, and on the host) and its estimated time."""

    plan: Plan
    layout: StepLayout
    device: Footprint
    store_bytes: int
    boundary_bytes: int
    estimate: Estimate
    costs: tuple[LayerCost, ...]
    setting: Setting

    @property
    def floor_seconds(self) -> float:
        """The step's arithmetic, including all recomputation, divided evenly among the devices."""
        *blocks, head = self.costs  # `backward` includes the recomputed forward, and for the head its forward
        micro_batch = sum(cost.forward + cost.backward for cost in blocks) + head.backward
        return micro_batch * self.plan.micro_batches / self.plan.devices


def layer_work(spec: ModelShape, layer: LayerShape, layout: StepLayout) -> tuple[Work, Work]:
    """The work of a layer's forward and of its backward, without the recomputed forward, for a micro-batch."""
    tokens, itemsize = layout.tokens, layout.dtype.itemsize
    units = [spec.units[unit] for unit in layer.units]
    ahead, back = layer.work(tokens, layout.length, itemsize)
    for param in (param for unit in units if not unit.trainable for param in unit.params):
        back = back.without(layer.gradient_work(param, tokens, itemsize))
    if layout.half_sums:  # gradients of weights only on GeForce
        params = (param for unit in units if unit.trainable and not layer.half_sums for param in unit.params)
        gradients = [layer.gradient_work(param, tokens, itemsize) for param in params]
        ahead = ahead.with_half_sums()
        back = back.with_half_sums(sum(work.matmul for work in gradients))
    trained, wide = sum(unit.numel for unit in units if unit.trainable), layout.wide.itemsize
    return ahead, back + Work(elementwise={"gradient accumulators": 2 * trained * wide})  # bytes read and written


def layer_costs(
    spec: ModelShape, layout: StepLayout, machine: Machine, measured: Measured | None
) -> tuple[LayerCost, ...]:
    """Costs of each layer: measured times if there are any, otherwise estimates from operations and bytes.

    The embedding's update, and the exchange of its rows, count towards the first layer, which waits for them. Of
    several processes, each updates its share; measured times of updates are those of a process's share.
    """
    itemsize, wide = layout.dtype.itemsize, layout.wide.itemsize
    own = 1 if layout.share is None else 1 / layout.share.world
    updates = {
        index: own
        * machine.update_seconds(
            spec.units[index].numel, update_bytes_of(layout, [spec.units[index]]), thread_rate(layout.moments)
        )
        for index in spec.trained(range(len(spec.units)))
    }
    if measured is not None and measured.update:
        numel = sum(spec.units[index].numel for index in updates)
        updates = {index: measured.update * spec.units[index].numel / numel for index in updates}
    exchange = _exchange(spec, layout, machine)
    costs = []
    updated: set[int] = set()
    for index, layer in enumerate(spec.stack):
        units = [spec.units[unit] for unit in layer.units]
        trained = [unit for unit in units if unit.trainable]
        forward, backward = map(machine.card.seconds, layer_work(spec, layer, layout))
        if measured is not None:
            forward, backward = measured.forward[index] or forward, measured.backward[index]
        new = {*spec.trained((*layer.units, 0) if index == 0 else layer.units)} - updated
        updated |= new
        costs.append(
            LayerCost(
                forward,
                backward if measured is not None and layer is spec.head else forward + backward,
                sum(unit.wire_bytes(itemsize) for unit in units),
                sum(unit.numel * layout.grad_dtype_of(unit).itemsize for unit in trained),
                layer.kept_bytes(layout.tokens, itemsize),
                sum(updates[unit] for unit in new),
                sum(unit.numel for unit in trained) * wide,
                sum(unit.prepared_bytes(itemsize, backward=True) for unit in units),
                sum(exchange.add[unit] for unit in spec.trained(layer.units)),
                sum(exchange.reduce[unit] for unit in spec.trained(layer.units)) + (0 if index else exchange.rows),
                sum(exchange.gather[unit] for unit in new),
            )
        )
    return tuple(costs)


@dataclass(frozen=True)
class _Exchange:
    """Seconds, by trainable unit, to add the gradients of the own groups, to exchange the sums with other processes,
    and to exchange updated weights; and seconds to exchange the rows of the embedding.
    """

    add: Mapping[int, float]
    reduce: Mapping[int, float]
    gather: Mapping[int, float]
    rows: float


def _exchange(spec: ModelShape, layout: StepLayout, machine: Machine) -> _Exchange:
    units = {unit: spec.units[unit] for unit in spec.trained(range(len(spec.units)))}
    if layout.share is None:
        none = dict.fromkeys(units, 0.0)
        return _Exchange(none, none, none, 0.0)
    traffic, seconds = Traffic(layout.share, layout.dtype, layout.reduce_dtype), machine.network_seconds
    moved = 3 * layout.wide.itemsize  # bytes of an addition: two are read, one is written
    each = moved * (layout.replicas - 1) / machine.host_bandwidth
    return _Exchange(
        {index: each * unit.numel for index, unit in units.items()},
        {index: seconds(traffic.gradients(unit)) for index, unit in units.items()},
        {index: seconds(traffic.weights(unit)) for index, unit in units.items()},
        seconds(traffic.rows(spec, layout.group_tokens)),
    )


def row_bytes(spec: ModelShape, layout: StepLayout) -> int:
    """Bytes of host memory for the accumulators of the embedding's gradient rows."""
    if not spec.units[0].trainable:
        return 0
    if layout.share is None:
        return RowGradients.nbytes(spec, layout)
    return SharedRowGradients.shared_nbytes(spec, layout)


def exchange_bytes(spec: ModelShape, layout: StepLayout) -> int:
    """Bytes of host memory for gradients that other processes send, and for rounding."""
    if layout.share is None:
        return 0
    received = GradientExchange.nbytes(layout.share, spec, layout.wide)
    return received + SumChannel.nbytes(layout.reduce_dtype)


@dataclass(frozen=True)
class Limits:
    """Limits of memory, in bytes; None: unlimited. `source` says what sets that of each device."""

    device: int | None = None
    host: int | None = None
    source: str = "the limit"


UNLIMITED = Limits()


def make_plan(
    spec: ModelShape,
    machine: Machine,
    layout: StepLayout,
    limits: Limits = UNLIMITED,
    *,
    measured: Measured | None = None,
    near: Sequence[Stage] | None = None,
) -> RunPlan:
    """Chooses the partition with the shortest simulated step within the limit of GPU memory.

    The search leaves out messages between processes: if they are the limit, partitions do not differ. Among the
    partitions, one whose buffers keep the host within its limit is preferred. Raises UserError if a single layer does
    not fit on a GPU, with the layer and what it needs. `near` makes the search short (schedule/search.py).
    """
    costs = layer_costs(spec, layout, machine, measured)
    setting = _setting(spec, machine, layout, measured)
    store = sum(ModelStore.sizes(spec, layout).values())
    rows = row_bytes(spec, layout) + exchange_bytes(spec, layout)
    available = None if limits.device is None else limits.device - LIBRARIES
    width, largest = layout.width(machine.devices), largest_layer(spec, layout.dtype)
    _check_single_layers(spec, layout, width, available, limits.source)
    memories = StageMemories(spec, layout)
    rounded = rounded_bytes(spec, layout)

    def fits_device(stages: Sequence[Stage]) -> bool:
        if available is None:
            return True
        shared = sum(shared_bytes([*map(memories.of, stages)], width, largest))
        return shared + rounded + sum(ring_parts(spec, stages, layout)[1:]) <= available

    def buffers(stages: Sequence[Stage]) -> int:
        return BoundaryBuffers.nbytes(outputs(stages)[1], layout, spec.hidden_size)

    def fits_both(stages: Sequence[Stage]) -> bool:
        return fits_device(stages) and (limits.host is None or store + rows + buffers(stages) <= limits.host)

    alone = [cost.alone for cost in costs]
    found = search(alone, setting, fits_both, near=near) or search(alone, setting, fits_device, near=near)
    assert found is not None  # single layers fit
    return RunPlan(
        Plan(found.stages, machine.devices, layout.micro_batches, layout.round_size, layout.replicas),
        layout,
        footprint(spec, found.stages, layout, width),
        store,
        buffers(found.stages),
        found.estimate if alone == [*costs] else estimate(costs, found.stages, setting),
        costs,
        setting,
    )


def least_period(
    spec: ModelShape, machine: Machine, layout: StepLayout, *, device_limit: int | None, measured: Measured | None
) -> float:
    """A lower bound, in seconds, of the steps of all plans: the devices only compute, and the fused stage is as long as
    fits on one of them, which saves the forward passes of its layers.
    """
    costs, setting = layer_costs(spec, layout, machine, measured), _setting(spec, machine, layout, measured)
    layers, fused = len(costs), len(costs)
    if device_limit is not None:
        largest = largest_layer(spec, layout.dtype)
        memories, available = StageMemories(spec, layout), device_limit - LIBRARIES - rounded_bytes(spec, layout)

        def takes(count: int) -> int:
            """Bytes that the last layers need as the fused stage of any plan."""
            stage = Stage("FB", layers - count, layers)
            return sum(memories.of(stage)) + largest + sum(ring_parts(spec, (stage,), layout)[1:])

        fused = bisect_right(range(1, layers + 1), available, key=takes)
    busy = sum(cost.backward for cost in costs) + sum(cost.forward for cost in costs[: layers - fused])
    return setting.micro_batches * busy / setting.devices


def _setting(spec: ModelShape, machine: Machine, layout: StepLayout, measured: Measured | None) -> Setting:
    """The setting of one group of devices. A device that computes several groups takes their rounds in turn."""
    up, down = machine.link, machine.link
    if measured is not None:
        up, down = measured.upload or up, measured.download or down
    boundary = layout.tokens * spec.hidden_size * layout.dtype.itemsize
    replicas = layout.replicas
    return Setting(
        layout.width(machine.devices),
        layout.micro_batches // replicas * ceil(replicas / machine.devices),
        layout.round_size,
        int(layout.asynchronous),
        Links(up, down, boundary),
        ceil(replicas / machine.devices),
    )


def least_footprint(spec: ModelShape, layout: StepLayout, width: int) -> Footprint:
    """The least memory that a device needs: one layer per stage."""
    head = len(spec.layers)
    singles = [Stage("F", i, i + 1) for i in range(head)]
    singles += [Stage("FB", head, head + 1), *(Stage("B", i, i + 1) for i in reversed(range(head)))]
    return footprint(spec, singles, layout, width)


def _check_single_layers(spec: ModelShape, layout: StepLayout, width: int, limit: int | None, source: str) -> None:
    """Raises UserError if a device cannot hold a single layer."""
    least = least_footprint(spec, layout, width)
    if limit is not None and least.total > limit:
        largest = max(spec.stack, key=lambda layer: sum(spec.units[unit].numel for unit in layer.units))
        raise UserError(
            f"{source} leaves {format_bytes(max(limit, 0))} for tensors, but layer {largest.name!r}, the largest, "
            f"needs {format_bytes(least.total)} even as its own stage, with {layout.tokens} tokens per micro-batch"
        )
