"""Going on with a run: whether it would come to the same numbers, and its state, from a checkpoint that is whole."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rptrain.checkpoint.atomic_dir import Damaged, set_aside
from rptrain.checkpoint.base_files import BASE
from rptrain.checkpoint.state import load_state, read_state
from rptrain.engine.store import UnitState
from rptrain.models import registry
from rptrain.runs.events import CheckpointDamaged, Event
from rptrain.runs.run_dir import RunDir, forks
from rptrain.train.job import Job
from rptrain.utils.errors import UserError


def check_resume(run: RunDir, checkpoint: Path, job: Job) -> None:
    """UserError where the run could not go on from a checkpoint to the same numbers, or not at all."""
    state = read_state(checkpoint)
    anew = "or begin a new run with save.resume=never"
    if state["meta"].get("data") != job.sequences.content_hash:
        raise UserError(f"the data differs from what {checkpoint} was trained on: bring it back as it was, {anew}")
    measured = (state["meta"].get("validation") or {}).get("data")
    if measured and job.validation is not None and measured != job.validation.sequences.content_hash:
        raise UserError(
            f"the held-out data differs from what {checkpoint} was measured on: bring it back as it was, {anew}"
        )
    if registry.read_config(checkpoint / BASE) != job.spec.config:
        raise UserError(
            f"{job.model_dir / 'config.json'} differs from the one that {checkpoint} was trained with: "
            f"bring it back as it was, {anew}"
        )
    if state["step"] > job.total_steps or (
        state["step"] == job.total_steps and forks(run, checkpoint)  # it is to have steps of its own
    ):
        raise UserError(
            f"{checkpoint} has {state['step']} steps behind it, and the config ends at {job.total_steps}: raise "
            f"train.max_steps, name an earlier checkpoint in save.resume, {anew}"
        )


def how_to_go_on(run: RunDir) -> str:
    """What is left of a run that failed, and the command that goes on with it once a person mended what was wrong."""
    saved = run.checkpoints()
    if not saved:
        return "Nothing of this run was saved before: mend that, and begin again"
    command = shlex.join(["rptrain", "--config", str(run.config_path), f"save.resume={run.path}"])
    return f"{saved[-1].name} is whole: mend that, and go on from there with: {command}"


def restore(
    run: RunDir, checkpoint: Path, job: Job, units: Sequence[UnitState], tell: Callable[[Event], None]
) -> tuple[Path, dict[str, Any]]:
    """Fills the units; the checkpoint that they came from, and its `step` and `meta`.

    Where it is damaged it is renamed, and the one before it is taken, unless a person named it or it is of another run:
    then Damaged is raised, as where there is none before.
    """
    named = Path(job.config.save.resume).resolve() == checkpoint.resolve()
    fallback = not named and checkpoint.parent.resolve() == run.checkpoints_path.resolve()
    while True:
        try:
            return checkpoint, load_state(checkpoint, units)
        except Damaged as error:
            if not fallback or len(run.checkpoints()) == 1:
                raise
            set_aside(checkpoint)
            tell(CheckpointDamaged(str(checkpoint), str(error)))
            before = run.newest()
            assert before is not None
            checkpoint = before
