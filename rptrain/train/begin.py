"""Begin or resume a run: alone, or together with other processes, to which the first one announces what it began."""

import logging
import os
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import rptrain
from rptrain.checkpoint.trial import REMEDY, remedy, try_saving
from rptrain.config.resolve import Resolved
from rptrain.engine.distributed.launch import Launch
from rptrain.machine.hardware import here
from rptrain.planner.memory import with_saved
from rptrain.planner.simulated_step import simulated_step
from rptrain.preflight.checks import check_adapters
from rptrain.runs.folder.event_log import EventLog
from rptrain.runs.folder.run_dir import OWN, RunDir, begin, changed, check_creatable, find, forks
from rptrain.runs.records import events
from rptrain.runs.records.process import ProcessId
from rptrain.runs.view.run_view import RunView
from rptrain.train.end import RunEnd
from rptrain.train.group import Group
from rptrain.train.job import Job, prepare_job, resolve_auto
from rptrain.train.resume import Resume, with_recorded
from rptrain.train.watchdog import Watchdog
from rptrain.utils.errors import UserError
from rptrain.utils.liveness import progressed
from rptrain.utils.paths import writable_place
from rptrain.utils.phases import phase
from rptrain.utils.replacing import replace_file

RUN = "run"  # the key under which the group remembers its run
TOKEN = "processes/token"  # in the run's folder: shows to each process that it has the folder of the first one
VISIBLE = 60.0  # seconds until a file that another machine wrote is visible: file systems keep what was not there
POLL = 0.1  # seconds between two checks for it

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Begun:
    """A run that was begun or resumed. `records`: where this process keeps its events. `end` writes the last one.

    `earlier`: what earlier processes recorded of it.
    """

    run: RunDir
    records: RunDir
    checkpoint: Path | None
    job: Job
    log: EventLog
    end: RunEnd
    earlier: RunView


@dataclass(frozen=True)
class Prepared:
    """A run that can begin. `found`: the run and the checkpoint that it resumes."""

    resolved: Resolved
    found: tuple[RunDir, Path] | None
    resume: Resume | None
    job: Job


def prepare_run(resolved: Resolved, launch: Launch | None, group: Group, stack: ExitStack) -> Prepared:
    """Prepare a new run, or to resume the one that save.resume selects, or that the group trained before a restart.

    Everything is checked before memory is allocated. UserError for what a user can fix. The stack closes the log.
    """
    found = find(_restarted(resolved, group))  # a run that cannot be resumed is reported before data is read
    if found is None or forks(*found):  # seen before data is read
        check_creatable(resolved.config.save.output_dir, resolved.config.log.run_name or "run")
    resume = None if found is None else Resume.open(*found, stack)
    _check_saving(Path(resolved.config.save.output_dir), None if resume is None or resume.log is None else resume.run)
    resolved, job = _prepare(resolved, found, launch, resumed=found is not None)
    if resume is not None:
        resume.check(job)
    return Prepared(resolved, found, resume, job)


def begin_run(prepared: Prepared, group: Group, watchdog: Watchdog, stack: ExitStack) -> Begun:
    """Create the run's folder, or resume the run. The stack closes the log."""
    opened = None if prepared.resume is None else prepared.resume.log
    run, checkpoint, log = begin(prepared.resolved, prepared.found, opened)
    if log is not opened:
        stack.enter_context(log)
    if log.no_locks is not None:
        _log.warning(
            "%s: its file system has no locks (%s). Two processes that resume the run at once would damage it: start "
            "only one, or %s",
            run.path,
            log.no_locks,
            REMEDY,
        )
    if group.kept is not None:
        group.kept.set(RUN, str(run.path.absolute()))
    end = RunEnd(run, log, watchdog, run.path, alone=group.peers is None)
    return Begun(run, run, checkpoint, prepared.job, log, end, RunView(run.path))


def share(
    begun: Begun | None, resolved: Resolved, launch: Launch | None, group: Group, watchdog: Watchdog, stack: ExitStack
) -> Begun:
    """The run that the first process has begun, as this process trains it. `begun`: None in the others.

    UserError if a process does not share the run's folder, or if its config, data or model differ.
    """
    with group.main.together():
        own = None if begun is None else _announced(begun)
    announced = group.main.gather(own)[0]
    with group.main.together():
        if begun is None:
            begun = _join(announced, resolved, launch, group, watchdog, stack)
    with phase("waiting for the other processes", unit=""):
        _check_alike(begun.job, group)
    return begun


def _announced(begun: Begun) -> dict[str, Any]:
    """What the other processes need to train the run, too. A file in its folder shows to them that they share it."""
    run, token = begun.run.path.absolute(), uuid.uuid4().hex
    (run / TOKEN).parent.mkdir(mode=0o700, exist_ok=True)
    replace_file(run / TOKEN, token.encode())
    checkpoint = None if begun.checkpoint is None else str(begun.checkpoint.absolute())
    return {"run": str(run), "checkpoint": checkpoint, "token": token}


def _join(
    announced: Mapping[str, Any],
    resolved: Resolved,
    launch: Launch | None,
    group: Group,
    watchdog: Watchdog,
    stack: ExitStack,
) -> Begun:
    """The first process's run, with records of this process's own."""
    run, checkpoint = RunDir(Path(announced["run"])), announced["checkpoint"] and Path(announced["checkpoint"])
    _check_shared(run, announced["token"], group)
    if changes := changed(run.config(), resolved.config, OWN):
        raise UserError(
            f"the config differs from that of {group.main.name(0)}: {'; '.join(changes)}. Give all processes the same "
            "config"
        )
    _, job = _prepare(resolved, (run, checkpoint or run.path), launch, resumed=checkpoint is not None)
    records = run.of_process(group.rank)
    records.path.mkdir(mode=0o700, exist_ok=True)
    log = stack.enter_context(EventLog(records.events_path))
    end = RunEnd(run, log, watchdog, records.path, alone=False)
    return Begun(run, records, checkpoint, job, log, end, RunView(records.path))


def record_start(log: EventLog, job: Job, processes: int, trained: float) -> None:
    """Record what this process trains, and how many processes do so together. `trained`: the seconds that
    earlier processes trained it, up to their last record.
    """
    process = ProcessId.of(os.getpid())
    model, parameters = job.config.model.path, job.spec.num_parameters
    log.write(events.RunStarted(job.config.digest, rptrain.__version__, job.devices, model, parameters, trained))
    places = tuple(place.to_event() for place in job.memory.places)
    log.write(
        events.ProcessStarted(
            process.pid, process.host, process.birth, job.total_steps, int(job.asynchronous), places, processes
        )
    )
    if (rows := job.sequences.rows).bad:
        log.write(events.RowsLeftOut(rows.bad, rows.total, tuple(rows.first)))
    if (rows := job.sequences.unsupervised).count:
        log.write(events.RowsLeftOut(rows.count, rows.total, rows.first, rows.PROBLEM))


def record_plan(log: EventLog, job: Job) -> None:
    """Record the plan that is used from now on."""
    run, plan = job.plan, job.plan.plan
    log.write(events.Plan((str(plan), *plan.grid().splitlines())))
    log.write(events.Estimated(run.estimate.period, run.estimate.bubble, run.floor_seconds, simulated_step(run)))


def _check_saving(output_dir: Path, resumed: RunDir | None) -> None:
    """UserError if a new run, or the one that is resumed, could not save. It would be noticed only after training."""
    try:
        with phase("trying to save", unit=""):
            try_saving(writable_place(output_dir) if resumed is None else resumed.checkpoints_path)
    except OSError as error:
        named = f"cannot create a run in {output_dir}" if resumed is None else f"{resumed.path} cannot be resumed"
        raise UserError(f"{named}: {error.strerror}; {remedy(error)}") from error


def _check_alike(job: Job, group: Group) -> None:
    """UserError in all processes if one of them has other devices, other data or another model."""
    group.check_devices(job.hardware.kinds)
    own = {
        "training data": job.sequences.content_hash,
        "validation data": None if job.validation is None else job.validation.sequences.content_hash,
        "model": job.spec.config,
        "number of steps": job.total_steps,
    }
    group.check_equal(own)


def _prepare(
    resolved: Resolved,
    found: tuple[RunDir, Path] | None,
    launch: Launch | None,
    *,
    resumed: bool,
) -> tuple[Resolved, Job]:
    """Replace "auto" in the config and check everything, before memory is allocated."""
    with phase("looking for devices", unit=""):
        hardware = with_saved(here(resolved.config.engine, launch), found)
    resolved = resolve_auto(resolved, found, hardware)
    job = prepare_job(resolved.config, hardware, weights_needed=not resumed)
    check_adapters(job.config, job.files)
    if resumed:
        assert found is not None
        job = with_recorded(job, found[1])
    return resolved, job


def _restarted(resolved: Resolved, group: Group) -> Resolved:
    """The config that resumes the run that the group trained before torchrun restarted it, once it has saved."""
    known = "" if group.kept is None else group.kept.get(RUN)
    if not known or not RunDir(Path(known)).checkpoints():
        return resolved
    save = resolved.config.save.model_copy(update={"resume": known})
    return replace(resolved, config=resolved.config.model_copy(update={"save": save}))


def _check_shared(run: RunDir, token: str, group: Group) -> None:
    """UserError unless this process sees the run's folder of the first process."""
    file, until = run.path / TOKEN, time.monotonic() + VISIBLE
    while not file.is_file() or file.read_text(encoding="utf-8") != token:
        if time.monotonic() > until:
            raise UserError(
                f"{run.path} is not the folder that {group.main.name(0)} has created: set save.output_dir to a folder "
                "that all machines share, under the same path"
            )
        progressed()
        time.sleep(POLL)
