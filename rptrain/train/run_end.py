"""The end of a run: its last record, and how to resume a run whose failure a user can fix."""

import shlex
import threading
from contextlib import suppress

from rptrain.engine.distributed.peers import PeerLost
from rptrain.engine.errors import EngineError
from rptrain.runs.control import STOP, StopRequested
from rptrain.runs.event_log import EventLog
from rptrain.runs.events import Failed, Finished, Stopped
from rptrain.runs.run_dir import RunDir
from rptrain.runs.signals import INTERRUPTED, PROCESS
from rptrain.train.save import Saver
from rptrain.train.telemetry import Telemetry
from rptrain.train.trackers import Trackers
from rptrain.train.watchdog import Stall, Watchdog
from rptrain.utils.errors import RunDeleted, TrainingError, UserError, describe

CANCELING = 2.0  # most seconds to wait for a canceled save: it may hang


class RunEnd:
    """Writes the last record of a run, once, and then gives the process a limited time to close.

    Threads may share it: the watchdog's records a stall. `saver` is None until there is one. `observers` are closed
    before the last record of a complete run, so that what fails then is recorded, too. `trained` is set after the last
    step. `alone`: no other process trains the run.
    """

    def __init__(self, run: RunDir, log: EventLog, watchdog: Watchdog, *, alone: bool) -> None:
        self.saver: Saver | None = None
        self.observers: tuple[Trackers | Telemetry, ...] = ()
        self.trained = False
        self._run, self._log, self._watchdog, self._alone = run, log, watchdog, alone
        self._lock = threading.Lock()
        self._recorded = False
        self._failure: TrainingError | None = None

    def finished(self, step: int) -> None:
        """The run is complete after this step."""
        for observer in self.observers:
            observer.close()
        with self._lock, PROCESS.shielded():
            self._log.end(Finished(step))
            self._recorded = True
            self._watchdog.closing(0)

    def record(self, error: BaseException) -> None:
        """Record why the run ends before it is complete: a command, a signal, or a failure.

        The first call counts. A checkpoint that is being written is completed, but not after a second signal, nor
        without a process that was lost.
        """
        if isinstance(error, UserError | OSError):
            try:
                self._log.check()
            except RunDeleted as deleted:  # a file is missing because the folder is
                error = deleted
        if not isinstance(error, Stall):
            self._end_save(error)
        with self._lock, PROCESS.shielded():
            if self._recorded:
                return
            self._recorded = True
            with suppress(RunDeleted):
                self._write(error)

    def raised(self, error: BaseException) -> BaseException:
        """Record the error, and return what the caller should raise in its place."""
        self.record(error)
        return error if self._failure is None else self._failure

    def how_to_resume(self) -> str:
        """How to resume the run, which was stopped."""
        return _how_to_resume(self._run, alone=self._alone, failed=False)

    def _write(self, error: BaseException) -> None:
        match error:
            case RunDeleted():
                self._failure = error
                self._watchdog.closing(1, str(error))
            case StopRequested():
                self._log.end(Stopped(self._run.saved_step, STOP))
                self._watchdog.closing(0)
            case KeyboardInterrupt():
                self._log.end(Stopped(self._run.saved_step, "signal"))
                self._watchdog.closing(INTERRUPTED)
            case _:
                message = self._message(error)
                self._log.end(Failed(message))
                self._watchdog.closing(1, message)

    def _message(self, error: BaseException) -> str:
        if (cause := _fixable(error, self.trained)) is None:
            return describe(error, with_type=not isinstance(error, Stall))
        done = "Training is complete, and only the exported model is missing. " if self.trained else ""
        how = _how_to_resume(self._run, alone=self._alone, failed=True)
        self._failure = TrainingError(f"{describe(cause)}. {done}{how}")
        return str(self._failure)

    def _end_save(self, error: BaseException) -> None:
        if self.saver is None:
            return
        try:
            if not (isinstance(error, KeyboardInterrupt) or isinstance(_fixable(error, self.trained), PeerLost)):
                self.saver.finish()
                return
        except KeyboardInterrupt:  # while it waits
            pass
        self.saver.cancel()
        with PROCESS.shielded():
            self.saver.finish(CANCELING)


def _fixable(error: BaseException, trained: bool) -> BaseException | None:
    """The cause, if it is outside the program: a full disk, files of file-backed weights that changed, another process
    that was lost. After the last step also every UserError: the model's files may be missing or changed.
    """
    if isinstance(error, EngineError) and isinstance(error.__cause__, UserError | PeerLost):
        return error.__cause__
    return error if isinstance(error, OSError | PeerLost) or (trained and isinstance(error, UserError)) else None


def _how_to_resume(run: RunDir, *, alone: bool, failed: bool) -> str:
    saved = run.checkpoints()
    if not saved:
        return f"The run has no checkpoint: {'fix the problem and ' if failed else ''}start again"
    if not alone:
        return f"{saved[-1].name} is complete: processes that torchrun starts again resume from it"
    command = shlex.join(["rptrain", "--config", str(run.config_path), f"save.resume={run.path}"])
    return f"{saved[-1].name} is complete: {'fix the problem, then ' if failed else ''}resume from it with: {command}"
