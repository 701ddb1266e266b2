"""Record why a run failed, and how to resume it if a user can fix the cause."""

import shlex
from contextlib import suppress

from rptrain.engine.errors import EngineError
from rptrain.runs.events import EventLog, Failed
from rptrain.runs.run_dir import RunDir
from rptrain.train.save import Saver
from rptrain.utils.errors import RunDeleted, TrainingError, UserError, describe


def record_failure(error: Exception, run: RunDir, log: EventLog, saver: Saver) -> None:
    """Write the `Failed` event. If a user can fix the cause, raise a TrainingError that says how to resume.

    Raises RunDeleted if a file is missing because the run's folder is.
    """
    if isinstance(error, UserError):
        log.check()
    if (cause := _fixable(error)) is None:
        with suppress(RunDeleted):
            log.write(Failed(describe(error, with_type=True)))
        return
    saver.wait()  # the run may be resumed from the checkpoint that it is writing
    failure = TrainingError(f"{describe(cause)}. {_how_to_resume(run)}")
    log.write(Failed(str(failure)))
    raise failure from error


def _fixable(error: Exception) -> BaseException | None:
    """The cause, if a user can fix it: usually a full disk, or files of file-backed weights that changed."""
    if isinstance(error, EngineError) and isinstance(error.__cause__, UserError):
        return error.__cause__
    return error if isinstance(error, OSError) else None


def _how_to_resume(run: RunDir) -> str:
    saved = run.checkpoints()
    if not saved:
        return "The run has no checkpoint: fix the problem and start again"
    command = shlex.join(["rptrain", "--config", str(run.config_path), f"save.resume={run.path}"])
    return f"{saved[-1].name} is complete: fix the problem, then resume from it with: {command}"
