"""The measured times of a run, stored in its folder, so that a resumed run plans with them from the start."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Self

from pydantic import TypeAdapter, ValidationError

from rptrain.checkpoint.atomic_dir import PARTIAL, beside
from rptrain.config.schema import Config
from rptrain.engine.meter import Measured
from rptrain.models.spec import ModelShape
from rptrain.planner.hardware import device_kind

FILE = "timings.json"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Conditions:
    """The conditions under which times of a model's layers apply."""

    devices: tuple[str, ...]  # each kind once
    tokens: int  # tokens of a micro-batch
    length: int
    dtype: str
    layers: int  # including the head

    @classmethod
    def of(cls, config: Config, spec: ModelShape, devices: Sequence[str]) -> Self:
        """The conditions of a config without "auto" on this machine's devices."""
        return cls(
            tuple(sorted({device_kind(name) for name in devices})),
            config.train.sequences * config.data.max_length,
            config.data.max_length,
            config.model.dtype,
            len(spec.stack),
        )


@dataclass(frozen=True)
class Timings:
    """The content of `timings.json`."""

    conditions: Conditions
    measured: Measured

    def save(self, folder: Path) -> None:
        """Replaces the file atomically. Logs a warning if it cannot be written."""
        aside = beside(folder / FILE, PARTIAL)
        try:
            aside.write_bytes(TypeAdapter(Timings).dump_json(self, indent=2))
            aside.replace(folder / FILE)
        except OSError as error:
            log.warning("%s cannot be written (%s): a resumed run will measure again", folder / FILE, error.strerror)


def load(folder: Path, conditions: Conditions) -> Measured | None:
    """The times in a run's folder; None, with a warning if there is a file, if they do not apply to `conditions`."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        timings = TypeAdapter(Timings).validate_json(path.read_bytes(), strict=True)
    except (ValidationError, OSError):
        log.warning("%s cannot be read: the layers are measured again", path)
        return None
    measured = timings.measured
    layers = (*measured.forward, *measured.backward, measured.update)
    rates = [rate for rate in (measured.upload, measured.download) if rate is not None]
    if not (all(isfinite(t) and t >= 0 for t in layers) and all(isfinite(r) and r > 0 for r in rates)):
        log.warning("%s holds impossible times: the layers are measured again", path)
        return None
    if timings.conditions != conditions or {len(measured.forward), len(measured.backward)} != {conditions.layers}:
        log.warning("%s was measured on other devices or with other sizes: the layers are measured again", path)
        return None
    return measured
