"""A RoundPipe plan as a program to simulate: computation, transfers by priority, and the optimizer's updates."""

from collections.abc import Sequence
from dataclasses import dataclass

from rptrain.schedule.costs import LayerCost
from rptrain.schedule.lower import CHUNK_BYTES, RING, boundaries
from rptrain.schedule.partition import stage_time
from rptrain.schedule.plan import Plan, Slot, Stage
from rptrain.schedule.simulate import HOST, Hold, Program, Task

PARAMETERS = 1  # priority on a link: behind activations, which have 0 (paper section 4.2)


@dataclass(frozen=True)
class Links:
    """The speed of a device's copies in each direction while all devices copy."""

    up: float  # bytes per second to the device
    down: float
    boundary: int  # bytes of an activation between layers
    chunk: int = CHUNK_BYTES  # bytes that are copied without interruption
    latency: float = 20e-6  # seconds per micro-batch for copies, in addition to their bytes


@dataclass
class _Run:
    """The tasks of a slot, as positions in the list."""

    slot: Slot
    compute: list[int]
    params: list[int]
    sums: list[int]
    grads: list[int]


class _Builder:
    def __init__(
        self, plan: Plan, costs: Sequence[LayerCost], links: Links | None, lag: int, weights: Sequence[int]
    ) -> None:
        self.plan, self.costs, self.links, self.lag, self.weights = plan, costs, links, lag, weights
        self.bounds = boundaries(plan.stages)
        self.tasks: list[Task] = []
        self.holds: list[Hold] = []
        self.lanes: list[list[_Run]] = [[] for _ in range(plan.devices)]  # each device's slots so far
        self.outputs: dict[int, int] = {}  # previous slot: micro-batch to the task that writes it
        self.rings: list[list[tuple[int, int]]] = [[] for _ in range(plan.devices)]  # tasks: computation, output copy
        self.summed: list[list[_Run]] = [[] for _ in range(plan.devices)]  # each device's backward slots so far
        stages = plan.stages
        following = [stages[(index + plan.width) % len(stages)] for index in range(len(stages))]
        pairs = zip(stages, following, strict=True)
        self.room = max(self.sums(one) + self.sums(other) for one, other in pairs)  # bytes for accumulators
        self.updates: dict[tuple[int, int], int] = {}  # (iteration, layer) to the task that makes the version
        self.left: dict[tuple[int, int], list[int]] = {}  # (group, layer) to the downloads of its gradients, last turn

    def add(self, task: Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1

    def version(self, iteration: int, layers: range) -> tuple[int, ...]:
        """The updates that made the weights of an iteration."""
        return self._made(iteration - 1 - self.lag, layers)

    def _made(self, iteration: int, layers: range) -> tuple[int, ...]:
        """The updates of an iteration; none before iteration 0."""
        return tuple(self.updates[iteration, layer] for layer in layers if (iteration, layer) in self.updates)

    def slot(self, iteration: int, slot: Slot) -> None:
        lane = self.lanes[slot.device]
        run = _Run(slot, [], [], [], [])
        run.params = self._params(iteration, slot, lane)
        start = [*run.params, *([lane[-1].compute[-1]] if lane else []), *self._accumulators(slot)]
        run.sums = self._partial_sums(iteration, slot, start)
        ring = self.rings[slot.device]
        seconds, kept = stage_time(self.costs, slot.stage), self._sum(slot, "kept")
        outputs: dict[int, int] = {}
        for m in slot.micro_batches:
            weight = self.weights[m % self.plan.round_size]
            before = run.compute[-1:] or run.sums[-1:] or [*start]
            source = () if slot.stage_index == 0 else (self.outputs[m],)
            arrived = None
            if self.links is None:
                before += [*source, *self.version(iteration, slot.stage.layers)]
            else:
                embedded = self.version(iteration, range(1)) if slot.stage_index == 0 else ()
                entry = ring[-RING] if len(ring) >= RING else ()  # frees the reused ring entries
                arrived = self._copy_in(iteration, slot, m, weight, (*source, *embedded, *entry[:1]))
                before += [arrived, *entry[1:]]
            index = self.add(
                Task(
                    "compute",
                    slot.device,
                    seconds * weight,
                    tuple(before),
                    slot.stage.kind,
                    slot.stage.layers,
                    iteration,
                    slot.round,
                    m,
                )
            )
            run.compute.append(index)
            if arrived is not None:
                self.holds.append(Hold(slot.device, self._input_bytes(slot), arrived, index))
            if slot.stage.backward:
                self.holds.append(Hold(slot.device, kept, index, index))
            outputs[m] = index if self.links is None else self._copy_out(iteration, slot, m, weight, index)
            ring.append((index, outputs[m]))
        self.outputs = outputs
        self._own(iteration, run)
        lane.append(run)

    def _params(self, iteration: int, slot: Slot, lane: list[_Run]) -> list[int]:
        """Uploads of parameters, in pieces, into the end of the buffer that the last but one stage has freed."""
        if self.links is None:
            return []
        free = (lane[-2].compute[-1],) if len(lane) > 1 else ()
        pieces = []
        for layer in slot.stage.layers:
            for nbytes in _pieces(self.costs[layer].params, self.links.chunk):
                version = self.version(iteration, range(layer, layer + 1))
                seconds = nbytes / self.links.up
                pieces.append(
                    self.add(
                        Task(
                            "up", slot.device, seconds, free + version, "params", range(layer, layer + 1),
                            iteration, slot.round, len(pieces), PARAMETERS,
                        )
                    )
                )  # fmt: skip
        return pieces

    def _partial_sums(self, iteration: int, slot: Slot, start: list[int]) -> list[int]:
        """Uploads of the group's previous partial sums, in order, before the computation.

        In this simulation the device does not compute meanwhile, and they do not slow the link's other copies; the
        engine uploads them while the stage before is computed.
        """
        if self.links is None or slot.turn == 0 or not slot.stage.backward:
            return []
        copies: list[int] = []
        for layer in slot.stage.layers:
            seconds = self.costs[layer].sums / self.links.up
            after = (*(copies[-1:] or start), *self.left[slot.group, layer])
            copies.append(
                self.add(
                    Task(
                        "compute", slot.device, seconds, after, "sums", range(layer, layer + 1),
                        iteration, slot.round, slot.micro_batches[0],
                    )
                )
            )  # fmt: skip
        return copies

    def _copy_in(self, iteration: int, slot: Slot, m: int, weight: int, after: tuple[int, ...]) -> int:
        assert self.links is not None
        seconds = (self._input_bytes(slot) / self.links.up + self.links.latency) * weight
        return self.add(Task("up", slot.device, seconds, after, "x", slot.stage.layers, iteration, slot.round, m))

    def _input_bytes(self, slot: Slot) -> int:
        assert self.links is not None
        return self.links.boundary * (2 if slot.stage.kind == "B" else 1)

    def _copy_out(self, iteration: int, slot: Slot, m: int, weight: int, computed: int) -> int:
        assert self.links is not None
        nbytes = self.links.boundary * max(len(self.bounds.stages[slot.stage_index].x_out), 1)
        seconds = (nbytes / self.links.down + self.links.latency) * weight
        left = self.add(
            Task("down", slot.device, seconds, (computed,), "y", slot.stage.layers, iteration, slot.round, m)
        )
        self.holds.append(Hold(slot.device, nbytes, computed, left))
        return left

    def _own(self, iteration: int, run: _Run) -> None:
        """The memory that a slot holds, and the download of its gradients."""
        slot, last = run.slot, run.compute[-1]
        self.holds.append(Hold(slot.device, self._sum(slot, "params"), (run.params or run.compute)[0], last))
        self.holds.append(Hold(slot.device, self._sum(slot, "prepared"), run.compute[0], last))
        if not slot.stage.backward:
            return
        if self.sums(slot.stage):
            self.summed[slot.device].append(run)
        if self.links is None:
            run.grads = [last]
            self.holds.append(Hold(slot.device, self.sums(slot.stage), (run.sums or run.compute)[0], last))
            return
        for layer in reversed(slot.stage.layers):
            of_layer = range(layer, layer + 1)
            after = (last, *self._made(iteration - 1, of_layer))  # frees the host's gradients
            first = len(run.grads)
            for nbytes in _pieces(self.costs[layer].grads, self.links.chunk):
                seconds, piece = nbytes / self.links.down, len(run.grads)
                run.grads.append(
                    self.add(
                        Task(
                            "down", slot.device, seconds, after, "grads", of_layer,
                            iteration, slot.round, piece, PARAMETERS,
                        )
                    )
                )  # fmt: skip
            self.left[slot.group, layer] = run.grads[first:]
        self.holds.append(Hold(slot.device, self.sums(slot.stage), (run.sums or run.compute)[0], run.grads[-1]))

    def sums(self, stage: Stage) -> int:
        """Bytes of a stage's gradient accumulators."""
        return sum(self.costs[layer].sums for layer in stage.layers) if stage.backward else 0

    def _accumulators(self, slot: Slot) -> list[int]:
        """The downloads that free the accumulators of a backward slot; stages use both ends of a buffer in turn."""
        before = self.summed[slot.device]
        if not self.sums(slot.stage) or self.links is None:
            return []
        overlap = before[-1:] if before and self.sums(before[-1].slot.stage) + self.sums(slot.stage) > self.room else []
        return [task for run in (*before[-2:-1], *overlap) for task in run.grads]

    def _sum(self, slot: Slot, part: str) -> int:
        return sum(getattr(self.costs[layer], part) for layer in slot.stage.layers)

    def update(self, iteration: int, runs: Sequence[_Run]) -> None:
        """The optimizer's pass over the layers, once all gradients have arrived (their norm is needed first).

        Before, it sums them over all processes, the last layers first, each once it has arrived from all groups.
        """
        after = tuple(task for run in runs for task in run.grads)
        layers = range(len(self.costs))
        if any(cost.summation for cost in self.costs):
            summed: tuple[int, ...] = ()
            for layer in reversed(layers):
                arrived = [task for run in runs if layer in run.slot.stage.layers for task in run.grads]
                seconds, of_layer = self.costs[layer].summation, range(layer, layer + 1)
                summed = (self.add(Task("optimizer", 0, seconds, (*arrived, *summed), "reduce", of_layer, iteration)),)
            after += summed
        for layer in layers if self.lag == 0 else reversed(layers):
            index = self.add(
                Task("optimizer", 0, self.costs[layer].renewal, after, "update", range(layer, layer + 1), iteration)
            )
            self.updates[iteration, layer] = index
            after = (index,)

    def host(self, iteration: int, runs: Sequence[_Run]) -> None:
        """Boundary buffers, from the first write to the last read, for each micro-batch of a round."""
        if self.links is None:
            return
        starts = {stage.start for stage in self.plan.stages} | {stage.stop for stage in self.plan.stages[:-1]}
        for boundary in sorted(starts - {len(self.costs)}):
            users = [
                run for run in runs
                if boundary in (run.slot.stage.start, run.slot.stage.stop)
                or (run.slot.stage.kind == "F" and boundary in run.slot.stage.layers)
            ]  # fmt: skip
            for r in range(self.plan.rounds):
                of_round = [run for run in users if run.slot.round == r]
                for position in range(self.plan.round_size):
                    first, last = of_round[0].compute[position], of_round[-1].compute[position]
                    self.holds.append(Hold(HOST, self.links.boundary, first, last))


def dispatch(
    plan: Plan,
    costs: Sequence[LayerCost],
    *,
    links: Links | None = None,
    lag: int = 0,
    iterations: int = 1,
    weights: Sequence[int] | None = None,
) -> Program:
    """The tasks of `iterations` steps. Without `links`, transfers take no time. `lag` is 1 in async, 0 in sync.

    As in the engine, a stage starts once all of its parameters have arrived, and a device holds the parameters of two
    stages. Gradients are downloaded during the next stage, once the previous ones were read, and their accumulators
    serve the stage after that. Activations have priority.
    A version is uploaded once its layer was updated. Backward stages of a group's later rounds upload gradient
    accumulators.

    `weights`: how many micro-batches each one of a round stands for (see coarse.py), by default itself.
    """
    builder = _Builder(plan, costs, links, lag, weights or (1,) * plan.round_size)
    for iteration in range(iterations):
        done = [len(lane) for lane in builder.lanes]
        builder.outputs = {}
        for slot in plan.slots(iteration):
            builder.slot(iteration, slot)
        runs = [run for lane, count in zip(builder.lanes, done, strict=True) for run in lane[count:]]
        runs.sort(key=lambda run: run.slot.index)
        builder.update(iteration, runs)
        builder.host(iteration, runs)
    return Program(plan.devices, tuple(builder.tasks), tuple(builder.holds))


def _pieces(nbytes: int, chunk: int) -> list[float]:
    """Equal parts of at most `chunk` bytes; one empty part if there is nothing to copy but a version to wait for."""
    count = max(-(-nbytes // chunk), 1)
    return [nbytes / count] * count
