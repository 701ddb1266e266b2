"""The speed that an earlier run measured with the settings of a plan, to show beside the plan's estimate."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rptrain.checkpoint.metadata import RUN_CONFIG
from rptrain.config.schema import Config
from rptrain.runs.folder.listing import GLANCE
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.view.run_view import RunView
from rptrain.utils.errors import UserError

LEAST_STEPS = 8  # of a run whose speed is shown: its first steps are slower
RUNS = 50  # the newest runs of a folder, which are looked at
_SAME_SPEED = {  # settings, by section, that do not change the time of a step
    "model": set[str](),
    "train": {"num_epochs", "max_steps", "eval_steps", "early_stopping_patience", "seed"},
    "engine": {"devices", "replan", "stall_timeout", "stall_action", "trace"},
}


@dataclass(frozen=True)
class PastSpeed:
    run: str
    tokens_per_second: float  # with padding, as that of a plan

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def past_speed(config: Config, devices: tuple[str, ...]) -> PastSpeed | None:
    """The speed of the newest run in `save.output_dir` with these settings, on these devices of this machine.

    `config` is without "auto". None if no run has them and LEAST_STEPS or more steps.
    """
    wanted = _settings(config)
    for run in _newest(Path(config.save.output_dir)):
        try:
            if _settings(RunDir.open(run).config()) != wanted:
                continue
            view = RunView(run, large=GLANCE)
        except (UserError, OSError):  # a run that is damaged, or was just deleted
            continue
        here = view.process is not None and view.process.here and view.process_count == 1
        long = view.step >= LEAST_STEPS
        if here and long and tuple(view.devices) == devices and (speed := view.tokens_per_second):
            return PastSpeed(run.name, speed)
    return None


def _newest(folder: Path) -> list[Path]:
    """The newest runs of a folder."""
    found = list[tuple[float, Path]]()
    for path in folder.glob(f"*/{RUN_CONFIG}"):
        try:
            found.append((path.stat().st_mtime, path.parent))
        except OSError:  # it was just deleted
            continue
    return [run for _, run in sorted(found, reverse=True)[:RUNS]]


def _settings(config: Config) -> dict[str, Any]:
    """The settings that change the time of a step."""
    found: dict[str, Any] = {
        name: getattr(config, name).model_dump(mode="json", exclude=free | {"method"})
        for name, free in _SAME_SPEED.items()
    }
    lora = config.adapters
    return found | {
        "data": (config.data.max_length, config.data.packing),
        "lora": lora and lora.model_dump(mode="json", exclude={"lora_alpha", "use_rslora", "adapter"}),
        "optim": (config.optim.update, config.optim.moments),
    }
