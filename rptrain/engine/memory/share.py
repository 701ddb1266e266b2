"""Which groups of replicas a process computes, and which part of each unit's optimizer state it has."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rptrain.engine.memory.moments import CHUNK
from rptrain.kernels.batch import Batch
from rptrain.models.spec import ModelShape
from rptrain.schedule.plan import Plan


@dataclass(frozen=True)
class Share:
    """The share of process `rank` in a run of `world` processes, with at least one of `replicas` groups for each.

    The groups of a process are consecutive. The processes have equal numbers of groups, or numbers that differ by one.
    """

    rank: int
    world: int
    replicas: int

    def of(self, rank: int) -> "Share":
        """The share of another process."""
        return replace(self, rank=rank)

    @property
    def groups(self) -> range:
        first, end = (each * self.replicas // self.world for each in (self.rank, self.rank + 1))
        return range(first, end)

    def numbers(self, turns: int, round_size: int) -> Sequence[int]:
        """The micro-batches of the step that the process computes, in the order of its own plan: in each turn, a round
        of each of its groups.
        """
        rounds = (turn * self.replicas + group for turn in range(turns) for group in self.groups)
        return [r * round_size + place for r in rounds for place in range(round_size)]

    def batch(self, whole: Batch, own: Plan) -> Batch:
        """The process's micro-batches of a step's batch, for its plan."""
        chosen = [m for m in self.numbers(own.turns, own.round_size) if m < len(whole.input_ids)]
        return replace(
            whole,
            input_ids=whole.input_ids[chosen],
            positions=whole.positions[chosen],
            labels=whole.labels[chosen],
            documents=tuple(whole.documents[m] for m in chosen),
            numbers=tuple(chosen),
            full=own.micro_batches,
        )

    def part(self, spec: ModelShape, unit: int) -> slice:
        """The elements of a unit's flat buffer that the process sums gradients of and updates.

        They are whole chunks of the optimizer, so that neither squares nor blocks of moments are divided, and whole
        rows of the embedding.
        """
        numel = spec.units[unit].numel
        block = CHUNK if unit else math.lcm(CHUNK, spec.hidden_size)
        blocks, place = -(-numel // block), (self.rank + unit) % self.world  # small units are not all in one process
        first, end = (min(each * blocks // self.world * block, numel) for each in (place, place + 1))
        return slice(first, end)
