"""Resume a run: lock it, check that it would train to the same numbers, and restore its state from a checkpoint."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from rptrain.checkpoint import frozen
from rptrain.checkpoint.adapter import Adapter
from rptrain.checkpoint.atomic_dir import BASE, STATE, Damaged, set_aside
from rptrain.checkpoint.consistent import read_model
from rptrain.checkpoint.processes import ALONE, Processes
from rptrain.checkpoint.state import load_state, read_state
from rptrain.data import earlier
from rptrain.data.notes import rules
from rptrain.data.sequences import Sequences
from rptrain.engine.memory.unit_state import UnitState
from rptrain.models.locate import locate, read_config
from rptrain.preflight.checks import check_resumable
from rptrain.runs.folder.event_log import EventLog
from rptrain.runs.folder.run_dir import RunDir, forks
from rptrain.runs.records.events import CheckpointDamaged, Event
from rptrain.train.job import Job
from rptrain.utils.errors import UserError


@dataclass(frozen=True)
class Resume:
    """A checkpoint to resume from, and the run that it belongs to."""

    run: RunDir
    checkpoint: Path
    log: EventLog | None  # the run's; None: the run has newer checkpoints, and a new run starts from this one

    @classmethod
    def open(cls, run: RunDir, checkpoint: Path, stack: ExitStack) -> Self:
        """Open the event log of a run that is to be resumed, so that no other process trains it. The stack closes it.

        UserError if another process trains it, if its model is gone, or if something is in the way of what it will
        write, such as its `model/` at the end.
        """
        _check_model(run)
        if forks(run, checkpoint):
            return cls(run, checkpoint, None)
        check_resumable(run)
        return cls(run, checkpoint, stack.enter_context(EventLog(run.events_path)))

    def check(self, job: Job) -> None:
        """UserError if the job cannot be resumed from the checkpoint, or would train to other numbers."""
        state = read_state(self.checkpoint)
        meta = state["meta"]
        restart = "or start a new run with save.resume=never"
        if not _is_same(meta.get("data"), job.sequences, meta):
            if (reasoning := self.run.config().data.reasoning) != job.config.data.reasoning:
                raise UserError(
                    f'data.reasoning was "{reasoning}" and is "{job.config.data.reasoning}", which changes what '
                    f"{self.checkpoint} was trained on: set it back, {restart}"
                )
            raise UserError(
                f"the data differs from what {self.checkpoint} was trained on: "
                f"{_advice('the data', job.sequences, meta)}, {restart}"
            )
        validated = (meta.get("validation") or {}).get("data")
        if validated and job.validation is not None and not _is_same(validated, job.validation.sequences, meta):
            raise UserError(
                f"the validation set differs from the one that {self.checkpoint} was evaluated on: "
                f"{_advice('it', job.validation.sequences, meta)}, {restart}"
            )
        if read_config(self.checkpoint / BASE) != job.spec.config:
            raise UserError(
                f"{job.model_dir / 'config.json'} differs from the one that {self.checkpoint} was trained with: "
                f"restore it, {restart}"
            )
        done, total = state["step"], job.total_steps
        if done > total or (done == total and self.log is None):  # a new run needs steps of its own
            key = "train.max_steps" if job.config.train.max_steps else "train.num_epochs"
            raise UserError(
                f"{self.checkpoint} was saved after step {done}, but the config ends training at step {total}: "
                f"increase {key}, set save.resume to an earlier checkpoint, {restart}"
            )


def restore(
    run: RunDir,
    checkpoint: Path,
    job: Job,
    units: Sequence[UnitState],
    frozen_units: dict[str, Any] | None,
    emit: Callable[[Event], None],
    processes: Processes = ALONE,
) -> tuple[Path, dict[str, Any]]:
    """Load the units from a checkpoint; returns the checkpoint that was used, and its `step` and `meta`.

    If it is damaged, the one before it is used, and so on; the damaged ones are then renamed, and an event is emitted
    for each. Damaged is raised if all are damaged, or for this one if the config names it or it belongs to another run.
    UserError if the frozen weights or carried tensors, which `frozen_units` describes, have changed. If several
    `processes` train the model, all call this, and use the same checkpoint.
    """
    named = Path(job.config.save.resume).resolve() == checkpoint.resolve()
    own = checkpoint.parent.resolve() == run.checkpoints_path.resolve()
    damaged: dict[Path, Damaged] = {}
    names = [path.name for path in reversed(run.checkpoints())] if own and not named else None
    names, *_ = processes.gather(names)  # others may see more or fewer, and their configs may name others
    for path in (checkpoint,) if names is None else [run.checkpoints_path / name for name in names]:
        try:
            with processes.together():
                inside = run.checkpoint_at(path) if own else path
                _check_adapter(inside, read_model(inside)[0], job)
                state = load_state(inside, units)
        except Damaged as error:
            damaged[path] = error
            continue
        break
    else:
        if names is not None:
            raise run.all_damaged(list(damaged.values()))
        raise Damaged(
            f"{damaged[checkpoint]}. Set save.resume to another checkpoint, or start a new run with save.resume=never"
        )
    for other, error in damaged.items():
        if processes.first:
            set_aside(other)
        emit(CheckpointDamaged(str(other), str(error)))
    if frozen_units is not None:
        frozen.check(state["meta"], frozen_units["sha256"])
    frozen.check_carried(state["meta"], (frozen_units or {}).get("carried", {}))
    return path, state


def with_recorded(job: Job, checkpoint: Path) -> Job:
    """The job with what the run that wrote a checkpoint recorded: its padding row, which earlier versions did not have,
    and the tensors that its model's files have in a narrower type.
    """
    meta = read_state(checkpoint)["meta"]
    spec = replace(job.spec, padding_row=meta.get("padding_row"), narrow=tuple(meta.get("narrow", ())))
    return replace(job, spec=spec)


def _is_same(saved: str | None, sequences: Sequences, meta: Mapping[str, Any]) -> bool:
    """Whether a content hash in a checkpoint with this metadata is that of these sequences."""
    if saved == sequences.content_hash:
        return True
    return earlier.is_earlier(meta) and earlier.is_content_hash(saved, sequences)


def _advice(restored: str, sequences: Sequences, meta: Mapping[str, Any]) -> str:
    """What to do about a checkpoint with this metadata that was trained on other sequences than these."""
    if not earlier.is_earlier(meta):
        return f"restore {restored}"
    changes = "; ".join(rules(sequences.rows.notes, sequences.rows.bad))
    return (
        f"restore {restored} if it has changed; if not, rptrain now reads some rows in another way ({changes}): resume "
        "with the versions of rptrain, transformers and tokenizers that wrote the checkpoint"
    )


def _check_model(run: RunDir) -> None:
    """UserError if the model that a run trains is gone."""
    path = run.config().model.path
    try:
        locate(path)
    except UserError as error:
        advice = f": put it back to {path}, or a link to it" if Path(path).is_absolute() else ""
        raise UserError(f"{error}\n{run.path} cannot be resumed without its model{advice}") from error


def _check_adapter(checkpoint: Path, state: dict[str, Any], job: Job) -> None:
    """Damaged if the settings of adapters in a checkpoint are not the run's, whose config has not changed."""
    lora = state["meta"].get("lora")
    saved, trained = lora and Adapter.of(lora).settings, job.adapter and job.adapter.settings
    if saved != trained:
        raise Damaged(f"{checkpoint / STATE} is damaged: its settings of lora are not those of the run")
