"""Sums of gradients over all processes, and the weights that each of them updates, to all others.

A process adds the gradients of its own groups of replicas, up to the maximal subtrees of the tree over all groups. It
sends each process the part of these sums that this process updates, and completes the tree for its own part. So the
sums do not depend on the number of processes.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from rptrain.engine.distributed.peers import Channel, Message
from rptrain.engine.distributed.sums import SumChannel
from rptrain.engine.memory.moments import CHUNK
from rptrain.engine.memory.share import Share
from rptrain.engine.optim.adam import CpuAdam
from rptrain.engine.tree import additions, joins, subtrees
from rptrain.models.spec import ModelShape
from rptrain.schedule.plan import Plan
from rptrain.utils.native import finish

PIECE = 1 << 22  # elements of a gradient that are sent at once
AHEAD = 3  # pieces that are received while one is added


class GradientExchange:
    """Exchanges the gradients of an iteration, unit by unit in an order that all processes share. Not thread-safe."""

    def __init__(
        self, channel: Channel, sums: SumChannel, share: Share, spec: ModelShape, adam: CpuAdam, wide: torch.dtype
    ) -> None:
        """`sums` sends gradients through `channel`, which is for all else."""
        self._channel, self._sums, self._share, self._spec, self._adam = channel, sums, share, spec, adam
        self._others = [share.of(rank) for rank in range(share.world) if rank != share.rank]
        self._trees = {one.rank: subtrees(one.groups, share.replicas) for one in (share, *self._others)}
        roots = [tree.start for trees in self._trees.values() for tree in trees]
        self._joins = [*joins(roots, share.replicas)]
        received = [tree.start for one in self._others for tree in self._trees[one.rank]]
        places, piece = _places(share, spec)
        self._received = [{root: torch.empty(piece, dtype=wide) for root in received} for _ in range(places)]

    @staticmethod
    def nbytes(share: Share, spec: ModelShape, wide: torch.dtype) -> int:
        """Bytes of host memory for what is received."""
        others = [share.of(rank) for rank in range(share.world) if rank != share.rank]
        received = sum(len(subtrees(one.groups, share.replicas)) for one in others)
        places, piece = _places(share, spec)
        return places * received * piece * wide.itemsize

    def reduce(self, unit: int, grads: Sequence[Tensor]) -> None:
        """Sums a unit's gradients: `grads` has one for each own group. The own part of the first becomes the total; all
        else is lost.
        """
        share, first = self._share, self._share.groups.start
        totals: dict[int, Tensor] = {}
        for tree in self._trees[share.rank]:
            own = grads[tree.start - first : tree.stop - first]
            totals[tree.start] = own[0]
            for to, source in additions(len(own)):
                self._add(own[to], own[source])
        # Receives begin before sends: a peer sends data once a message has told it of the receive. If that message
        # waited behind the data of a send on the same connection, data would flow in one direction at a time.
        pieces = enumerate(_pieces(share.part(self._spec, unit)))
        waiting = deque(self._receive(*piece) for piece in islice(pieces, len(self._received)))
        sent = deque[Message]()
        for other in self._others:
            for piece in _pieces(other.part(self._spec, unit)):
                for total in totals.values():
                    sent.extend(self._sums.send(total[piece], other.rank))
        while waiting:
            self._join(grads[0], totals, *waiting.popleft())
            waiting.extend(self._receive(*piece) for piece in islice(pieces, 1))
        for message in sent:
            message.wait()

    def _receive(self, number: int, piece: slice) -> tuple[slice, Mapping[int, Tensor], Sequence[Message]]:
        """Begins to receive a piece of the own part: its places by root, and their messages."""
        places = {root: place[: _size(piece)] for root, place in self._received[number % len(self._received)].items()}
        messages = [
            message
            for other in self._others
            for tree in self._trees[other.rank]
            for message in self._sums.receive(places[tree.start], other.rank)
        ]
        return piece, places, messages

    def _join(
        self,
        grad: Tensor,
        totals: Mapping[int, Tensor],
        piece: slice,
        received: Mapping[int, Tensor],
        messages: Sequence[Message],
    ) -> None:
        """Completes the tree for a piece, once it has arrived."""
        for message in messages:
            message.wait()
        parts = {**{root: total[piece] for root, total in totals.items()}, **received}
        *first, last = self._joins
        for to, source in first:
            self._add(parts[to], parts[source])
        self._add(parts[last[0]], parts[last[1]], grad[piece])  # the last one completes the tree

    def _add(self, to: Tensor, source: Tensor, out: Tensor | None = None) -> None:
        """Adds `source` to `to`, or writes the sum to `out`."""
        parts = zip(*(each.chunk(self._adam.threads) for each in (to, source, to if out is None else out)), strict=True)
        finish(self._adam.pool, [partial(torch.add, one, other, out=total) for one, other, total in parts])

    def square_sum(self, squares: Mapping[int, Tensor]) -> float:
        """The sum of squares of whole gradients from those of the chunks in the own parts, for each unit."""
        units, everyone = sorted(squares), [self._share.of(rank) for rank in range(self._share.world)]
        counts = [[-(-_size(one.part(self._spec, unit)) // CHUNK) for unit in units] for one in everyone]
        parts = [torch.empty(sum(each), dtype=torch.float64) for each in counts]
        torch.cat([squares[unit] for unit in units], out=parts[self._share.rank])
        self._channel.share(parts)
        of_units = zip(*(part.split(each) for part, each in zip(parts, counts, strict=True)), strict=True)
        return math.fsum(math.fsum(torch.cat(each).tolist()) for each in of_units)


def all_losses(channel: Channel, share: Share, own: Tensor, plan: Plan, full: int) -> Tensor:
    """The losses of all micro-batches of a step, [full], from those of the process, whose plan is `plan`."""
    turns = plan.turns
    numbers = [share.of(rank).numbers(turns, plan.round_size) for rank in range(share.world)]
    parts = [own if rank == share.rank else own.new_empty(len(each)) for rank, each in enumerate(numbers)]
    channel.share(parts)
    whole = own.new_zeros(full)
    for each, part in zip(numbers, parts, strict=True):
        whole[[*each]] = part
    return whole


def _size(part: slice) -> int:
    return part.stop - part.start


def _places(share: Share, spec: ModelShape) -> tuple[int, int]:
    """How many pieces are received at once, and the elements of a piece: no more than the longest part has."""
    longest = max((_size(share.part(spec, unit)) for unit in spec.trained(range(len(spec.units)))), default=0)
    return max(1, min(AHEAD, -(-longest // PIECE))), min(PIECE, longest)


def _pieces(part: slice) -> Sequence[slice]:
    return [slice(start, min(start + PIECE, part.stop)) for start in range(part.start, part.stop, PIECE)]
