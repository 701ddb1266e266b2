"""What a run measured, kept in its folder: when it is resumed, it plans with that from the start."""

import logging
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from pydantic import TypeAdapter, ValidationError

from rptrain.engine.meter import Measured
from rptrain.job import Job

FILE = "timings.json"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Conditions:
    """What the times of a model's layers hold for."""

    devices: tuple[str, ...]  # each kind once
    tokens: int  # of a micro-batch
    length: int
    dtype: str
    layers: int  # the head is one

    @classmethod
    def of(cls, job: Job) -> Self:
        config = job.config
        return cls(
            tuple(sorted({_kind(name) for name in job.devices})),
            config.train.rows * config.data.max_length,
            config.data.max_length,
            config.model.dtype,
            len(job.spec.stack),
        )


@dataclass(frozen=True)
class Timings:
    """The content of `timings.json`."""

    conditions: Conditions
    measured: Measured

    def save(self, folder: Path) -> None:
        """Replaces the file as a whole, so that it is never half there."""
        aside = (folder / FILE).with_suffix(".part")
        aside.write_bytes(TypeAdapter(Timings).dump_json(self, indent=2))
        aside.replace(folder / FILE)


def load(folder: Path, conditions: Conditions) -> Measured | None:
    """The times in a run's folder; None, with a warning where there is a file, if they do not hold for `conditions`."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        timings = TypeAdapter(Timings).validate_json(path.read_bytes(), strict=True)
    except ValidationError:
        log.warning("%s cannot be read: the layers are measured again", path)
        return None
    measured = timings.measured
    if timings.conditions != conditions or {len(measured.forward), len(measured.backward)} != {conditions.layers}:
        log.warning("%s was measured on other devices or in other sizes: the layers are measured again", path)
        return None
    return measured


def _kind(device: str) -> str:
    """The name of a GPU's model, or of the processor's."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()
