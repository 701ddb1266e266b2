"""The end of a run: its last record, how to resume it after a failure that a user can fix, and the step that a signal
ends.
"""

import shlex
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic

from rptrain.config.types import format_size
from rptrain.engine.distributed.peers import PeerLost
from rptrain.engine.errors import EngineError
from rptrain.engine.failures import GpuFailure, gpu_failure
from rptrain.engine.progress import StepProgress
from rptrain.runs.folder.control import STOP, StopRequested
from rptrain.runs.folder.event_log import EventLog
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records.events import Failed, Finished, Stopped
from rptrain.train.save import Saver
from rptrain.train.telemetry import Telemetry
from rptrain.train.trackers import Trackers
from rptrain.train.watchdog import Stall, Watchdog
from rptrain.utils.errors import RunDeleted, TrainingError, UserError, describe, out_of_resources
from rptrain.utils.paths import inside
from rptrain.utils.signals import INTERRUPTED, PROCESS
from rptrain.utils.text import counted
from rptrain.utils.units import format_duration

TRACEBACK = "failure.txt"  # the file with the traceback of the last failure of a GPU
LESS = 0.9  # the fraction of its GPU memory with which a run is resumed after it ran out of it
STEP = 1 << 28  # bytes; limits are multiples of it
CANCELING = 2.0  # most seconds to wait for a canceled save: it may hang
BRIEF = 2.0  # seconds: a step that a signal ends sooner is not reported


class RunEnd:
    """Writes the last record of a run, once, and then gives the process a limited time to close.

    Threads may share it: the watchdog's records a stall. `saver` is None until there is one. `observers` are closed
    before the last record of a complete run, so that what fails then is recorded, too. `trained` is set after the last
    step. `vram` is the least memory in bytes that the plan may use on a GPU, None with CPU workers. `alone`: no other
    process trains the run. `folder`: for the traceback of a failed GPU.
    """

    def __init__(self, run: RunDir, log: EventLog, watchdog: Watchdog, folder: Path, *, alone: bool) -> None:
        self.saver: Saver | None = None
        self.observers: tuple[Trackers | Telemetry, ...] = ()
        self.trained = False
        self.vram: int | None = None
        self._folder = folder
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
        if self._failure is not None:
            return self._failure
        if isinstance(error, Exception) and not isinstance(error, UserError | TrainingError):
            error.add_note(_how_to_resume(self._run, alone=self._alone, failed=True))  # below its traceback
        return error

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
        done = "Training is complete, and only the exported model is missing. " if self.trained else ""
        if (gpu := gpu_failure(error)) is not None:
            self._failure = TrainingError("\n".join((*gpu.lines(), f"{done}{self._how_after(gpu)}", self._kept(error))))
            if gpu.final:
                self._watchdog.abandon_threads()  # nothing of the GPU can be waited for, or freed
        elif (cause := _fixable(error, self.trained)) is not None:
            how = _how_to_resume(self._run, alone=self._alone, failed=True)
            self._failure = TrainingError(f"{describe(cause)}.\n{done}{how}")  # a long line is cut
        else:
            return describe(error, with_type=not isinstance(error, Stall))
        return str(self._failure)

    def _how_after(self, gpu: GpuFailure) -> str:
        """How to resume after a GPU failed: with a lower limit if its memory was too small."""
        less = ()
        if gpu.kind == "memory" and self.vram is not None:
            less = (f"engine.vram_limit={format_size(int(self.vram * LESS) // STEP * STEP)}",)
        return _how_to_resume(self._run, alone=self._alone, failed=True, changes=less)

    def _kept(self, error: BaseException) -> str:
        """Writes the traceback to a file, and says where it is."""
        try:
            path = inside(self._folder, TRACEBACK)
            path.write_text("".join(traceback.format_exception(error)), encoding="utf-8", errors="backslashreplace")
        except (OSError, UserError) as refused:
            return f"The traceback could not be written: {describe(refused)}"
        return f"The traceback is in {path}"

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
    """The cause, if it is outside the program: a full disk, no memory, files of file-backed weights that changed,
    another process that was lost. After the last step also every UserError: the model's files may be missing or
    changed.
    """
    if isinstance(error, EngineError) and isinstance(error.__cause__, UserError | PeerLost):
        return error.__cause__
    if (exhausted := out_of_resources(error)) is not None:
        return exhausted
    return error if isinstance(error, OSError | PeerLost) or (trained and isinstance(error, UserError)) else None


def _how_to_resume(run: RunDir, *, alone: bool, failed: bool, changes: Sequence[str] = ()) -> str:
    """A sentence without its end. `changes`: settings to resume with."""
    saved, others = run.checkpoints(), f", with {' '.join(changes)}" if changes else ""
    if not saved:
        return f"The run has no checkpoint: {'fix the problem and ' if failed else ''}start again{others}"
    if not alone:
        return f"{saved[-1].name} is complete: processes that torchrun starts again resume from it"
    command = shlex.join(["rptrain", "--config", str(run.config_path), f"save.resume={run.path}", *changes])
    return f"{saved[-1].name} is complete: {'fix the problem, then ' if failed else ''}resume from it with: {command}"


class Stopping:
    """Decides after a signal whether a step is dropped: if its state would be saved later than `timeout` seconds after
    the signal (`save.stop_timeout`). If dropping it leaves nothing new to save, it has the whole time.

    `note` is called with what happens to each step. `saved` returns the step of the last checkpoint, 0 without one.
    `alone`: no other process trains the run; others would wait for the step forever, so that it is never dropped.
    """

    def __init__(self, timeout: float, note: Callable[[str], object], saved: Callable[[], int], *, alone: bool) -> None:
        self._timeout, self._note, self._saved, self._alone = timeout, note, saved, alone
        self._reported = 0  # the step that was reported last

    def drops(self, step: int, progress: StepProgress, save_seconds: float) -> bool:
        """Whether to drop this step, which has not ended. `save_seconds`: how long the last save took, 0 before."""
        if not PROCESS.received:
            return False
        left, saved = progress.left, self._saved()
        time = max(PROCESS.first + self._timeout - save_seconds - monotonic(), 0.0)
        late = left is not None and left > time
        if self._alone and (time == 0 or (late and step - 1 > saved)):
            return True
        if self._reported < step and (left is None or left >= BRIEF):
            self._reported = step
            ends = "has just begun" if left is None else f"ends in about {format_duration(left)}"
            limit = f", or dropped after {format_duration(time)}" if self._alone and (left is None or late) else ""
            keeps = f"keeps checkpoint-{saved}" if saved else "saves nothing"
            what = f"step {step} {ends} ({_done(progress)}): it is saved at its end{limit}"
            self._note(f"{what}; another signal stops at once and {keeps}")
        return False

    def dropped(self, step: int, progress: StepProgress) -> None:
        """Report that this step was dropped."""
        left = "" if progress.left is None else f", about {format_duration(progress.left)} more to go"
        before = f"the state after step {step - 1} is saved" if step > 1 else "no step is complete"
        self._note(f"step {step} is dropped ({_done(progress)}{left}): {before}")


def _done(progress: StepProgress) -> str:
    return f"{progress.done:,} of {counted(progress.micro_batches, 'micro-batch')} done"
