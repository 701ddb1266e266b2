"""Stages, slots and plans: a schedule as a value, with a short text form.

Paper section 3.2: the forward stages F, the fused stage FB (the paper's B1) and the backward
stages B form one sequence of slots; slot i of a round runs on device (g0 + i) mod N, and g0 carries over from
round to round and from iteration to iteration, so the pipeline is never flushed. With R replicas, the rounds of an
iteration are dealt to R groups, each a pipeline of its own over N / R devices, or over one device that it shares.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["F", "FB", "B"]


class Stage(NamedTuple):
    """Consecutive layers [start, stop) that are dispatched together. The head is the last layer of FB."""

    kind: Kind
    start: int
    stop: int

    @property
    def layers(self) -> range:
        return range(self.start, self.stop)

    @property
    def backward(self) -> bool:
        return self.kind != "F"

    def __str__(self) -> str:
        return f"{self.kind}{self.start}-{self.stop - 1}"

    @classmethod
    def parse(cls, text: str) -> "Stage":
        match = re.fullmatch(r"(F|FB|B)(\d+)-(\d+)", text)
        if match is None:
            raise ValueError(f"not a stage: {text!r} (such as F0-3, FB10-12 or B4-5)")
        kind, first, last = match.groups()
        return cls(kind, int(first), int(last) + 1)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Slot:
    """A stage dispatched to a device: every micro-batch of a round, in order."""

    index: int  # within the iteration
    stage_index: int
    stage: Stage
    device: int
    round: int
    micro_batches: range
    group: int = 0  # of replicas
    turn: int = 0  # counts the rounds of the group within the iteration
    turns: int = 1  # rounds of the group that end with this one: itself, and later ones that have no micro-batches

    def __str__(self) -> str:
        few = self.micro_batches
        numbers = f"{few[0]}-{few[-1]}" if few else ""
        return f"{self.index}:{self.stage}@{self.device}r{self.round}m{numbers}"


class Computation(NamedTuple):
    """A device computes a slot, or a part of it, without a wait. Times are in seconds."""

    iteration: int
    slot: int  # its number within the iteration
    start: float
    end: float


@dataclass(frozen=True)
class Plan:
    """The plan of every iteration.

    `stages` are in dispatch order: forward stages, the fused stage, backward stages. `micro_batches` (M) are
    processed in rounds of `round_size` (M_R), on `devices` (N) devices. Round r belongs to group r mod R of `replicas`
    (R) groups. If N ≥ R, each group has N / R devices; if N < R, each device computes whole rounds.
    """

    stages: tuple[Stage, ...]
    devices: int
    micro_batches: int
    round_size: int
    replicas: int = 1

    @property
    def rounds(self) -> int:
        return self.micro_batches // self.round_size

    @property
    def turns(self) -> int:
        """Rounds of each group in an iteration."""
        return self.rounds // self.replicas

    @property
    def width(self) -> int:
        """Devices of a group."""
        return max(self.devices // self.replicas, 1)

    @property
    def concurrent(self) -> int:
        """Groups that are computed at the same time."""
        return min(self.devices, self.replicas)

    def group_pass(self, iteration: int, micro_batch: int) -> tuple[int, int]:
        """The group that computes a micro-batch, and the number of its round among all rounds of the group."""
        turn, group = divmod(micro_batch // self.round_size, self.replicas)
        return group, iteration * self.turns + turn

    def arrivals(self, groups: int) -> Iterator[int]:
        """The micro-batches of an iteration in the order in which this many groups at a time begin them."""
        for first in range(0, self.rounds, groups):
            rounds = range(first, min(first + groups, self.rounds))
            for position in range(self.round_size):
                yield from (r * self.round_size + position for r in rounds)

    def slots(self, iteration: int, micro_batches: int | None = None) -> tuple[Slot, ...]:
        """The slots of an iteration (counted from 0) in dispatch order.

        An iteration with fewer `micro_batches` than M has the slots of those rounds only that have some. A group
        without any has its first round all the same, with empty slots: its gradients are zero.
        """
        per_round, count = len(self.stages), self.micro_batches if micro_batches is None else micro_batches
        # the rounds of each group that have micro-batches, but at least one
        turns = [max(1, len(range(g * self.round_size, count, self._stride))) for g in range(self.replicas)]
        return tuple(
            Slot(
                index=r * per_round + s,
                stage_index=s,
                stage=stage,
                device=self._device(iteration, r, s),
                round=r,
                micro_batches=range(r * self.round_size, count)[: self.round_size],
                group=r % self.replicas,
                turn=r // self.replicas,
                turns=self.turns - r // self.replicas if r // self.replicas == turns[r % self.replicas] - 1 else 1,
            )
            for r in range(self.rounds)
            if r // self.replicas < turns[r % self.replicas]
            for s, stage in enumerate(self.stages)
        )

    @property
    def _stride(self) -> int:
        """Micro-batches from the begin of a group's round to the begin of its next one."""
        return self.round_size * self.replicas

    def _device(self, iteration: int, round: int, stage_index: int) -> int:
        if self.devices < self.replicas:
            return (iteration * self.rounds + round) % self.devices
        turn, group = divmod(round, self.replicas)
        before = (iteration * self.turns + turn) * len(self.stages)  # g0 before the modulus: the group's earlier slots
        return group * self.width + (before + stage_index) % self.width

    @property
    def warm_up(self) -> int:
        """The number of iterations after which graphs are captured, and one more.

        Until then, every device has computed each of its stages with parameters, and gradients, at both ends of their
        buffers. Rounds of one or two micro-batches may take an iteration longer.
        """
        turns, backward = [0] * self.devices, [0] * self.devices
        met: set[tuple[int, int, int, int]] = set()  # device, stage, end of parameters, of gradients
        states: set[tuple[int, ...]] = set()
        last = number = 0
        while (state := (self.slots(number)[0].device, *(turn % 2 for turn in (*turns, *backward)))) not in states:
            states.add(state)
            for slot in self.slots(number):
                end = backward[slot.device] % 2 if slot.stage.backward else 0
                place = (slot.device, slot.stage_index, turns[slot.device] % 2, end)
                turns[slot.device] += 1
                backward[slot.device] += slot.stage.backward
                if place not in met:
                    met.add(place)
                    last = number
            number += 1
        return last + 2

    def __str__(self) -> str:
        stages = " ".join(str(stage) for stage in self.stages)
        replicas = f" R={self.replicas}" if self.replicas > 1 else ""
        return f"{stages} | N={self.devices} M={self.micro_batches} MR={self.round_size}{replicas}"

    @classmethod
    def parse(cls, text: str) -> "Plan":
        stages, _, numbers = text.partition("|")
        match = re.fullmatch(r"\s*N=(\d+) M=(\d+) MR=(\d+)(?: R=(\d+))?\s*", numbers)
        if match is None:
            raise ValueError(f"not a plan: {text!r} (such as 'F0-3 FB4-5 B2-3 B0-1 | N=2 M=4 MR=4')")
        return cls(tuple(Stage.parse(word) for word in stages.split()), *map(int, match.groups(default="1")))

    def grid(self, iterations: int = 1) -> str:
        """A line per device with its slots in order."""
        lines: list[list[str]] = [[] for _ in range(self.devices)]
        for iteration in range(iterations):
            for slot in self.slots(iteration):
                lines[slot.device].append(str(slot.stage))
        return "\n".join(f"device {d}: {' '.join(line)}" for d, line in enumerate(lines))
