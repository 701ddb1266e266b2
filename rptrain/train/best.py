"""Load the checkpoint with the lowest validation loss at the end of a run."""

from collections.abc import Callable, Sequence

from rptrain.checkpoint.atomic_dir import Damaged, set_aside
from rptrain.checkpoint.processes import ALONE, Processes
from rptrain.checkpoint.run_states import checkpoints_by_loss
from rptrain.checkpoint.state import load_state
from rptrain.engine.memory.unit_state import UnitState
from rptrain.runs.events import BestLoaded, CheckpointDamaged, Event
from rptrain.runs.run_dir import RunDir


def load_best(
    run: RunDir,
    units: Sequence[UnitState],
    step: int,
    emit: Callable[[Event], None],
    processes: Processes = ALONE,
) -> tuple[int, float]:
    """Load the checkpoint with the lowest validation loss into the units, which hold the state after `step`.

    Returns its step and its loss. A damaged checkpoint is renamed, and the next best one is used; an event is emitted
    for each. Raises Damaged if no checkpoint is left. If several `processes` train the model, all call this, and load
    the same one.
    """
    current = run.checkpoint_path(step)  # the units hold its state: there is nothing to load
    ranked, *_ = processes.gather([(loss, path.name) for loss, path in checkpoints_by_loss(run.checkpoints_path)])
    for loss, name in ranked:
        path = run.checkpoint_path(step).with_name(name)
        try:
            with processes.together():
                loaded = step if path == current else load_state(path, units)["step"]
        except Damaged as error:
            current = None  # the units may hold parts of the damaged one
            if processes.first:
                set_aside(path)
            emit(CheckpointDamaged(str(path), str(error)))
            continue
        emit(BestLoaded(loaded, str(path), loss))
        return loaded, loss
    raise Damaged(
        f"{run.checkpoints_path} has no undamaged checkpoint with a validation loss: "
        "set save.load_best_model_at_end=false"
    )
