"""A discrete-event simulation of tasks on devices, links and the optimizer: a timeline, bubbles and peak memory."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import Literal, NamedTuple

Lane = Literal["compute", "up", "down", "optimizer"]
HOST = -1  # the device of a Hold in host memory
COMPUTATION = ("F", "FB", "B")  # kinds of tasks; a compute lane also waits for copies, which is idle time


class Task(NamedTuple):
    """Work that occupies its resource, `lane` of `device`, for `seconds` once every task of `after` has ended.

    Of the tasks that are ready, a resource takes the one with the lowest `priority` number, then the first in the list.
    A running task is not interrupted.
    """

    lane: Lane
    device: int
    seconds: float
    after: tuple[int, ...]  # positions in the list, earlier or later
    kind: (
        str  # F, FB, B; params, grads, x (inputs up), y (outputs down), sums (up, in the compute lane); reduce, update
    )
    layers: range
    iteration: int = 0
    round: int = 0
    micro_batch: int = 0
    priority: int = 0

    def __str__(self) -> str:
        layers = f"{self.layers[0]}-{self.layers[-1]}" if self.layers else ""
        return f"{self.kind}{layers}.{self.micro_batch} of iteration {self.iteration} on {self.lane} {self.device}"


class Hold(NamedTuple):
    """Bytes held on a device, or in HOST memory, from a task's start to another's end."""

    place: int
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Program:
    """The tasks and memory to simulate."""

    devices: int
    tasks: tuple[Task, ...]
    holds: tuple[Hold, ...]


class Deadlock(ValueError):
    """Tasks wait for one another; the message names some of them."""


@dataclass(frozen=True)
class Timeline:
    """When each task of a program started and ended, in seconds from the first."""

    program: Program
    starts: tuple[float, ...]
    ends: tuple[float, ...]

    @cached_property
    def makespan(self) -> float:
        """The time from the start to the end of the last computation."""
        return max(end for task, end in zip(self.program.tasks, self.ends, strict=True) if task.lane == "compute")

    def busy(self, device: int, lane: Lane = "compute") -> float:
        """Seconds in which a resource worked; a compute lane does not work while it copies."""
        return self._busy.get((lane, device), 0.0)

    @cached_property
    def _busy(self) -> dict[tuple[Lane, int], float]:
        found: dict[tuple[Lane, int], float] = defaultdict(float)
        for task in self.program.tasks:
            if task.lane != "compute" or task.kind in COMPUTATION:
                found[task.lane, task.device] += task.seconds
        return dict(found)

    def bubble(self, device: int | None = None) -> float:
        """The fraction of the makespan in which a device, or the average of all devices, did not compute."""
        devices = range(self.program.devices) if device is None else (device,)
        return 1 - sum(map(self.busy, devices)) / (len(devices) * self.makespan)

    def end_of(self, iteration: int) -> float:
        """The time at which the last computation of an iteration ended."""
        return max(
            end
            for task, end in zip(self.program.tasks, self.ends, strict=True)
            if task.lane == "compute" and task.iteration == iteration
        )

    def period(self, first: int, last: int) -> float:
        """Seconds per step from the end of iteration `first` to the end of iteration `last`."""
        return (self.end_of(last) - self.end_of(first)) / (last - first)

    def steady_bubble(self, first: int, last: int) -> float:
        """The idle fraction of all devices from the end of iteration `first` to `last`, without fill and drain."""
        work = sum(task.seconds for task in self.program.tasks if task.kind in COMPUTATION and task.iteration == last)
        return 1 - work / (self.program.devices * self.period(first, last))

    def peak(self, place: int) -> int:
        """The most bytes held at once on a device, or in HOST memory."""
        changes: list[tuple[float, int, int]] = []
        for hold in self.program.holds:
            if hold.place == place:
                changes += [(self.starts[hold.first], 1, hold.nbytes), (self.ends[hold.last], 0, -hold.nbytes)]
        held = most = 0
        for _, _, change in sorted(changes):
            held += change
            most = max(most, held)
        return most


def simulate(program: Program) -> Timeline:
    """Runs the tasks as early as resources and dependencies allow. Raises Deadlock if some can never run."""
    tasks = program.tasks
    waits = [len(task.after) for task in tasks]
    followers: dict[int, list[int]] = defaultdict(list)
    for index, task in enumerate(tasks):
        for before in task.after:
            followers[before].append(index)
    ready: dict[tuple[Lane, int], list[tuple[int, int]]] = defaultdict(list)
    idle = {(task.lane, task.device): True for task in tasks}
    starts, ends = [0.0] * len(tasks), [0.0] * len(tasks)
    running: list[tuple[float, int]] = []

    def start(resources: Iterable[tuple[Lane, int]], now: float) -> None:
        for resource in resources:
            if idle[resource] and ready[resource]:
                _, index = heappop(ready[resource])
                idle[resource] = False
                starts[index], ends[index] = now, now + tasks[index].seconds
                heappush(running, (ends[index], index))

    def release(index: int) -> tuple[Lane, int]:
        task = tasks[index]
        heappush(ready[task.lane, task.device], (task.priority, index))
        return task.lane, task.device

    start(sorted({release(index) for index, count in enumerate(waits) if not count}), 0.0)
    done = 0
    while running:
        now, touched = running[0][0], set()
        while running and running[0][0] == now:  # all tasks that end now, before the next ones are chosen
            _, index = heappop(running)
            done += 1
            resource = tasks[index].lane, tasks[index].device
            idle[resource] = True
            touched.add(resource)
            for follower in followers[index]:
                waits[follower] -= 1
                if not waits[follower]:
                    touched.add(release(follower))
        start(sorted(touched), now)
    if done < len(tasks):
        raise Deadlock(_stuck(tasks, waits))
    return Timeline(program, tuple(starts), tuple(ends))


def _stuck(tasks: Sequence[Task], waits: Sequence[int]) -> str:
    stuck = [index for index, count in enumerate(waits) if count]
    lines = [
        f"{tasks[index]} waits for {', '.join(str(tasks[b]) for b in tasks[index].after if waits[b])}"
        for index in stuck[:5]
    ]
    return f"{len(stuck)} tasks wait for one another:\n  " + "\n  ".join(lines)
