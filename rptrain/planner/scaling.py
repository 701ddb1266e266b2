"""The expected speed of a config on one node, on several, and what the network between them costs."""

from dataclasses import dataclass, replace

from rptrain.config.schema import Config
from rptrain.engine.distributed.traffic import Traffic
from rptrain.engine.meter import Measured
from rptrain.engine.optim.gradients import arrival_order
from rptrain.machine.hardware import Hardware
from rptrain.models.spec import ModelShape
from rptrain.planner.choose import RunPlan, step_layout
from rptrain.planner.memory import MemoryPlan, plan_run
from rptrain.planner.network import Nodes
from rptrain.schedule.estimate import estimate
from rptrain.schedule.machine import GOODPUT
from rptrain.schedule.network import hiding_rate
from rptrain.schedule.roofline import HIDDEN
from rptrain.utils.errors import UserError


@dataclass(frozen=True)
class NodesPlan:
    """The plan of the config on a number of nodes. Without a plan, the numbers are None and `problem` says why."""

    nodes: int
    seconds_per_step: float | None
    tokens_per_second: float | None
    host_bytes: int | None  # of a node
    fits: bool  # whether host and GPU memory of a node are large enough
    problem: str | None = None


@dataclass(frozen=True)
class Scaling:
    """The plans of a config without "auto" for 1, 2, 4, … nodes and for those that were asked for."""

    network: Nodes
    plans: tuple[NodesPlan, ...]  # the last one is for all nodes
    gradients: float  # bytes that a node sends and receives in a step
    weights: float
    period: float  # seconds per step
    alone: float  # seconds per step with an infinitely fast network
    hiding_rate: float | None  # bytes per second of the slowest network that computation hides; None: nothing is sent

    @property
    def exchange_seconds(self) -> float:
        """The time in which the network carries the messages of a step."""
        return (self.gradients + self.weights) / (GOODPUT * self.network.rate)

    @property
    def loss(self) -> float:
        """The fraction by which the network makes a step longer."""
        return self.period / self.alone - 1

    @property
    def limits(self) -> bool:
        """Whether the network makes a step clearly longer."""
        return self.loss > HIDDEN

    def efficiency(self, plan: NodesPlan) -> float | None:
        """Tokens per second, relative to those of one node times the number of nodes; None without a plan."""
        one = self.plans[0].tokens_per_second
        if one is None or plan.tokens_per_second is None:
            return None
        return plan.tokens_per_second / (plan.nodes * one)

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "network": self.network.network,
            "rate": self.network.rate,
            "plans": [
                {
                    "nodes": plan.nodes,
                    "seconds_per_step": plan.seconds_per_step,
                    "tokens_per_second": plan.tokens_per_second,
                    "efficiency": self.efficiency(plan),
                    "host_bytes": plan.host_bytes,
                    "fits": plan.fits,
                    "problem": plan.problem,
                }
                for plan in self.plans
            ],
            "gradient_bytes": self.gradients,
            "weight_bytes": self.weights,
            "exchange_seconds": self.exchange_seconds,
            "limits": self.limits,
            "loss": self.loss,
            "hiding_rate": self.hiding_rate,
        }


def scaling(
    config: Config,
    spec: ModelShape,
    hardware: Hardware,
    nodes: Nodes,
    run: RunPlan,
    memory: MemoryPlan,
    measured: Measured | None,
) -> Scaling:
    """`hardware` is that of one of the nodes, with its plan `run`, its `memory`, and measured times if there are any.

    The other plans are of the same config, and so of the same results.
    """
    counts = [1 << power for power in range(nodes.count.bit_length()) if 1 << power < nodes.count]
    fewer = [_fewer(config, spec, hardware, count, measured) for count in counts]
    layout = step_layout(config, hardware.machine.card, hardware.share(config))
    assert layout.share is not None
    traffic = Traffic(layout.share, layout.dtype, layout.reduce_dtype)
    return Scaling(
        nodes,
        (*fewer, _plan(config, nodes.count, run, memory)),
        sum(traffic.gradients(spec.units[index]) for index in arrival_order(spec))
        + traffic.rows(spec, layout.group_tokens),
        sum(traffic.weights(spec.units[index]) for index in spec.trained(range(len(spec.units)))),
        run.estimate.period,
        estimate([cost.alone for cost in run.costs], run.plan.stages, run.setting).period,
        hiding_rate(run.costs, run.plan.stages, run.setting, nodes.rate),
    )


def _fewer(config: Config, spec: ModelShape, hardware: Hardware, count: int, measured: Measured | None) -> NodesPlan:
    """The plan on fewer nodes: of the one with the most groups."""
    if measured is not None:  # a node updates its share
        measured = replace(measured, update=measured.update * hardware.process[1] / count)
    try:
        run, memory = plan_run(config, spec, replace(hardware, process=(count - 1, count)), measured)
    except UserError as error:
        return NodesPlan(count, None, None, None, False, str(error))
    return _plan(config, count, run, memory)


def _plan(config: Config, count: int, run: RunPlan, memory: MemoryPlan) -> NodesPlan:
    period = run.estimate.period
    fits = not any(place.missing for place in (memory.host, *memory.gpus))
    return NodesPlan(count, period, config.tokens / period, memory.host.total, fits)
