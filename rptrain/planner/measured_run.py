"""A run whose measured times `rptrain plan --timings` uses."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from rptrain.config.schema import Config
from rptrain.engine.meter import Measured
from rptrain.engine.optim.traffic import update_bytes_of
from rptrain.machine.hardware import Hardware
from rptrain.models.spec import ModelShape
from rptrain.planner.changes import with_value
from rptrain.planner.choose import step_layout
from rptrain.planner.timings import FILE, Conditions, Timings, difference, read
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records import events
from rptrain.schedule.machine import Card, card_named
from rptrain.utils.errors import UserError

MEASURE = "measure this config: train it for 120 steps or more with engine.replan = true"


@dataclass(frozen=True)
class MeasuredRun:
    """A run, its config and its measured times."""

    path: Path
    config: Config
    timings: Timings
    parameters: int  # of the model, as recorded at the start of the run

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Raises UserError if the folder is not a run's, or has no times that can be used."""
        run = RunDir.open(folder)
        if not (folder / FILE).exists():
            raise UserError(f"{folder} has no measured times ({FILE}): name another run, or {MEASURE}")
        try:
            return cls(folder, run.config(), read(folder), _parameters(run))
        except UserError as error:
            raise UserError(f"{error}; name another run, or {MEASURE}") from None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of devices on which the run was measured."""
        return self.timings.conditions.devices

    def with_micro_batch(self, config: Config) -> Config:
        """The config with the run's micro-batch in place of "auto", if it divides the config's global batch."""
        if config.train.micro_batch_size != "auto":
            return config
        return with_value(config, "train.micro_batch_size", self.config.train.micro_batch_size) or config

    def times(self, config: Config, spec: ModelShape, hardware: Hardware) -> Measured:
        """The times, for the plan of a config without "auto". Raises UserError, with all differences, if they do not
        apply to it.

        With several rounds, updates read gradients of another type than with one: their time is scaled by their bytes.
        """
        conditions = self.timings.conditions
        if not hardware.here:
            conditions = replace(conditions, devices=tuple(sorted({_profile(kind) for kind in self.kinds})))
        before, after = _settings(self.config), _settings(config)
        different = conditions.differences(Conditions.of(config, spec, hardware))
        different += [
            difference(key, value, after[key]) for key, value in before.items() if after.get(key, value) != value
        ]
        if self.parameters != spec.num_parameters:
            different.append(difference("the number of parameters", self.parameters, spec.num_parameters))
        if different:
            card = hardware.machine.card.name
            assumed = (
                f" {card} is assumed: name the GPU model with --card." if hardware.card_source == "assumed" else ""
            )
            raise UserError(
                f"the times measured in {self.path} do not apply to this plan: {'; '.join(different)}.{assumed} "
                f"Change the plan, name another run, or {MEASURE}"
            )
        card, measured = hardware.machine.card, self.timings.measured
        more = _update_bytes(config, spec, card) / _update_bytes(self.config, spec, card)
        return replace(measured, update=measured.update * more)


def _parameters(run: RunDir) -> int:
    """The number of parameters of the run's model. Raises UserError if it is not recorded."""
    records = events.read(run.events_path) if run.events_path.exists() else ()
    for record in records:
        if isinstance(record, events.RunStarted):
            return record.parameters
    raise UserError(f"{run.events_path} cannot be used: it has no record of the model's size")


def _profile(device: str) -> str:
    """The name of a device's profile, by which hypothetical machines know it; without a profile the device's own."""
    card = card_named(device)
    return card.name if card else device


def _update_bytes(config: Config, spec: ModelShape, card: Card) -> float:
    """Bytes that the update of a step reads and writes."""
    layout = step_layout(config, card)
    units = [spec.units[index] for index in spec.trained(range(len(spec.units)))]
    return sum(unit.numel * update_bytes_of(layout, [unit]) for unit in units)


def _settings(config: Config) -> dict[str, Any]:
    """The settings, by key, that change the times of layers, copies or updates and are not part of `Conditions`.

    Lists are sorted, because their order does not matter.
    """
    train, lora = config.train, config.adapters
    adapters = lora.model_dump(mode="json", exclude={"lora_alpha", "use_rslora", "adapter"}) if lora else {}
    settings = {
        "model.hold": config.model.hold,
        "train.method": "lora" if lora else "full",
        "train.freeze": list(train.freeze),
        "train.router_aux_loss_coef": train.router_aux_loss_coef,
        **{f"lora.{key}": value for key, value in adapters.items()},
        "optim.moments": config.optim.moments,
        "engine.optimizer_threads": config.engine.optimizer_threads,
        "engine.fp8": config.engine.fp8,
        "engine.fp16_accumulation": config.engine.fp16_accumulation,
    }
    return {key: sorted(value) if isinstance(value, list) else value for key, value in settings.items()}
