"""Open what a run needs: its records, commands and threads, the memory and the weights of its model, and the engine."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from rptrain.checkpoint import adapter, checked, frozen
from rptrain.engine.distributed.shared import Shared
from rptrain.engine.engine import Devices, Engine
from rptrain.engine.memory.store import ModelStore
from rptrain.engine.optim.loss_scale import UNSCALED, LossScale
from rptrain.engine.optimizer import Optimizer
from rptrain.engine.partners import Partners
from rptrain.engine.recorder import Observers
from rptrain.models.weights.digests import TensorDigests
from rptrain.models.weights.file_backed import FileBackedWeights
from rptrain.runs.folder.control import Control
from rptrain.runs.records.lanes import Phase
from rptrain.train.begin import Begun, record_start
from rptrain.train.group import Group
from rptrain.train.job import Job
from rptrain.train.progress import Journal, ProgressDisplay
from rptrain.train.replan import with_recorded_times
from rptrain.train.save import Saver
from rptrain.train.telemetry import Telemetry
from rptrain.train.trackers import Trackers
from rptrain.train.watchdog import Watchdog, Watched

PATIENCE = 60.0  # most seconds to wait for the telemetry or a tracker, neither of which is needed to train


@dataclass(frozen=True)
class Session:
    """What a run needs besides the engine. `shared`: if several processes train. `measure`: whether some steps are
    measured, to plan the others with their times.
    """

    begun: Begun
    group: Group
    shared: Shared | None
    journal: Journal
    progress: ProgressDisplay
    store: ModelStore
    saver: Saver
    control: Control
    telemetry: Telemetry
    watchdog: Watchdog
    measure: bool

    @contextmanager
    def doing(self, phase: Phase) -> Iterator[None]:
        """Tell the telemetry, the watchdog and the display what the run does."""
        with self.telemetry.doing(phase), self.watchdog.doing(phase), self.progress.doing(phase):
            yield


def open_session(
    begun: Begun, group: Group, progress: ProgressDisplay, watchdog: Watchdog, stack: ExitStack
) -> Session:
    """Open everything that a run needs besides the engine. The stack closes it, once the end of the run is recorded."""
    run, records, log, end = begun.run, begun.records, begun.log, begun.end
    journal = Journal(log, progress)
    watched = Watched(
        records.path,
        records.events_path,
        journal.emit,
        log.check,
        end.record,
        lambda: run.saved_step,
        end.how_to_resume,
    )
    stack.enter_context(watchdog.watching(watched))
    log.listen(watchdog.hear)
    job, measure = with_recorded_times(begun.job, records.path)
    end.vram = min((gpu.limit for gpu in job.hardware.gpus), default=None)
    patience = min(job.config.engine.stall_timeout or PATIENCE, PATIENCE)
    if group.first:
        followers = stack.enter_context(Trackers(job.config, run, journal.emit, patience))
        log.listen(followers.hear)
        end.observers += (followers,)
    telemetry = Telemetry(records.path, job.devices, journal.emit, log.check, patience, run.saved_step)
    stack.enter_context(telemetry)
    end.observers += (telemetry,)
    record_start(log, job, group.size, begun.earlier.trained)  # before memory is page-locked, which takes long
    store = stack.enter_context(open_store(job))
    end.saver = saver = stack.enter_context(Saver(run, store.units, job.base, job.config.save, journal, group.saving))
    control = Control(run.control_path if group.first else None, progress.note)
    shared = group.shared(job.config)
    begun = replace(begun, job=job)
    return Session(begun, group, shared, journal, progress, store, saver, control, telemetry, watchdog, measure=measure)


def open_store(job: Job) -> ModelStore:
    """Allocate host memory for the job's model, filled with zeros; file-backed weights stay in their files."""
    file_backed = None
    if job.layout.file_backed:
        assert job.files is not None
        file_backed = FileBackedWeights(job.files, job.spec, job.dtype)
    return ModelStore(job.spec, job.layout, lock=job.devices[0].startswith("cuda"), file_backed=file_backed)


def load_weights(job: Job, store: ModelStore, *, resumed: bool) -> dict[str, Any] | None:
    """Fill the store with the initial weights: from the model's files, or random. A `resumed` job only needs those
    that are frozen.

    Returns what checkpoints record about weights that are frozen or carried along, if there are any.
    """
    seed = job.config.train.seed
    units = [unit for unit in (job.spec.frozen if resumed else store.in_memory) if unit in store.in_memory]
    known = _recorded(job) if units or store.file_backed else []
    digests = _digests(job, whole=any(each.groups for each in known))
    frozen.fill(job.spec, store.stored_view, job.files, seed, units, store.file_backed, digests)
    states = [store.units[index] for index in job.spec.frozen]
    flats = [(state.unit, state.file_backed or state.params[0]) for state in states]
    base = "bf16" if job.config.adapters is None else job.config.adapters.base
    described = frozen.describe(flats, job.config.train.freeze, seed, job.files, base, digests)
    if job.files is not None and not resumed:
        checked.check_carried(job.files.directory, (described or {}).get("carried", {}))
    if not resumed and job.initial_adapter is not None:
        adapter.load(job.initial_adapter, job.spec, store.view)
    for each in known:
        each.check(digests)
    if digests is not None:
        digests.keep()
    if not resumed:
        store.loaded()
    return described


def _recorded(job: Job) -> list[checked.Recorded]:
    """What is recorded of the model's weights: by their export, and by an adapter that was trained on them."""
    if job.files is None:
        return []
    known = checked.recorded(job.files.directory, job.files.stamps)
    if (files := job.initial_adapter) is not None:
        states = checked.check_files(files.directory, [files.directory / adapter.WEIGHTS])
        known.append(checked.Recorded({}, "", (), states))
        if not adapter.other_base(files, job.config.model.path):
            known += checked.recorded_base(files.directory, job.files.directory, job.spec, job.files.tensors)
    return known


def _digests(job: Job, *, whole: bool) -> TensorDigests | None:
    """For the digests of the frozen tensors, which checkpoints record, or of the `whole` model."""
    if job.files is None or not (whole or job.spec.frozen):
        return None
    tensors = job.files.tensors
    if not whole:
        names = frozen.tensor_names([job.spec.units[index] for index in job.spec.frozen], tensors)
        tensors = {name: tensors[name] for name in names}
    return TensorDigests(tensors, job.files.stamps)


def initial_hashes(store: ModelStore, described: dict[str, Any] | None) -> dict[str, str]:
    """SHA-256 of the weights of each unit by name, before training. `described`: from `load_weights`."""
    known = {} if described is None else described["sha256"]
    trained = [(state.unit, state.params[0]) for state in store.units if state.unit.name not in known]
    return known | frozen.hashes(trained)


def optimizer_of(job: Job) -> Optimizer:
    """The optimizer at the first step."""
    optim = job.config.optim
    scale = LossScale.start(optim.loss_scale, optim.loss_scale_steps) if job.dtype == torch.float16 else UNSCALED
    return Optimizer(
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        max_grad_norm=optim.max_grad_norm,
        threads=job.hardware.machine.threads,
        seed=job.config.train.seed,
        loss_scale=scale,
    )


def open_engine(
    job: Job, store: ModelStore, optimizer: Optimizer, observers: Observers, partners: Partners | None = None
) -> Engine:
    """The engine for a job. `partners`: the other processes, if several train the model."""
    devices = Devices(job.devices, job.plan.device, job.device_limit)
    return Engine(store, job.plan.plan, devices, optimizer, observers=observers, partners=partners)
