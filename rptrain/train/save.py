"""Write checkpoints in the background, one at a time."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch

from rptrain.checkpoint.processes import ALONE, Processes
from rptrain.checkpoint.run_states import checkpoints_by_loss
from rptrain.checkpoint.state import Background, prune, save_state
from rptrain.config.schema import Save
from rptrain.engine.engine import Engine
from rptrain.engine.memory.unit_state import UnitState
from rptrain.engine.snapshot import Snapshot
from rptrain.models.base_files import BaseFile
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records.events import CheckpointSaved, SaveFailed
from rptrain.train.job import Job
from rptrain.train.progress import Journal
from rptrain.train.validation import EarlyStopping
from rptrain.utils.errors import UserError, describe
from rptrain.utils.phases import Phase, during

log = logging.getLogger(__name__)


class SaveCanceled(Exception):
    """A save was cancelled because the run ends immediately."""


@dataclass(frozen=True)
class _Saving:
    """A save, as `Saver.begin` describes it. `paused`: the seconds for which training waited for its begin."""

    step: int
    meta: dict[str, Any]
    began: float
    paused: float
    drained: float
    done: Callable[[], None] | None
    progress: Phase


class Saver:
    """Writes a run's checkpoints in its own thread while training continues.

    Context manager: leaving it waits for the current save. Each checkpoint has `base`, the model's files besides its
    weights, as they were when the run started. `journal` gets events, from any thread, and is checked before
    files are written. If several `processes` train the model, all save the same steps, and the first one removes old
    checkpoints.
    """

    def __init__(
        self,
        run: RunDir,
        units: Sequence[UnitState],
        base: Mapping[str, BaseFile],
        config: Save,
        journal: Journal,
        processes: Processes = ALONE,
    ) -> None:
        self._processes = processes
        self._run, self._units, self._base, self._config = run, units, base, config
        self._journal = journal
        self._pool = ThreadPoolExecutor(1, "saver")
        self.seconds = 0.0  # that the last save took
        self._current: tuple[int, Future[None], Phase] | None = None
        self._canceled = threading.Event()

    def begin(
        self,
        engine: Engine,
        step: int,
        meta: dict[str, Any],
        done: Callable[[], None] | None = None,
        *,
        drained: float = 0.0,
    ) -> None:
        """Start to save the state after the engine's last step. Waits for the previous save and for that step only.

        `done` is called after the save succeeded or failed. `drained`: the seconds that it took to drain the pipeline.
        """
        began = time.perf_counter()
        self.wait()
        snapshot = engine.snapshot()
        meta = meta | {"applied": snapshot.applied}
        if engine.store.dtype == torch.float16:
            scale = snapshot.loss_scale
            meta["loss_scale"] = {"scale": scale.scale, "before": scale.before, "good": scale.good}
        paused = time.perf_counter() - began
        progress = Phase(f"saving checkpoint-{step}")
        saving = _Saving(step, meta, began, paused, drained, done, progress)
        future = self._pool.submit(self._save, snapshot, saving)
        self._current = step, future, progress

    def poll(self) -> None:
        """If the current save has finished, record whether it failed; never waits."""
        if self._current is not None and self._current[1].done():
            self.wait()

    def wait(self, *, required: bool = False) -> None:
        """Wait for the current save. If it failed, emit SaveFailed; if it is `required`, also raise the error."""
        if self._current is None:
            return
        (step, future, progress), self._current = self._current, None
        try:
            with during(progress):
                future.result()
        except (OSError, UserError) as error:
            self._journal.emit(SaveFailed(step, describe(error)))
            if required:
                raise

    def cancel(self) -> None:
        """End the current save, and later ones, at the next piece of a file."""
        self._canceled.set()

    def finish(self, seconds: float | None = None) -> bool:
        """Wait for the current save, without an error if it fails. Returns whether it ended within `seconds`."""
        return self._current is None or not wait([self._current[1]], seconds).not_done

    def _save(self, snapshot: Snapshot, saving: _Saving) -> None:
        try:
            with snapshot:
                self._journal.check()
                path = save_state(
                    self._run.checkpoints_path,
                    self._units,
                    step=saving.step,
                    meta=saving.meta,
                    base=self._base,
                    background=Background(snapshot.order, snapshot.release, self._proceed, saving.progress),
                    processes=self._processes,
                )
            self.seconds = seconds = time.perf_counter() - saving.began
            paused = min(saving.paused + snapshot.waited, seconds)
            self._journal.emit(CheckpointSaved(saving.step, str(path), seconds, paused, saving.drained + paused))
            self._prune(self._config.save_total_limit)
        finally:
            if saving.done is not None:
                saving.done()

    def _prune(self, keep: int | None) -> None:
        if not self._processes.first:  # nor may others read checkpoints that the first one removes
            return
        try:
            ranked = checkpoints_by_loss(self._run.checkpoints_path) if self._config.load_best_model_at_end else []
            prune(self._run.checkpoints_path, keep, ranked[0][1] if ranked else None)
        except (OSError, UserError) as error:
            log.warning("an old checkpoint could not be removed: %s", describe(error))

    def _proceed(self) -> None:
        if self._canceled.is_set():
            raise SaveCanceled
        self._journal.check()

    def __enter__(self) -> Self:
        self._prune(None)  # what a killed save left: there may be no other save
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown()


def checkpoint_meta(
    job: Job, frozen: dict[str, Any] | None, early_stopping: EarlyStopping, loss: float | None
) -> dict[str, Any]:
    """A checkpoint's metadata. `frozen` describes the frozen weights; `loss` is the validation loss after its step.

    `loss` is None if it was not evaluated after that step.
    """
    meta: dict[str, Any] = {
        "data": job.sequences.content_hash,
        "data_hash": "arrays",  # what the hashes of data cover; absent: see `data.earlier`
        "model_dir": str(job.model_dir.absolute()),
        "dtype": job.config.model.dtype,
    }
    if job.validation is not None:
        data, best, bad = job.validation.sequences.content_hash, early_stopping.best, early_stopping.bad
        meta["validation"] = {"data": data, "best": best, "bad": bad, "loss": loss}
    if frozen is not None:
        meta["frozen"] = frozen
    if job.adapter is not None:
        meta["lora"] = job.adapter.to_dict()
    if job.chat_template is not None:
        meta["chat_template"] = job.chat_template
    if job.own_config:
        meta["config"] = job.spec.config
    if job.ends:
        meta["ends"] = list(job.ends)
    if job.spec.padding_row is not None:
        meta["padding_row"] = job.spec.padding_row  # absent: look-ups train all rows, as in earlier versions
    if job.spec.narrow:
        meta["narrow"] = list(job.spec.narrow)
    return meta
