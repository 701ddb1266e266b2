"""Whether computation hides transfers: the paper's roofline (appendix C), and the limit of a simulated plan."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rptrain.schedule.coarse import coarse
from rptrain.schedule.costs import LayerCost
from rptrain.schedule.dispatch import dispatch
from rptrain.schedule.estimate import Setting
from rptrain.schedule.lower import boundaries
from rptrain.schedule.partition import stage_time
from rptrain.schedule.plan import Plan, Stage
from rptrain.schedule.simulate import simulate

Cause = Literal["up", "down", "optimizer", "network", "together"]
HIDDEN = 0.02  # fraction of a step's time: a smaller loss counts as hidden
FREE = 1e30  # bytes per second
PIECES = 8  # chunks per layer at most: accurate enough, and quick to simulate
STEPS = 4  # steps to average in async, where steps differ a little


@dataclass(frozen=True)
class Sizes:
    """A block's sizes by the paper's letters (table 1): h hidden, a heads, k key heads, m intermediate, E experts.

    The paper takes a heads of h / a columns; here they may have another size, and attention a window of keys.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    experts: int = 1
    active: int = 1  # experts per token
    window: int | None = None
    weight: float | None = None  # bytes of a parameter on the link; None: the size of an activation


def forward_flops(sizes: Sizes, length: int, batch: int) -> float:
    """Operations of a forward pass over `batch` sequences (equation 2): products, attention without its masked half.

    The paper prints attention as 4 s b^2 h; it is 4 b s^2 h, of s tokens with s keys each.
    """
    tokens, h = batch * length, sizes.hidden
    queries, keys = sizes.heads * sizes.head_size, sizes.kv_heads * sizes.head_size
    seen = length if sizes.window is None else min(length, sizes.window)
    projections = 4.0 * tokens * h * queries + 4.0 * tokens * h * keys
    return projections + 4.0 * tokens * seen * queries + 6.0 * tokens * h * sizes.intermediate * sizes.active


def forward_upload(sizes: Sizes, length: int, batch: int, itemsize: int = 2) -> float:
    """Bytes of parameters, those of every expert, and of the input: equation 3, and the divisor of equation 5."""
    h = sizes.hidden
    queries, keys = sizes.heads * sizes.head_size, sizes.kv_heads * sizes.head_size
    parameters = 2 * h * queries + 2 * h * keys + 3 * h * sizes.intermediate * sizes.experts
    return (sizes.weight or itemsize) * parameters + itemsize * float(batch) * length * h


def forward_intensity(sizes: Sizes, length: int, batch: int, itemsize: int = 2) -> float:
    """Operations per uploaded byte: equation 4, with experts equation 5."""
    return forward_flops(sizes, length, batch) / forward_upload(sizes, length, batch, itemsize)


def backward_upload(sizes: Sizes, length: int, batch: int, itemsize: int = 2) -> float:
    """Bytes that backward uploads, including the gradient of the output: equation 6."""
    return forward_upload(sizes, length, batch, itemsize) + itemsize * float(batch) * length * sizes.hidden


def backward_intensity(sizes: Sizes, length: int, batch: int, itemsize: int = 2) -> float:
    """Operations of backward per byte, three times those of forward with recomputation: equation 7, left side."""
    return 3 * forward_flops(sizes, length, batch) / backward_upload(sizes, length, batch, itemsize)


def ridge(tflops: float, link: float) -> float:
    """The operations per byte above which a card computes longer than a link of `link` bytes per second copies."""
    return tflops * 1e12 / link


@dataclass(frozen=True)
class Verdict:
    """The time that a simulated step loses to copies, to the optimizer and to the network.

    `stages`: the stages whose own copies take longer than their computation, on the limiting link.
    """

    seconds: float  # seconds per step
    alone: float  # seconds per step if only computation took time
    limit: Cause | None  # None: copies, updates and messages hide
    loss: float  # fraction by which the limit makes a step longer; without a limit, relative to computation alone
    stages: tuple[Stage, ...]


def judge(plan: Plan, costs: Sequence[LayerCost], setting: Setting) -> Verdict:
    """Simulates the plan as a whole, and then without each of the links, the optimizer and the network."""
    links = setting.links
    assert links is not None
    short = coarse(plan, costs)
    whole_costs, costs = costs, short.costs
    quick = [replace(cost, update=0.0) for cost in costs]
    near = [cost.alone for cost in costs]
    chunk = max(links.chunk, max(max(cost.params, cost.grads) for cost in costs) // PIECES)

    def seconds(costs: Sequence[LayerCost], up: float, down: float) -> float:
        first = 1 + setting.lag
        last = first + (min(plan.devices, STEPS) if setting.lag else 1)
        changed = replace(links, up=up, down=down, chunk=chunk)
        program = dispatch(
            short.plan, costs, links=changed, lag=setting.lag, iterations=last + 1, weights=short.weights
        )
        return simulate(program).period(first, last) * short.factor

    whole = seconds(costs, links.up, links.down)
    alone = seconds([cost.alone for cost in quick], FREE, FREE)
    limit: Cause | None = None
    loss = whole / alone - 1
    if loss > HIDDEN:
        without: dict[Cause, float] = {
            "up": seconds(costs, FREE, links.down),
            "down": seconds(costs, links.up, FREE),
            "optimizer": seconds(quick, links.up, links.down),
        }
        if near != [*costs]:
            without["network"] = seconds(near, links.up, links.down)
        limit = min(without, key=lambda cause: without[cause])
        if whole / without[limit] - 1 > HIDDEN:
            loss = whole / without[limit] - 1
        else:
            limit = "together"
    return Verdict(whole, alone, limit, loss, _bound(plan, whole_costs, setting, limit))


def _bound(plan: Plan, costs: Sequence[LayerCost], setting: Setting, limit: Cause | None) -> tuple[Stage, ...]:
    """Stages whose copies take longer than their computation in a slot, on the links of `limit`."""
    links, count = setting.links, plan.round_size
    assert links is not None
    found = []
    for stage, io in zip(plan.stages, boundaries(plan.stages).stages, strict=True):
        inputs, outputs = 1 + (io.dy_in is not None), max(len(io.x_out), 1)
        up = (count * inputs * links.boundary + sum(costs[i].params for i in stage.layers)) / links.up
        grads = sum(costs[i].grads for i in stage.layers) if stage.backward else 0
        down = (count * outputs * links.boundary + grads) / links.down
        copies = {"up": up, "down": down, "together": max(up, down)}.get(limit or "", 0.0)
        if copies > count * stage_time(costs, stage):
            found.append(stage)
    return tuple(found)
