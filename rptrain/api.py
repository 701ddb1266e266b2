"""The Python API: `from rptrain import load_config, plan, train`, which do what the commands do."""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rptrain.config.resolve import Resolved, resolve_mapping
from rptrain.config.schema import Config
from rptrain.train.call import TrainResult, train
from rptrain.utils.errors import UserError

if TYPE_CHECKING:
    from rptrain.planner.report import PlanReport

__all__ = ["Config", "TrainResult", "UserError", "load_config", "plan", "train"]


def load_config(source: str | PathLike[str] | Mapping[str, Any], overrides: str | Sequence[str] = ()) -> Config:
    """The checked config of a TOML file, or of a mapping of its tables, with overrides such as "lora.r=16".

    Raises UserError with all mistakes and their places.
    """
    overrides = [overrides] if isinstance(overrides, str) else overrides
    if isinstance(source, Mapping):
        return resolve_mapping(source, overrides).config
    from rptrain.runs.folder.run_dir import resolve_config

    return resolve_config(Path(source), overrides).config


def plan(
    config: Config,
    *,
    gpus: int | None = None,
    card: str | None = None,
    vram: str | None = None,
    pcie: str | None = None,
    host: str | None = None,
    nodes: int | None = None,
    network: str | None = None,
    timings: str | PathLike[str] | None = None,
) -> "PlanReport":
    """The plan of a config: whether it `fits`, `tokens_per_second`, `memory`, `advice`; `to_dict()` is what
    `rptrain plan --json` prints. The other arguments are that command's options of these names.

    Raises UserError for a config that cannot be planned. One that does not fit raises nothing.
    """
    from rptrain.machine.flags import MachineFlags
    from rptrain.planner.network import Nodes
    from rptrain.planner.report import report

    flags = MachineFlags(gpus, card, vram, pcie, host)
    return report(Resolved.of(config), flags, None if timings is None else Path(timings), Nodes.of(nodes, network))
