"""The measured times of a run, stored in its folder for plans of the resumed run and of `rptrain plan --timings`."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter, ValidationError

from rptrain.config.errors import shown
from rptrain.config.schema import Config
from rptrain.engine.meter import Measured
from rptrain.machine.hardware import Hardware
from rptrain.models.spec import ModelShape
from rptrain.utils.errors import UserError
from rptrain.utils.files import read_small
from rptrain.utils.paths import inside
from rptrain.utils.replacing import replace_file

FILE = "timings.json"
SECONDS = 1e-9, 1e6  # possible times of a layer or an update
RATES = 1.0, 1e15  # possible rates of copies, in bytes per second
LABELS = {
    "devices": "the kind of device",
    "tokens": "tokens per micro-batch (train.micro_batch_size × data.max_length)",
    "length": "data.max_length",
    "dtype": "model.dtype",
    "layers": "the number of layers",
}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Conditions:
    """The conditions under which times of a model's layers apply, besides settings that a resumed run cannot change."""

    devices: tuple[str, ...]  # each kind once
    tokens: int  # tokens of a micro-batch
    length: int
    dtype: str
    layers: int  # including the head

    @classmethod
    def of(cls, config: Config, spec: ModelShape, hardware: Hardware) -> Self:
        """The conditions of a config without "auto" on these devices."""
        return cls(
            hardware.kinds,
            config.train.sequences * config.data.max_length,
            config.data.max_length,
            config.model.dtype,
            len(spec.stack),
        )

    def differences(self, other: Self) -> list[str]:
        """The conditions that were different when times were measured than they are in `other`, with both values."""
        values = ((label, getattr(self, name), getattr(other, name)) for name, label in LABELS.items())
        return [difference(label, before, after) for label, before, after in values if before != after]


@dataclass(frozen=True)
class Timings:
    """The content of `timings.json`."""

    conditions: Conditions
    measured: Measured

    @property
    def problem(self) -> str | None:
        """Why nothing can be planned with the times, as the end of a sentence; None if it can."""
        measured, layers = self.measured, self.conditions.layers
        if {len(measured.forward), len(measured.backward)} != {layers}:
            counts = f"{len(measured.forward)} (forward) and {len(measured.backward)} (backward)"
            return f"there are times of {counts} layers, and the model has {layers}"
        rates = [rate for rate in (measured.upload, measured.download) if rate is not None]
        seconds = [*measured.forward[:-1], *measured.backward]
        seconds += [time for time in (*measured.forward[-1:], measured.update) if time != 0]  # the head has no forward
        bad = [time for time in seconds if not SECONDS[0] <= time <= SECONDS[1]]
        bad += [rate for rate in rates if not RATES[0] <= rate <= RATES[1]]
        return f"{bad[0]:g} is not possible as a time or rate" if bad else None

    def save(self, folder: Path) -> bool:
        """Replaces the file atomically. Returns whether plans can use the times.

        Logs a warning if they cannot, and leaves the file as it is. Logs a warning too if the file cannot be written.
        """
        if problem := self.problem:
            log.warning("the measured times are not stored in %s: %s", folder / FILE, problem)
            return False
        try:
            replace_file(inside(folder, FILE), TypeAdapter(Timings).dump_json(self, indent=2))
        except OSError as error:
            log.warning("%s cannot be written (%s): a resumed run will measure again", folder / FILE, error.strerror)
        except UserError as error:  # it names the file
            log.warning("%s: a resumed run will measure again", error)
        return True


def read(folder: Path) -> Timings:
    """The times in a run's folder. Raises UserError if the file cannot be read, or holds impossible times."""
    path = inside(folder, FILE)
    try:
        timings = TypeAdapter(Timings).validate_json(read_small(path), strict=True)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError:
        raise UserError(f"{path} is damaged") from None
    if problem := timings.problem:
        raise UserError(f"{path} cannot be used: {problem}")
    return timings


def load(folder: Path, conditions: Conditions) -> Measured | None:
    """The times in a run's folder; None, with a warning if there is a file, if they do not apply to `conditions`."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        timings = read(folder)
    except UserError as error:
        log.warning("%s: the layers are measured again", error)
        return None
    if different := timings.conditions.differences(conditions):
        log.warning("%s does not apply: %s; the layers are measured again", path, "; ".join(different))
        return None
    return timings.measured


def difference(name: str, before: Any, after: Any) -> str:
    """A condition that has changed, with both values."""
    before, after = (" and ".join(value) if isinstance(value, tuple) else shown(value) for value in (before, after))
    return f"{name} was {before}, is {after}"
