"""The machine and the model of a run, or everything that is wrong with the run if they cannot be used."""

from collections.abc import Sequence
from pathlib import Path

from rptrain.checkpoint import adapter
from rptrain.config.errors import MISTAKES, ConfigError
from rptrain.config.resolve import COMMAND_LINE, Resolved
from rptrain.config.schema import Config
from rptrain.data import padding
from rptrain.data.cache import check_folder, default_folder
from rptrain.data.loader import is_file_set
from rptrain.machine.flags import MachineFlags
from rptrain.machine.hardware import Hardware
from rptrain.models.spec import ModelSpec
from rptrain.preflight.checks import (
    Checks,
    Refusal,
    check_data,
    check_files,
    check_other_files,
    check_template,
    check_trackers,
    data_sets,
)
from rptrain.preflight.model import as_trained, base_model, find_files
from rptrain.runs.folder.run_dir import check_creatable, find, forks


def machine_and_model(resolved: Resolved) -> tuple[Hardware, Path, ModelSpec]:
    """This machine, and the folder and spec of the model that the run trains.

    If one of them cannot be used, all mistakes that can be found without it are raised together as a ConfigError.
    """
    config, checks = resolved.config, Checks(resolved)
    hardware = model_dir = base = spec = None
    with checks.about("engine.devices"):
        hardware = MachineFlags().machine(config)
    with checks.about("model.path"):
        model_dir, base = base_model(config)
    if base is not None:
        with checks.about(_key(config)):
            spec = as_trained(base, config)
    if hardware is None or model_dir is None or base is None or spec is None:
        _check_rest(resolved, checks, model_dir, base)
        raise config_error(checks.refusals)
    return hardware, model_dir, spec


def config_error(refusals: Sequence[Refusal], more: Sequence[str] = (), heading: str = MISTAKES) -> ConfigError:
    """The error for a refused run, with the mistakes in the order of the file. `more`: lines of advice after them.
    `heading`: as in ConfigError.
    """
    ordered = sorted(refusals, key=lambda refusal: _order(refusal.place))
    mistakes = [(refusal.place, refusal.text) for refusal in ordered]
    return ConfigError(mistakes, keys=[refusal.key for refusal in ordered], advice=more, heading=heading)


def _order(place: str) -> tuple[bool, int]:
    line = place.rpartition(":")[2]
    return place.startswith(COMMAND_LINE), int(line) if line.isdigit() else 0


def _key(config: Config) -> str:
    """The key that names tensors or modules of the model."""
    if config.adapters is None:
        return "train.freeze"
    return "lora.target_modules" if config.lora is not None else "train.method"


def _check_rest(resolved: Resolved, checks: Checks, model_dir: Path | None, base: ModelSpec | None) -> None:
    """Checks of the run besides its plan, as far as they do not need a model that cannot be read."""
    config = resolved.config
    checks.make("log.report_to", check_trackers, config.log.report_to)
    with checks.about("save.resume"):
        resumed = find(resolved, warn=False)
        if resumed is None or forks(*resumed):
            checks.make("save.output_dir", check_creatable, config.save.output_dir, config.log.run_name or "run")
    if config.adapters is not None and config.adapters.adapter is not None:
        checks.make("lora.adapter", adapter.read, config.adapters.adapter)
    if any(is_file_set(source) for _, source in data_sets(config)):
        checks.make("data.cache_dir", check_folder, Path(config.data.cache_dir or default_folder()))
    if model_dir is None or base is None:
        checks.make("data.chat_template", check_template, config)
        check_files(config, checks)
        return
    check_other_files(config, model_dir, checks)
    checks.make("model.path", find_files, config, model_dir, base)
    checks.make("model.path", padding.check, base, model_dir)
    check_data(config, model_dir, base, None, checks)
