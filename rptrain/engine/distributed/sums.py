"""Messages with partial sums of gradients, which may be rounded to bfloat16 on their way."""

from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial

import torch
from torch import Tensor

from rptrain.engine.distributed.peers import Channel, Message
from rptrain.engine.memory.step_layout import ReduceDtype
from rptrain.utils.native import finish

BLOCK = 1 << 22  # elements that are rounded at once


class SumChannel:
    """Sends and receives contiguous sums, on the threads of a pool. Not thread-safe.

    With "bfloat16", values are rounded to nearest even by the sender. Their message takes the first bytes of the memory
    of the values, on both sides, so that only a block is ever held twice.
    """

    def __init__(self, channel: Channel, dtype: ReduceDtype, pool: Executor, threads: int) -> None:
        self._channel, self._pool, self._threads = channel, pool, threads
        self._block = torch.empty(BLOCK, dtype=torch.bfloat16) if dtype == "bfloat16" else None

    @staticmethod
    def nbytes(dtype: ReduceDtype) -> int:
        """Bytes of host memory for the block."""
        return BLOCK * torch.bfloat16.itemsize if dtype == "bfloat16" else 0

    def send(self, sums: Tensor, to: int) -> Sequence[Message]:
        """Sends the sums; they are lost if they are rounded."""
        if self._block is None:
            return self._channel.send(sums, to)
        message = _message(sums)
        for values, rounded in zip(sums.view(-1).split(BLOCK), message.split(BLOCK), strict=True):
            self._move(values, rounded, self._block)  # a block lies before those that are still to be rounded
        return self._channel.send(message, to)

    def receive(self, sums: Tensor, source: int) -> Sequence[Message]:
        """Fills the sums, once the message was awaited."""
        if self._block is None:
            return self._channel.receive(sums, source)
        return self._channel.receive(_message(sums), source, partial(self._widen, sums, self._block))

    def _widen(self, sums: Tensor, block: Tensor) -> None:
        blocks = [*zip(_message(sums).split(BLOCK), sums.view(-1).split(BLOCK), strict=True)]
        for rounded, values in reversed(blocks):  # a block lies behind those that are still to be widened
            self._move(rounded, values, block)

    def _move(self, source: Tensor, to: Tensor, block: Tensor) -> None:
        """Copies values between places that may overlap, by way of the block."""
        between = block[: len(source)]
        for one, other in ((source, between), (between, to)):
            parts = zip(other.chunk(self._threads), one.chunk(self._threads), strict=True)
            finish(self._pool, [partial(torch.Tensor.copy_, *part) for part in parts])


def _message(sums: Tensor) -> Tensor:
    """The rounded values, in the first bytes of the memory of the sums."""
    return sums.view(-1).view(torch.bfloat16)[: sums.numel()]
