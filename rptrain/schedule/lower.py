"""From stages to transfers: which boundary tensors a stage reads and writes, and the windows parameters move in.

Boundary b is what passes between layer b - 1 and layer b: the activation x on the way forward, its gradient on the
way back. Boundary 0 is the embedding's output. Each boundary and micro-batch has one host buffer, in which the
activation is replaced by its gradient; the accesses to it form a fixed chain, and each waits for the one before.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from rptrain.schedule.plan import Stage

CHUNK_BYTES = 16 << 20  # copies have no priority in a copy engine: an activation waits for one chunk at most

RING = 2  # entries of a device's rings of inputs and outputs: one is in use while the other is transferred


@dataclass(frozen=True)
class Access:
    """One use of a boundary's host buffer: the `order`-th in each round."""

    boundary: int
    order: int


@dataclass(frozen=True)
class StageIO:
    """The boundary accesses of a stage, for each micro-batch."""

    x_in: Access
    dy_in: Access | None  # B stages: the gradient of their output
    x_out: tuple[Access, ...]  # F stages: their output, and the inputs of backward stages that start inside
    dx_out: Access | None  # FB and B stages: the gradient of their input


@dataclass(frozen=True)
class Boundaries:
    """`stages[i]` is the IO of stage i; `chain[b]` is how many accesses boundary b has in a round.

    Boundary 0 is written first by the host embedding (order 0) and read last by its backward (the last order).
    """

    stages: tuple[StageIO, ...]
    chain: dict[int, int]


def boundaries(stages: Sequence[Stage]) -> Boundaries:
    """Walks the stages in dispatch order and numbers the accesses of each boundary."""
    starts = {stage.start for stage in stages if stage.backward}
    ends = {stage.stop for stage in stages if stage.kind == "F"}
    chain: dict[int, int] = {0: 1}

    def access(boundary: int) -> Access:
        order = chain.get(boundary, 0)
        chain[boundary] = order + 1
        return Access(boundary, order)

    ios = []
    for stage in stages:
        x_in = access(stage.start)
        dy_in = access(stage.stop) if stage.kind == "B" else None
        inside = sorted((starts | ends) & set(range(stage.start + 1, stage.stop + 1)))
        x_out = tuple(access(b) for b in inside) if stage.kind == "F" else ()
        dx_out = access(stage.start) if stage.backward else None
        ios.append(StageIO(x_in, dy_in, x_out, dx_out))
    access(0)
    return Boundaries(tuple(ios), chain)


def outputs(stages: Sequence[Stage]) -> tuple[list[int], int]:
    """How many tensors each stage writes for a micro-batch, and how many boundaries there are, as in `boundaries`."""
    cuts = sorted({stage.start if stage.backward else stage.stop for stage in stages})
    written = [
        1 if stage.backward else bisect_right(cuts, stage.stop) - bisect_right(cuts, stage.start) for stage in stages
    ]
    return written, len({0, *cuts})


@dataclass(frozen=True)
class Chunk:
    """A byte-contiguous piece of a unit's flat buffer: elements [start, stop)."""

    unit: int
    start: int
    stop: int


def windows(sizes: Sequence[tuple[int, int]], count: int, chunk: int) -> tuple[tuple[Chunk, ...], ...]:
    """Splits units, given as (unit, elements), into chunks of at most `chunk` elements, and the chunks, in order,
    into `count` windows of about equal bytes (paper section 4.2.2).

    So each micro-batch's window carries its share, an activation never waits behind more than one chunk, and units
    are complete in the given order (the paper deals tensors out longest first, which completes all of them late).
    """
    total = sum(numel for _, numel in sizes)
    dealt: list[list[Chunk]] = [[] for _ in range(count)]
    done = 0
    for unit, numel in sizes:
        for start in range(0, numel, chunk):
            piece = Chunk(unit, start, min(start + chunk, numel))
            middle = done + (piece.stop - piece.start) / 2
            dealt[min(int(middle * count / total), count - 1)].append(piece)
            done += piece.stop - piece.start
    return tuple(tuple(window) for window in dealt)
