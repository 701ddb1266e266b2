"""The part of a process in the training of a model by several."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from rptrain.engine.context import Context
from rptrain.engine.distributed.gradients import SharedGradients
from rptrain.engine.distributed.peers import Channel, Peers
from rptrain.engine.distributed.sums import SumChannel
from rptrain.engine.distributed.weights import WeightExchange
from rptrain.engine.memory.share import Share
from rptrain.engine.memory.step_layout import ReduceDtype
from rptrain.engine.optim.adam import CpuAdam

PARALLEL = 4  # groups of a channel for gradients or weights


@dataclass(frozen=True)
class Shared:
    """The share of a process in the engine's work, and a channel for each of its threads that sends messages.

    Implements partners.Partners.
    """

    share: Share
    peers: Peers
    gradients: Channel
    weights: Channel
    reduce_dtype: ReduceDtype  # in which partial gradients are sent

    @classmethod
    def open(cls, peers: Peers, replicas: int, reduce_dtype: ReduceDtype = "float32") -> Self:
        share = Share(peers.rank, peers.world, replicas)
        return cls(share, peers, peers.channel(PARALLEL), peers.channel(PARALLEL), reduce_dtype)

    def sum_gradients(self, context: Context, adam: CpuAdam, tell: Callable[[str], None]) -> SharedGradients:
        sums = SumChannel(self.gradients, self.reduce_dtype, adam.pool, adam.threads)
        return SharedGradients(context, adam, tell, self.share, self.gradients, sums)

    def exchange_weights(self, context: Context, adam: CpuAdam, publish: Callable[[int, int], None]) -> WeightExchange:
        return WeightExchange(context, adam, self.share, self.weights, publish)

    def on_loss(self, call: Callable[[BaseException], None] | None) -> None:
        self.peers.on_loss(call)

    def fail(self, error: BaseException) -> None:
        self.peers.fail(error)
