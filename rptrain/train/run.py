"""One training run, from a config to the exported model: its processes, records, threads and memory."""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from rptrain.config.resolve import Resolved
from rptrain.engine.distributed.launch import Launch
from rptrain.preflight.checks import check_trackers
from rptrain.runs.control import Control, StopRequested
from rptrain.runs.run_dir import RunDir
from rptrain.train.begin import Begun, begin_run, prepare_run, record_start, share
from rptrain.train.group import Group, joined
from rptrain.train.progress import ProgressDisplay, heading, record
from rptrain.train.replan import with_recorded_times
from rptrain.train.save import Saver
from rptrain.train.session import open_store
from rptrain.train.telemetry import Telemetry
from rptrain.train.trackers import Trackers
from rptrain.train.trainer import Trainer
from rptrain.train.watchdog import Watchdog, Watched
from rptrain.utils.console import console
from rptrain.utils.phase_display import PhaseDisplay
from rptrain.utils.signals import PROCESS

PATIENCE = 60.0  # most seconds to wait for the telemetry or a tracker, neither of which is needed to train


def train(resolved: Resolved, *, quiet: bool = False, watchdog: Watchdog | None = None) -> RunDir:
    """Train as the config says, or resume the run that `save.resume` selects.

    Writes `model/`, a Hugging Face directory, to the run's folder, unless the STOP command ended the run earlier.
    Raises UserError before anything large is loaded, EngineError if training fails (the last checkpoint remains),
    TrainingError if a GPU failed, the disk is full, memory ran out, file-backed weights were changed, the model
    diverged, the run's folder was deleted or another process was lost, and KeyboardInterrupt after a signal. `watchdog`
    is that of the process; without it, a stall is only reported.
    """
    launch = Launch.of()
    begun: Begun | None = None
    shown = not quiet and (launch is None or launch.rank == 0)
    with PROCESS.handled(), ExitStack() as stack, ExitStack() as preparing:
        preparing.enter_context(PhaseDisplay(shown=shown, console=console()))
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
            PROCESS.check()
            preparing.close()
            progress = stack.enter_context(ProgressDisplay(begun.job.total_steps, quiet=not shown))
            for line in heading(begun.run, begun.checkpoint, begun.job, group.peers):
                progress.note(line)
            try:
                _trainer(begun, group, progress, watchdog, stack).run(begun.checkpoint)
            except StopRequested as stopped:
                progress.note(f"{stopped}. {begun.end.how_to_resume()}")
            except KeyboardInterrupt as interrupt:
                begun.end.record(interrupt)
                if not begun.run.finished:
                    progress.note(begun.end.how_to_resume())
                raise
        except BaseException as error:
            if begun is None or (raised := begun.end.raised(error)) is error:
                raise
            raise raised from error
    return begun.run


def _trainer(begun: Begun, group: Group, progress: ProgressDisplay, watchdog: Watchdog, stack: ExitStack) -> Trainer:
    """Open everything that a run needs beside the engine. The stack closes it, after the end of the run is recorded."""
    run, records, log, end = begun.run, begun.records, begun.log, begun.end
    emit = partial(record, log, progress)
    watched = Watched(
        records.path, records.events_path, emit, log.check, end.record, lambda: run.saved_step, end.how_to_resume
    )
    stack.enter_context(watchdog.watching(watched))
    log.listen(watchdog.hear)
    job, measure = with_recorded_times(begun.job, records.path)
    end.vram = min((gpu.limit for gpu in job.hardware.gpus), default=None)
    patience = min(job.config.engine.stall_timeout or PATIENCE, PATIENCE)
    if group.first:
        followers = stack.enter_context(Trackers(job.config, run, emit, patience))
        log.listen(followers.hear)
        end.observers += (followers,)
    telemetry = Telemetry(records.path, job.devices, emit, log.check, patience, run.saved_step)
    stack.enter_context(telemetry)
    end.observers += (telemetry,)
    record_start(log, job, group.size, begun.earlier.trained)  # before memory is page-locked, which takes long
    store = stack.enter_context(open_store(job))
    end.saver = saver = stack.enter_context(
        Saver(run, store.units, job.base, job.config.save, emit, log.check, group.saving)
    )
    control = Control(run.control_path if group.first else None, progress.note)
    shared = group.shared(job.config)
    return Trainer(
        replace(begun, job=job), group, shared, progress, store, saver, control, telemetry, watchdog, measure=measure
    )
