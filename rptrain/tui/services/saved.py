"""What a run has saved: checkpoints to export or to talk to, and its exported model."""

from collections.abc import Sequence
from pathlib import Path

from rptrain.checkpoint.metadata import RUN_CONFIG
from rptrain.checkpoint.result import answer_sources, find_result
from rptrain.runs.listing import GLANCE
from rptrain.runs.run_dir import RunDir
from rptrain.runs.view import RunView
from rptrain.runs.view_values import lowest
from rptrain.utils.errors import UserError
from rptrain.utils.files import read_small_text


def saved_checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints, the newest first; none if they cannot be read."""
    try:
        return RunDir(run).checkpoints()[::-1]
    except (OSError, UserError):
        return []


def best_checkpoint(run: Path, checkpoints: Sequence[Path]) -> Path | None:
    """The one of a run's checkpoints with the lowest validation loss; None if no loss of theirs is recorded."""
    steps = {path.name.rpartition("-")[2]: path for path in checkpoints}
    best = lowest(score for score in RunView(run, large=GLANCE).scores if str(score.step) in steps)
    return None if best is None else steps[str(best.step)]


def readable_sources(run: Path) -> list[Path]:
    """The `answer_sources` of a run; none if it cannot be read."""
    return list(_marked_sources(run))


def run_of(source: Path) -> Path:
    """The run of an exported model or of a checkpoint; any other path as it is."""
    return next((path for path in (source, *source.parents[:2]) if (path / RUN_CONFIG).is_file()), source)


def models_to_ask(run: Path, folder: Path) -> dict[Path, str]:
    """The `answer_sources` of a run, with their marks, and then those of the other runs in a folder, sorted by name."""
    here = run.resolve()
    others = sorted(file.parent for file in folder.glob(f"*/{RUN_CONFIG}") if file.parent.resolve() != here)
    return {source: mark for each in (run, *others) for source, mark in _marked_sources(each).items()}


def _marked_sources(run: Path) -> dict[Path, str]:
    try:
        return answer_sources(run)
    except OSError:
        return {}


def result_step(run: Path) -> int | None:
    """The step of the run's result; None if it is unknown."""
    try:
        result = find_result(run)
    except (OSError, UserError):
        return None
    return None if result is None else result.state.step


def has_adapters(run: Path) -> bool:
    """Whether a run trains adapters."""
    try:
        return "[lora]" in read_small_text(RunDir(run).config_path)
    except (OSError, UserError, UnicodeDecodeError):
        return False
