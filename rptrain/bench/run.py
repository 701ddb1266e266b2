"""Runs a benchmark: trains a config's model for some steps with random weights and tokens, and measures them."""

import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

import torch

from rptrain.bench import floor
from rptrain.bench.memory import Sampler, driver_allocations
from rptrain.bench.report import Copied, Report, Startup
from rptrain.bench.timeline import copied, lanes, updates
from rptrain.config.resolve import Resolved
from rptrain.config.schema import Eval, TrainSet
from rptrain.data.loader import RANDOM, RANDOM_ROWS
from rptrain.engine.engine import Engine
from rptrain.engine.iteration import Pending
from rptrain.engine.memory.store import ModelStore
from rptrain.engine.meter import Meter
from rptrain.engine.optim.traffic import update_bytes_of
from rptrain.engine.recorder import Observers
from rptrain.engine.reproducible import Reproducible
from rptrain.kernels.compiling import COMPILED
from rptrain.machine.hardware import here, program_bytes
from rptrain.models.transforms.lora import set_magnitudes
from rptrain.models.weights import pretrained
from rptrain.train.job import Job, prepare_job, resolve_auto
from rptrain.train.replan import COMPARED, Candidate, Comparison
from rptrain.train.session import open_engine, open_store, optimizer_of
from rptrain.train.steps import step_phase
from rptrain.utils.phases import during

RATE = 1e-6  # the learning rate: the weights hardly change


@dataclass(frozen=True)
class _Step:
    """A finished step."""

    end: float
    loss: float
    skipped: bool
    driver_allocations: tuple[int, ...]


def bench(
    resolved: Resolved,
    *,
    steps: int,
    warmup: int | None = None,
    with_floor: bool = False,
    tell: Callable[[str], object],
) -> Report:
    """Measures `steps` steps after `warmup` others (default: `Job.warm_up`), with the plan that training would use.

    Unless `engine.replan` is false, the steps with which training chooses its plan come first. `tell` is called with
    the next action. Raises UserError for mistakes in the input, before memory is allocated. Writes no files.
    """
    tell("planning")
    COMPILED.watch()
    began = time.perf_counter()
    job = _prepare(resolved)
    preparing = time.perf_counter() - began
    found = _floor(job, tell) if with_floor else None
    with ExitStack() as stack:
        tell("allocating memory")
        began = time.perf_counter()
        store = stack.enter_context(open_store(job))
        taken = time.perf_counter()
        _initialize(job, store)
        filled = time.perf_counter()
        first: tuple[float, float] | None = None  # when the first engine was open, and when it had finished a step
        if job.config.engine.replan:
            job, first = _choose_plan(job, store, tell)
        warmup = job.warm_up if warmup is None else warmup
        sampler = stack.enter_context(Sampler(job.devices))
        with open_engine(job, store, optimizer_of(job), Observers(trace=True, meter=Meter(layers=False))) as engine:
            opened = time.perf_counter()
            done = _train(engine, job, warmup + steps + 1, tell, "step {} of {}")
            process, peaks, measured = program_bytes(), sampler.peaks(), engine.measured()
        opened, ended = first or (opened, done[0].end)
        assert engine.trace is not None
        spans = [span for iteration in range(len(done)) for span in engine.trace.take(iteration)]
        ends = [step.end for step in done[warmup - 1 : warmup + steps]]
        return Report(
            job=job,
            ends=tuple(ends),
            losses=tuple(step.loss for step in done),
            skipped=sum(step.skipped for step in done),
            startup=Startup(preparing, taken - began + opened - filled, filled - taken, ended - opened),
            peaks=tuple(peaks),
            allocations=_grown(done[warmup - 1], done[warmup + steps - 1]),
            process=process,
            locking=engine.locking,
            adam_bytes=update_bytes_of(store.layout, (unit for unit in store.spec.units if unit.trainable)),
            lanes=tuple(lanes(job.devices, spans, engine.readings)),
            updates=tuple(updates(engine.readings)),
            measured=measured,
            copied=_copied(engine, job, range(warmup, warmup + steps)),
            floor=found,
        )


def _initialize(job: Job, store: ModelStore) -> None:
    """Fills the store with random weights."""
    pretrained.initialize(job.spec, store.stored_view, job.config.train.seed)
    set_magnitudes(job.spec, store.stored_view, {})
    store.loaded()


def _choose_plan(job: Job, store: ModelStore, tell: Callable[[str], object]) -> tuple[Job, tuple[float, float]]:
    """The job with the plan that training would use, chosen as in training: measured times, and steps of both plans.

    Also returns when the first engine was open, and when it had finished a step.
    """
    with open_engine(
        job, store, optimizer_of(job), Observers(job.config.engine.trace, Meter(warm_up=job.warm_up))
    ) as engine:
        opened = time.perf_counter()
        done = _train(engine, job, job.warm_up + job.measuring, tell, "step {} of {} to plan with")
        first = opened, done[0].end
        candidate = Candidate.of(job, engine.measured())
        if candidate is None or candidate.job.plan.plan == job.plan.plan:
            return job if candidate is None else candidate.job, first
        before = _time_steps(engine, job, tell, "step {} of {} with the first plan")
    with open_engine(candidate.job, store, optimizer_of(job), Observers(job.config.engine.trace)) as engine:
        _train(engine, job, candidate.job.warm_up, tell, "step {} of {} to warm up the new plan")
        comparison = Comparison(before, _time_steps(engine, job, tell, "step {} of {} with the new plan"))
    tell(comparison.sentence())
    return job if comparison.slower else candidate.job, first


def _time_steps(engine: Engine, job: Job, tell: Callable[[str], object], text: str) -> float:
    """Trains some steps; the median of their seconds."""
    ends = [step.end for step in _train(engine, job, COMPARED, tell, text)]
    return median(end - start for start, end in pairwise(ends))


def _prepare(resolved: Resolved) -> Job:
    """The job with random weights and tokens. It needs no disk space, because nothing is saved."""
    config, batch = resolved.config, resolved.config.train.global_batch_size
    random = TrainSet(path=RANDOM, weight=batch * max(1, RANDOM_ROWS // batch) / RANDOM_ROWS)  # no step is short
    given = config.model_copy(
        update={
            "model": config.model.model_copy(update={"init": "random"}),
            "data": config.data.model_copy(update={"train": (random,), "chat_template": None}),
            "eval": Eval(),
        }
    )
    hardware = replace(here(config.engine), here=False)
    return prepare_job(resolve_auto(replace(resolved, config=given), None, hardware).config, hardware)


def _floor(job: Job, tell: Callable[[str], object]) -> floor.Floor:
    """Measures the floor of one device, and frees its memory. A CPU worker has one thread."""
    tell("measuring the roofline time")
    device = torch.device(job.devices[0])
    config = job.config
    if device.type == "cuda":
        settings = Reproducible(cuda=False, fp16_accumulation=config.engine.fp16_accumulation)
        try:
            found = floor.floor(job.spec, config.train.sequences, config.data.max_length, job.dtype, device)
        finally:
            settings.restore()
        torch._C._cuda_clearCublasWorkspaces()  # one for each stream on which a product was captured
        torch.cuda.empty_cache()
        return found
    settings = Reproducible(cuda=False)
    try:
        return floor.floor(job.spec, config.train.sequences, config.data.max_length, job.dtype, torch.device("cpu"))
    finally:
        settings.restore()


def _train(engine: Engine, job: Job, count: int, tell: Callable[[str], object], text: str) -> list[_Step]:
    """Trains some steps. As in training, a step runs while the previous one is awaited; the last one runs alone."""
    done: list[_Step] = []

    def finish(loss: Pending, update: Pending) -> None:
        value, skipped = loss.result(), update.result().skipped
        done.append(_Step(time.perf_counter(), value, skipped, driver_allocations(job.devices)))

    under_way: tuple[Pending, Pending] | None = None
    for step in range(count):
        tell(text.format(step + 1, count))
        batch = job.batches.batch(step)
        started = engine.forward_backward(batch), engine.step(RATE)
        if under_way is not None:
            with during(step_phase(engine, 0, 1)) if step == 1 else nullcontext():
                finish(*under_way)
        under_way = started
    assert under_way is not None
    finish(*under_way)
    engine.synchronize()
    return done


def _copied(engine: Engine, job: Job, steps: range) -> Copied:
    layers = {unit for layer in job.spec.layers for unit in layer.units}
    readings = engine.readings
    return Copied(
        copied(readings, "upload", steps),
        copied(readings, "upload", steps, layers & {*job.spec.frozen}),
        copied(readings, "download", steps),
    )


def _grown(before: _Step, after: _Step) -> tuple[int, ...]:
    return tuple(b - a for a, b in zip(before.driver_allocations, after.driver_allocations, strict=True))
