"""The checkpoint with the lowest loss of held-out rows: found by what checkpoints say, and gone back to at the end."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from math import isfinite
from pathlib import Path

from rptrain.checkpoint.atomic_dir import Damaged, complete_checkpoints, set_aside
from rptrain.checkpoint.state import load_state, read_state
from rptrain.engine.store import UnitState
from rptrain.runs.events import BestLoaded, CheckpointDamaged, Event
from rptrain.runs.run_dir import RunDir


def by_loss(checkpoints_dir: Path) -> list[tuple[float, Path]]:
    """The checkpoints at whose step the loss was measured: the lowest first, of equal ones the earliest."""
    found = []
    for path in complete_checkpoints(checkpoints_dir):
        with suppress(Damaged):
            loss = read_state(path)["meta"].get("validation", {}).get("loss")
            if loss is not None and isfinite(loss):
                found.append((loss, path))
    return sorted(found, key=lambda measured: measured[0])


def load_best(run: RunDir, units: Sequence[UnitState], step: int, tell: Callable[[Event], None]) -> None:
    """Fills the units, which hold the state after `step`, from the checkpoint with the lowest loss.

    One that is damaged is renamed, and the next one is taken. `tell` is called with records. Damaged: none is whole.
    """
    held = run.checkpoint_path(step)
    for loss, path in by_loss(run.checkpoints_path):
        try:
            found = step if path == held else load_state(path, units)["step"]
        except Damaged as error:
            held = None  # what was read of it is there now
            set_aside(path)
            tell(CheckpointDamaged(str(path), str(error)))
            continue
        tell(BestLoaded(found, str(path), loss))
        return
    raise Damaged(
        f"{run.checkpoints_path} has no whole checkpoint whose loss was measured: set save.load_best_model_at_end=false"
    )
