"""The results of `rptrain bench`: speed, memory, and the use of each device's time.

The JSON form is one object with these stable keys. Times are in seconds, sizes in bytes, rates in bytes per second;
shares are fractions of 1.

    model        path, architecture, parameters, layers (the head is one), base (lora.base, or null)
    machine      devices (name, kind), torch, rptrain (their versions)
    step         micro_batch_size, length, micro_batches, round_size, replicas, tokens, update
    plan         text (rptrain/schedule/plan.py reads it), seconds_per_step (what the planner estimated)
    throughput   seconds_per_step (the median), steps (the seconds of each measured one), tokens_per_second (of all of
                 them together), losses (of all steps, those of the warm-up too; null where one is not finite), skipped
                 (steps without finite gradients, which have no update)
    first_step   seconds, and their parts: preparing (config, plan, data), memory (taking and locking it,
                 starting the engine), weights (drawing them), step (the first one)
    memory       gpus (device, peak: by the driver, context and other processes included, planned: the same, limit,
                 allocator_peak: reserved by PyTorch, allocator_planned, driver_allocations: in the measured
                 steps), host (states_per_parameter, states, activations, process: its proportional set size, locked:
                 whether all is page-locked that GPUs copy, copied_bytes, of which locked_bytes are; CPU workers: none)
    devices      for each device: name, seconds (of the measured steps), busy and idle: shares that add up to 1. idle is
                 by cause, which rptrain/bench/idle.py explains: parameters, activations, producers, optimizer,
                 gradients, launch, boundary, other; busy_steps: the share of each measured step
    transfers    upload (of parameters), download (of gradients): rates while they move, of one device; null where
                 there were none; upload_bytes, download_bytes: of a measured step, on all devices together, each copy
                 counted; base_bytes: of upload_bytes, those of layers' frozen weights
    optimizer    seconds (of an update), parameters_per_second (that train), bytes_per_parameter (read and written),
                 bytes_per_second; null without an update
    launches     share (the host's launch time over the devices' computation), stages (stage, host, device: medians for
                 a micro-batch)
    floor        tokens_per_second (of all devices, each layer's forward recomputed), without_recompute, achieved (of
                 the first), copy (rate), layers (name, count, forward, backward, recomputed, operations: name,
                 forward, backward; for a micro-batch); null without --floor
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from math import isfinite
from statistics import median
from typing import Any

import torch

from rptrain import __version__
from rptrain.bench.floor import Floor
from rptrain.bench.idle import Usage, usage
from rptrain.bench.memory import Peak
from rptrain.bench.timeline import DeviceTimeline, StageLaunches, by_stage
from rptrain.engine.memory.page_locking import Locking
from rptrain.engine.meter import Measured
from rptrain.machine.hardware import device_kind
from rptrain.planner.choose import LIBRARIES
from rptrain.train.job import Job


@dataclass(frozen=True)
class Startup:
    """The time to the end of the first step, in seconds."""

    preparing: float
    memory: float
    weights: float
    step: float

    @property
    def seconds(self) -> float:
        return self.preparing + self.memory + self.weights + self.step


@dataclass(frozen=True)
class Copied:
    """Copied bytes per step on all devices together."""

    upload_bytes: float
    base_bytes: float
    download_bytes: float


@dataclass(frozen=True)
class Report:
    """A measured run. `ends`: the end times of the last step before the measured ones, and of these."""

    job: Job
    ends: tuple[float, ...]
    losses: tuple[float, ...]
    skipped: int
    startup: Startup
    peaks: tuple[Peak, ...]  # of each GPU
    allocations: tuple[int, ...]  # driver allocations in the measured steps, for each GPU
    process: int  # bytes
    locking: Locking
    adam_bytes: float  # of a parameter
    lanes: tuple[DeviceTimeline, ...]
    updates: tuple[tuple[float, float], ...]
    measured: Measured | None
    copied: Copied
    floor: Floor | None

    @property
    def window(self) -> tuple[float, float]:
        """Start and end of the measured steps."""
        return self.ends[0], self.ends[-1]

    @property
    def steps(self) -> list[float]:
        return [after - before for before, after in zip(self.ends, self.ends[1:], strict=False)]

    @property
    def tokens_per_second(self) -> float:
        return self.job.config.tokens * len(self.steps) / (self.ends[-1] - self.ends[0])

    @cached_property
    def usages(self) -> list[Usage]:
        """The usage of each device."""
        return [usage(lane.computations, lane.host, self.window) for lane in self.lanes]

    @cached_property
    def launches(self) -> list[StageLaunches]:
        return by_stage(launch for lane in self.lanes for launch in lane.launches)

    @property
    def launch_share(self) -> float:
        """Launch time over computation time; every stage computes every micro-batch once per step."""
        return sum(stage.host for stage in self.launches) / sum(stage.device for stage in self.launches)

    @property
    def floor_tokens_per_second(self) -> tuple[float, float]:
        """Tokens per second of all devices, with recomputation and without."""
        assert self.floor is not None
        count = len(self.lanes)
        return count * self.floor.tokens_per_second(), count * self.floor.tokens_per_second(recompute=False)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object that the module's docstring describes."""
        job, config = self.job, self.job.config
        return {
            "model": {
                "path": config.model.path,
                "architecture": job.spec.architecture,
                "parameters": job.spec.num_parameters,
                "layers": len(job.spec.stack),
                "base": config.adapters and config.adapters.base,
            },
            "machine": {
                "devices": [{"name": name, "kind": device_kind(name)} for name in job.devices],
                "torch": torch.__version__,
                "rptrain": __version__,
            },
            "step": config.step_sizes(),
            "plan": {"text": str(job.plan.plan), "seconds_per_step": job.plan.estimate.period},
            "throughput": {
                "seconds_per_step": median(self.steps),
                "steps": self.steps,
                "tokens_per_second": self.tokens_per_second,
                "losses": [loss if isfinite(loss) else None for loss in self.losses],
                "skipped": self.skipped,
            },
            "first_step": {"seconds": self.startup.seconds, **asdict(self.startup)},
            "memory": {
                "gpus": [*self._gpus()],
                "host": {
                    "states_per_parameter": job.plan.store_bytes / job.spec.num_parameters,
                    "states": job.plan.store_bytes,
                    "activations": job.plan.boundary_bytes,
                    "process": self.process,
                    "locked": self.locking.copied > 0 and not self.locking.missing,
                    "locked_bytes": self.locking.locked,
                    "copied_bytes": self.locking.copied,
                },
            },
            "devices": [
                {
                    "name": lane.device,
                    "seconds": used.total,
                    "busy": used.busy / used.total,
                    "idle": {cause: seconds / used.total for cause, seconds in used.idle.items()},
                    "busy_steps": [*self._busy(lane)],
                }
                for lane, used in zip(self.lanes, self.usages, strict=True)
            ],
            "transfers": {
                "upload": self.measured and self.measured.upload,
                "download": self.measured and self.measured.download,
                **asdict(self.copied),
            },
            "optimizer": self._optimizer(),
            "launches": {"share": self.launch_share, "stages": [asdict(stage) for stage in self.launches]},
            "floor": self._floor(),
        }

    def _busy(self, lane: DeviceTimeline) -> Iterator[float]:
        """The busy share of a device in each measured step."""
        for window in pairwise(self.ends):
            used = usage(lane.computations, lane.host, window)
            yield used.busy / used.total

    def _gpus(self) -> Iterator[dict[str, Any]]:
        job = self.job
        for gpu, peak, allocations in zip(job.hardware.gpus, self.peaks, self.allocations, strict=True):
            yield {
                "device": gpu.name,
                "peak": peak.driver,
                "planned": job.plan.device.total + LIBRARIES + gpu.context,
                "limit": gpu.limit,
                "allocator_peak": peak.allocator,
                "allocator_planned": job.plan.device.total,
                "driver_allocations": allocations,
            }

    def _optimizer(self) -> dict[str, Any] | None:
        if self.measured is None:
            return None
        trained = (param.numel for unit in self.job.spec.units if unit.trainable for param in unit.params)
        rate = sum(trained) / self.measured.update
        return {
            "seconds": self.measured.update,
            "parameters_per_second": rate,
            "bytes_per_parameter": self.adam_bytes,
            "bytes_per_second": rate * self.adam_bytes,
        }

    def _floor(self) -> dict[str, Any] | None:
        if self.floor is None:
            return None
        recomputed, without = self.floor_tokens_per_second
        return {
            "tokens_per_second": recomputed,
            "without_recompute": without,
            "achieved": self.tokens_per_second / recomputed,
            "copy": self.floor.copy,
            "layers": [
                {
                    "name": layer.name,
                    "count": layer.count,
                    "forward": layer.forward,
                    "backward": layer.backward,
                    "recomputed": layer.recomputed,
                    "operations": [
                        {"name": line.operation, "forward": line.forward, "backward": line.backward}
                        for line in layer.lines
                    ],
                }
                for layer in self.floor.layers
            ],
        }
