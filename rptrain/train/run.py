"""One training run, from a config to the exported model."""

from collections.abc import Callable
from contextlib import ExitStack
from traceback import format_exception

from rptrain.config.resolve import Resolved
from rptrain.engine.distributed.launch import Launch
from rptrain.preflight.checks import check_trackers
from rptrain.runs.folder.control import StopRequested
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.folder.run_log import RunLog
from rptrain.runs.records.events import Event
from rptrain.train.begin import Begun, begin_run, prepare_run, share
from rptrain.train.group import joined
from rptrain.train.progress import ProgressDisplay, heading
from rptrain.train.session import open_session
from rptrain.train.trainer import Trainer
from rptrain.train.watchdog import Watchdog
from rptrain.utils.console import console
from rptrain.utils.errors import TrainingError, UserError
from rptrain.utils.phase_display import PhaseDisplay
from rptrain.utils.signals import PROCESS


def train(
    resolved: Resolved,
    *,
    quiet: bool = False,
    watchdog: Watchdog | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> RunDir:
    """Train as the config says, or resume the run that `save.resume` selects.

    Writes `model/`, a Hugging Face directory, to the run's folder, unless the STOP command ended the run earlier, and
    what a terminal shows to `run.log`.
    Raises UserError before anything large is loaded, EngineError if training fails (the last checkpoint remains),
    TrainingError if a GPU failed, the disk is full, memory ran out, file-backed weights were changed, the model
    diverged, the run's folder was deleted or another process was lost, and KeyboardInterrupt after a signal. `watchdog`
    is that of the process; without it, a stall is only reported. `on_event` is called with every record of the run,
    once it began, in the thread that wrote it.
    """
    launch = Launch.of()
    begun: Begun | None = None
    first = launch is None or launch.rank == 0
    shown = first and not quiet
    with PROCESS.handled(), RunLog() as run_log, ExitStack() as stack, ExitStack() as preparing:
        copy = run_log.write if first else None
        preparing.enter_context(PhaseDisplay(shown=shown, console=console(), copy=copy))
        watchdog = watchdog or stack.enter_context(Watchdog())
        watchdog.configure(resolved.config.engine.stall_timeout, resolved.config.engine.stall_action)
        group = stack.enter_context(joined(launch, watchdog))
        try:
            with watchdog.doing("preparing"):
                with group.main.together():
                    if group.first:
                        check_trackers(resolved.config.log.report_to)
                        prepared = prepare_run(resolved, launch, group, stack)
                        with PROCESS.shielded():
                            begun = begin_run(prepared, group, watchdog, stack)
                if begun is None or group.size > 1:
                    begun = share(begun, resolved, launch, group, watchdog, stack)
            if on_event is not None:
                begun.log.listen(on_event)
            PROCESS.check()
            preparing.close()
            if first:
                run_log.open(begun.run.path)
            display = ProgressDisplay(begun.job.total_steps, quiet=not shown, copy=copy)
            progress = stack.enter_context(display)
            for line in heading(begun.run, begun.checkpoint, begun.job, group.peers):
                progress.note(line)
            try:
                session = open_session(begun, group, progress, watchdog, stack)
                Trainer(session).run(begun.checkpoint)
            except StopRequested as stopped:
                progress.note(f"{stopped}. {begun.end.how_to_resume()}")
            except KeyboardInterrupt as interrupt:
                begun.end.record(interrupt)
                if not begun.run.finished:
                    progress.note(begun.end.how_to_resume())
                raise
        except BaseException as error:
            raised = error if begun is None else begun.end.raised(error)
            run_log.write(_last_words(raised))
            if raised is error:
                raise
            raise raised from error
    return begun.run


def _last_words(error: BaseException) -> str:
    """What a terminal shows of the error that ends a run."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, UserError | TrainingError):
        return str(error)
    return "".join(format_exception(error)).rstrip()
