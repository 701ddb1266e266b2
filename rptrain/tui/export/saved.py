"""What a run has saved that can be exported: its checkpoints and its result."""

from collections.abc import Sequence
from pathlib import Path

from rptrain.checkpoint.result import find_result
from rptrain.runs.folder.listing import GLANCE
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.view.run_view import RunView
from rptrain.runs.view.values import lowest
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
    best = lowest(score for score in RunView(run, large=GLANCE).results.scores if str(score.step) in steps)
    return None if best is None else steps[str(best.step)]


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
