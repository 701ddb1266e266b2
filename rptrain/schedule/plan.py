"""Stages, slots and plans: a schedule as a value, with a short text form.

Paper section 3.2: the forward stages F, the fused stage FB (the paper's B1) and the backward
stages B form one sequence of slots; slot i of a round runs on device (g0 + i) mod N, and g0 carries over from
round to round and from iteration to iteration, so the pipeline is never flushed.
"""

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["F", "FB", "B"]


@dataclass(frozen=True)
class Stage:
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

    def __str__(self) -> str:
        first, last = self.micro_batches[0], self.micro_batches[-1]
        return f"{self.index}:{self.stage}@{self.device}r{self.round}m{first}-{last}"


@dataclass(frozen=True)
class Plan:
    """The plan of every iteration.

    `stages` are in dispatch order: forward stages, the fused stage, backward stages. `micro_batches` (M) are
    processed in rounds of `round_size` (M_R), on `devices` (N) devices.
    """

    stages: tuple[Stage, ...]
    devices: int
    micro_batches: int
    round_size: int

    @property
    def rounds(self) -> int:
        return self.micro_batches // self.round_size

    def slots(self, iteration: int) -> tuple[Slot, ...]:
        """The slots of an iteration (counted from 0) in dispatch order."""
        per_round = len(self.stages)
        start = iteration * per_round * self.rounds  # g0 before the modulus: every earlier slot
        return tuple(
            Slot(
                index=r * per_round + s,
                stage_index=s,
                stage=stage,
                device=(start + r * per_round + s) % self.devices,
                round=r,
                micro_batches=range(r * self.round_size, (r + 1) * self.round_size),
            )
            for r in range(self.rounds)
            for s, stage in enumerate(self.stages)
        )

    @property
    def warm_up(self) -> int:
        """The number of iterations until every device has computed each of its stages in both of its parameter slots,
        and one more. Every graph has been captured by then.
        """
        turns = [0] * self.devices
        met: set[tuple[int, int, int]] = set()  # device, stage, parameter slot
        states: set[tuple[int, ...]] = set()
        last = number = 0
        while (state := (self.slots(number)[0].device, *(turn % 2 for turn in turns))) not in states:
            states.add(state)
            for slot in self.slots(number):
                place = (slot.device, slot.stage_index, turns[slot.device] % 2)
                turns[slot.device] += 1
                if place not in met:
                    met.add(place)
                    last = number
            number += 1
        return last + 2

    def __str__(self) -> str:
        stages = " ".join(str(stage) for stage in self.stages)
        return f"{stages} | N={self.devices} M={self.micro_batches} MR={self.round_size}"

    @classmethod
    def parse(cls, text: str) -> "Plan":
        stages, _, numbers = text.partition("|")
        match = re.fullmatch(r"\s*N=(\d+) M=(\d+) MR=(\d+)\s*", numbers)
        if match is None:
            raise ValueError(f"not a plan: {text!r} (such as 'F0-3 FB4-5 B2-3 B0-1 | N=2 M=4 MR=4')")
        return cls(tuple(Stage.parse(word) for word in stages.split()), *map(int, match.groups()))

    def grid(self, iterations: int = 1) -> str:
        """A line per device with its slots in order."""
        lines: list[list[str]] = [[] for _ in range(self.devices)]
        for iteration in range(iterations):
            for slot in self.slots(iteration):
                lines[slot.device].append(str(slot.stage))
        return "\n".join(f"device {d}: {' '.join(line)}" for d, line in enumerate(lines))
