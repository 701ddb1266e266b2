"""Checkpoints written beside training, one at a time."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import torch

from rptrain.checkpoint.state import prune, save_state
from rptrain.config.schema import Save
from rptrain.engine.engine import Engine
from rptrain.engine.snapshot import Snapshot
from rptrain.engine.store import UnitState
from rptrain.runs.events import CheckpointSaved, Event, SaveFailed
from rptrain.runs.run_dir import RunDir
from rptrain.train.best import by_loss
from rptrain.train.job import Job
from rptrain.train.validation import Patience
from rptrain.utils.errors import UserError

log = logging.getLogger(__name__)


class Abandoned(Exception):
    """A save was given up, as the run ends at once."""


class Saver:
    """Writes a run's checkpoints in a thread of its own while training goes on. Context manager: leaving it waits for
    the save under way, or gives it up where a KeyboardInterrupt comes through.

    `tell` is called with records, from any thread, and `check` before a save: it raises RunDeleted once the run's
    folder is gone.
    """

    def __init__(
        self,
        run: RunDir,
        units: Sequence[UnitState],
        config: Save,
        tell: Callable[[Event], None],
        check: Callable[[], None],
    ) -> None:
        self._run, self._units, self._config, self._tell, self._check = run, units, config, tell, check
        self._pool = ThreadPoolExecutor(1, "saver")
        self._under_way: tuple[int, Future[None]] | None = None
        self._abandoned = threading.Event()

    def begin(
        self,
        engine: Engine,
        step: int,
        meta: dict[str, Any],
        done: Callable[[], None] | None = None,
        *,
        drained: float = 0.0,
    ) -> None:
        """Saves the state after the engine's last step. Waits for the save before, and for that step, and for no more.

        `done` is called once it is saved, or could not be. `drained`: seconds that the pipeline ran empty before.
        """
        began = time.perf_counter()
        self.settle()
        snapshot = engine.snapshot()
        meta = meta | {"applied": snapshot.applied}
        if engine.store.dtype == torch.float16:
            scale = snapshot.loss_scale
            meta["loss_scale"] = {"scale": scale.scale, "before": scale.before, "good": scale.good}
        paused = time.perf_counter() - began
        self._under_way = step, self._pool.submit(self._save, snapshot, step, meta, began, paused, drained, done)

    def look(self) -> None:
        """Tells of a save that failed; training goes on."""
        if self._under_way is not None and self._under_way[1].done():
            self.settle()

    def settle(self, *, required: bool = False) -> None:
        """Waits for the save under way. If it failed, that is told, or raised where the save is `required`."""
        if self._under_way is None:
            return
        (step, future), self._under_way = self._under_way, None
        try:
            future.result()
        except (OSError, UserError) as error:
            self._tell(SaveFailed(step, str(error)))
            if required:
                raise

    def _save(
        self,
        snapshot: Snapshot,
        step: int,
        meta: dict[str, Any],
        began: float,
        paused: float,
        drained: float,
        done: Callable[[], None] | None,
    ) -> None:
        try:
            with snapshot:
                self._check()
                path = save_state(
                    self._run.checkpoints_path,
                    self._units,
                    step=step,
                    meta=meta,
                    order=snapshot.order,
                    release=snapshot.release,
                    proceed=self._proceed,
                )
            measured = by_loss(self._run.checkpoints_path) if self._config.load_best_model_at_end else []
            best = measured[0][1] if measured else None
            seconds = time.perf_counter() - began
            paused = min(paused + snapshot.waited, seconds)
            self._tell(CheckpointSaved(step, str(path), seconds, paused, drained + paused))
            try:
                prune(self._run.checkpoints_path, self._config.save_total_limit, best)
            except (OSError, UserError) as error:
                log.warning("an old checkpoint could not be removed: %s", error)
        finally:
            if done is not None:
                done()

    def _proceed(self) -> None:
        if self._abandoned.is_set():
            raise Abandoned
        self._check()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self._abandoned.set()
        self._pool.shutdown()


def checkpoint_meta(job: Job, frozen: dict[str, Any] | None, patience: Patience, loss: float | None) -> dict[str, Any]:
    """What a checkpoint says beside its tensors of the run that wrote it; `frozen` describes the frozen weights.

    `loss`: of held-out rows, None where it was not measured at its step.
    """
    meta: dict[str, Any] = {"data": job.sequences.content_hash, "model_dir": str(job.model_dir.absolute())}
    if job.validation is not None:
        held_out = job.validation.sequences.content_hash
        meta["validation"] = {"data": held_out, "best": patience.best, "bad": patience.bad, "loss": loss}
    if frozen is not None:
        meta["frozen"] = frozen
    if job.adapter is not None:
        meta["lora"] = job.adapter.to_dict()
    if job.chat_template is not None:
        meta["chat_template"] = job.chat_template
    return meta
