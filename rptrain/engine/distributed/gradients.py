"""The gradients of an iteration, summed over the groups of all processes."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rptrain.engine.context import Context
from rptrain.engine.distributed.exchange import GradientExchange, all_losses
from rptrain.engine.distributed.peers import Channel
from rptrain.engine.distributed.rows import SharedRowGradients
from rptrain.engine.distributed.sums import SumChannel
from rptrain.engine.iteration import Iteration
from rptrain.engine.memory.share import Share
from rptrain.engine.optim.adam import CpuAdam
from rptrain.engine.optim.embedding_grads import CpuRows
from rptrain.engine.optim.gradients import Gradients


class SharedGradients(Gradients):
    """Sums the gradients of the parts of units that this process updates. Publishes ("losses",), with a step's losses.

    The thread that calls `square_sum` exchanges gradients, unit by unit in an order that all processes share: units
    arrive in different orders in each. While it waits for one, those that have arrived wait, too.
    """

    _early = False  # sums are exchanged first

    def __init__(
        self,
        context: Context,
        adam: CpuAdam,
        tell: Callable[[str], None],
        share: Share,
        channel: Channel,
        sums: SumChannel,
    ) -> None:
        """`sums` sends gradients through `channel`."""
        self._share, self._channel, self._sums = share, channel, sums
        spec, dtype = context.store.spec, context.store.layout.grad_dtype
        self._exchange = GradientExchange(channel, sums, share, spec, adam, dtype)
        super().__init__(context, adam, tell)

    def square_sum(self, iteration: Iteration) -> float:
        total = super().square_sum(iteration)
        context = self._context
        for r in range(context.plan.rounds):
            context.board.wait(("loss", r), iteration.number)
        for event in iteration.losses_sent:
            event.synchronize()
        self._tell("receiving losses")
        self.share_losses(iteration)
        context.board.publish(("losses",), iteration.number)
        return total

    def share_losses(self, iteration: Iteration) -> None:
        losses = all_losses(self._channel, self._share, iteration.losses, self._context.plan, iteration.full)
        iteration.step_losses.append(losses)

    def _add(self, unit: int, grads: Sequence[Tensor]) -> Tensor:
        self._exchange.reduce(unit, grads)
        if unit == 0:  # rows are added before its squares are needed
            return torch.empty(0)
        return self._adam.squares(grads[0][self._share.part(self._context.store.spec, unit)])

    def _total(self, squares: Mapping[int, Tensor]) -> float:
        return self._exchange.square_sum(squares)

    @property
    def _replicas(self) -> int:
        return self._share.replicas

    def _row_gradients(self) -> SharedRowGradients:
        store, cpu = self._context.store, CpuRows(self._adam.pool, self._adam.threads)
        return SharedRowGradients(store.units[0], store.spec, store.layout, cpu, self._sums)
