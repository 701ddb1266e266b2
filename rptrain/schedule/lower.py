"""Lowering of stages to transfers: the boundary tensors that a stage reads and writes, and the windows of parameters.

Boundary b lies between layer b - 1 and layer b: it carries the activation x forward, and its gradient backward.
Boundary 0 is the embedding's output. Each boundary and micro-batch has one host buffer, in which the
gradient replaces the activation. Accesses form a fixed chain: each waits for the previous one.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from rptrain.schedule.plan import Stage

# A copy engine has no priorities, so an activation waits for chunks that were issued before it. Each chunk costs its
# thread a launch, which takes long while other threads launch too.
CHUNK_BYTES = 64 << 20

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
    """`stages[i]` is the IO of stage i; `chain[b]` is the number of accesses to boundary b in a round.

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
    """The number of tensors that each stage writes per micro-batch, and of boundaries, as in `boundaries`."""
    cuts = sorted({stop if kind == "F" else start for kind, start, stop in stages})
    written = [
        bisect_right(cuts, stop) - bisect_right(cuts, start) if kind == "F" else 1 for kind, start, stop in stages
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

    Each micro-batch's window carries its share, so that an activation does not wait for a whole stage, and units are
    complete in the given order (the paper assigns the longest tensors first, which completes all of them late).
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
