"""Gradient rows of the embedding, summed over all processes: only rows whose tokens occur are sent."""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import cycle

import torch
from torch import Tensor

from rptrain.engine.distributed import exchange
from rptrain.engine.distributed.peers import Message
from rptrain.engine.distributed.sums import SumChannel
from rptrain.engine.memory.share import Share
from rptrain.engine.memory.step_layout import StepLayout
from rptrain.engine.memory.unit_state import UnitState
from rptrain.engine.optim.embedding_grads import CpuRows, row_stride
from rptrain.engine.optim.row_gradients import RowGradients
from rptrain.engine.tree import additions, joins, subtrees
from rptrain.models.spec import ModelShape, ModelSpec

SENT = 3  # messages on their way to the others, each with a copy of its rows


class SharedRowGradients(RowGradients):
    """The rows of the own part of the table, from the groups of all processes.

    All processes know every token of a step, and so which rows they send and receive.
    """

    def __init__(
        self, state: UnitState, spec: ModelSpec, layout: StepLayout, cpu: CpuRows, channel: SumChannel
    ) -> None:
        assert layout.share is not None
        self._share = share = layout.share
        self._channel, self._spec = channel, spec
        self._trees = {rank: subtrees(share.of(rank).groups, share.replicas) for rank in range(share.world)}
        super().__init__(state, spec, layout, cpu)
        stride = self._buffer.shape[1]
        self._sent = [self._buffer.new_empty(_sent_rows(stride), stride) for _ in range(SENT)]

    @staticmethod
    def shared_nbytes(spec: ModelShape, layout: StepLayout) -> int:
        """Upper bound of the memory: rows of the own groups, those that are received, and indices."""
        share, tokens, wide = layout.share, layout.group_tokens, layout.wide
        assert share is not None
        rows = len(share.groups) * min(tokens, spec.vocab_size) + _received_rows(share, spec, tokens)
        everything, distinct = share.replicas * tokens, min(share.replicas * tokens, spec.vocab_size)
        stride = row_stride(spec.hidden_size, wide)
        sums = (rows + SENT * _sent_rows(stride)) * stride * wide.itemsize
        # rows, their order, sources of and occurrence in each group, and places of tokens
        return sums + distinct * (16 + 9 * share.replicas) + everything * torch.int64.itemsize

    def _groups(self, replicas: int) -> range:
        return self._share.groups

    def _others(self, tokens: int) -> int:
        return _received_rows(self._share, self._spec, tokens)

    def _occur(self, found: Tensor, groups: Sequence[int]) -> None:
        of_group = torch.tensor(groups)
        self._sorted = self._rows.argsort()
        self._occurs = torch.zeros(self._share.replicas, len(self._rows), dtype=torch.bool)
        for group, occurs in enumerate(self._occurs):
            occurs[found[of_group == group]] = True

    def apply(self) -> None:
        """Exchanges the sums, once all are complete, and adds the totals to the own part of the unit's gradient."""
        share, own = self._share, self._trees[self._share.rank]
        everything = slice(0, len(self._rows))
        for tree in own:
            pairs = ((tree.start + to, tree.start + source) for to, source in additions(len(tree)))
            self._merge(pairs, everything)
        received, sent = self._receive(), deque[Sequence[Message]]()
        places = cycle(self._sent)
        for rank in range(share.world):
            if rank == share.rank:
                continue
            for tree in own:
                for rows in self._rows_for(rank, tree).split(len(self._sent[0])):
                    if len(sent) == len(self._sent):  # the next place is in use
                        _wait(sent.popleft())
                    values = next(places)[: len(rows)]
                    self._cpu.gather(self._sums, self._sources[tree.start, rows], values)
                    sent.append(self._channel.send(values, rank))
        _wait(received)
        part = self._rows_for(share.rank, range(share.replicas))
        self._merge(joins([tree.start for trees in self._trees.values() for tree in trees], share.replicas), part)
        self._add_totals(part)
        for messages in sent:
            _wait(messages)
        self._applied = self._whole

    def _receive(self) -> Sequence[Message]:
        """Begins to receive the sums of the others, after those of this process in the buffer."""
        messages: list[Message] = []
        used = len(self._sums)
        for rank, trees in self._trees.items():
            if rank == self._share.rank:
                continue
            for tree in trees:
                rows = self._rows_for(self._share.rank, tree)
                self._sources[tree.start, rows] = torch.arange(used, used + len(rows))
                for values in self._buffer[used : used + len(rows)].split(len(self._sent[0])):
                    messages += self._channel.receive(values, rank)
                used += len(rows)
        self._sums = self._buffer[:used]
        return messages

    def _rows_for(self, rank: int, tree: range) -> Tensor:
        """Positions of the rows in a process's part of the table that occur in a subtree, ordered by row."""
        part, width = self._share.of(rank).part(self._spec, 0), self._table.shape[1]
        starts = self._rows * width
        wanted = self._occurs[tree.start : tree.stop].any(0) & (starts >= part.start) & (starts < part.stop)
        return self._sorted[wanted[self._sorted]]


def _wait(messages: Iterable[Message]) -> None:
    for message in messages:
        message.wait()


def _sent_rows(stride: int) -> int:
    """Rows in a message."""
    return max(1, exchange.PIECE // stride)


def _received_rows(share: Share, spec: ModelShape, tokens: int) -> int:
    """The most rows that other processes send."""
    part = share.part(spec, 0)
    rows = -(-(part.stop - part.start) // spec.hidden_size)
    others = (share.of(rank).groups for rank in range(share.world) if rank != share.rank)
    return sum(min(len(tree) * tokens, rows) for groups in others for tree in subtrees(groups, share.replicas))
