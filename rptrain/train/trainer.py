"""A training run from the checked config to the exported model: the loop reads top to bottom."""

import os
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import rptrain
from rptrain.checkpoint import adapter, frozen
from rptrain.checkpoint.atomic_dir import REPLACED, beside
from rptrain.checkpoint.base_files import BASE
from rptrain.checkpoint.export import check_names, export_store
from rptrain.config.resolve import Resolved
from rptrain.engine.engine import Engine
from rptrain.engine.errors import EngineError
from rptrain.engine.iteration import Pending, PendingLoss
from rptrain.engine.meter import Meter
from rptrain.engine.store import ModelStore
from rptrain.inference.evaluate import ask_questions
from rptrain.kernels.batch import Batch
from rptrain.models.weights import pretrained
from rptrain.planner.hardware import here
from rptrain.planner.memory import with_saved
from rptrain.planner.timings import Conditions, Timings, load
from rptrain.runs import events
from rptrain.runs.control import LOOK, STOP, Control, StopRequested
from rptrain.runs.process import ProcessId
from rptrain.runs.run_dir import RunDir, begin, find, forks
from rptrain.train import trackers, validation
from rptrain.train.best import load_best
from rptrain.train.job import Job, prepare_job, replan, resolve_auto
from rptrain.train.lr import learning_rate
from rptrain.train.messages import slots, tell
from rptrain.train.nonfinite import AGAIN, SkippedSteps
from rptrain.train.resume import check_resume, how_to_go_on, restore
from rptrain.train.save import Saver, checkpoint_meta
from rptrain.train.setup import open_engine, open_store, starting_scale
from rptrain.train.telemetry import Telemetry
from rptrain.train.watchdog import Watchdog
from rptrain.utils.errors import RunDeleted, TrainingError, UserError

MEASURE = 3  # steps whose times the rest of a run is planned with; the first of them is left out


def train(resolved: Resolved, *, quiet: bool = False) -> RunDir:
    """Trains as the config says, or goes on with the run that `save.resume` means.

    Leaves `model/`, a Hugging Face directory, in the run's folder, unless a STOP in its `control` folder ended it
    before. Raises UserError before anything heavy is loaded, EngineError for a failure while training (the last
    checkpoint stays), TrainingError where the last state or the model finds no room on the disk, mapped weights were
    changed or the run's folder was deleted, KeyboardInterrupt after the state was saved.
    """
    trackers.check(resolved.config.log.report_to)
    found = find(resolved)  # a resume that cannot be is found out before data is read
    if found is None or forks(*found):
        return _train(resolved, found, None, quiet)
    for path in (found[0].model_path, beside(found[0].model_path, REPLACED)):  # the run replaces both in the end
        check_names(path)
    with events.EventLog(found[0].events_path) as log:  # from now on, and not once the data was read
        return _train(resolved, found, log, quiet)


def _train(resolved: Resolved, found: tuple[RunDir, Path] | None, held: events.EventLog | None, quiet: bool) -> RunDir:
    """`held` is the log of the run that is to go on, which nobody else trains meanwhile."""
    hardware = with_saved(here(resolved.config.engine), found)
    resolved = resolve_auto(resolved, found, hardware)
    job = prepare_job(resolved.config, hardware, weights_needed=found is None)
    if job.adapter is not None and job.files is None:
        raise UserError(
            f"adapters need a model that has weights, and {job.config.model.path} begins with random ones: train it "
            "whole first, and set model.path to what comes of it"
        )
    if found is not None:
        check_resume(*found, job)
    run, checkpoint = begin(resolved, found)
    replans = job.config.engine.replan
    known = load(run.path, _conditions(job)) if replans else None
    if known is not None:
        job = replace(job, plan=replan(job, known))
    with ExitStack() as stack:
        log = held if found and run == found[0] else None
        log = log or stack.enter_context(events.EventLog(run.events_path))
        progress = stack.enter_context(events.Progress(job.total_steps, quiet=quiet))
        log.listen(trackers.open_trackers(job.config, run, stack, partial(tell, log, progress)))
        telemetry = stack.enter_context(Telemetry(run.path, job.devices, partial(tell, log, progress), log.check))
        store = stack.enter_context(open_store(job))
        saver = stack.enter_context(Saver(run, store.units, job.config.save, partial(tell, log, progress), log.check))
        control = Control(run.control_path, progress.note)
        trainer = Trainer(job, run, log, progress, store, saver, control, telemetry, measure=replans and known is None)
        try:
            trainer.run(checkpoint)
        except StopRequested as stopped:
            progress.note(str(stopped))
        except RunDeleted:  # there is nowhere to record it
            raise
        except Exception as error:
            if isinstance(error, UserError):  # of a file that is missing, perhaps, as the whole folder is
                log.check()
            if (mendable := _mendable(error)) is None:
                with suppress(RunDeleted):
                    log.write(events.Failed(f"{type(error).__name__}: {error}"))
                raise
            saver.settle()  # its checkpoint counts
            failure = TrainingError(f"{mendable}. {how_to_go_on(run)}")
            log.write(events.Failed(str(failure)))
            raise failure from error
    return run


def _mendable(error: Exception) -> BaseException | None:
    """What of a failure a person can mend: a full disk, for the most part, or files of mapped weights that changed."""
    if isinstance(error, EngineError) and isinstance(error.__cause__, UserError):
        return error.__cause__
    return error if isinstance(error, OSError) else None


@dataclass
class _Started:
    """A step that was handed to the engine and not yet reported."""

    step: int  # counts from 1
    batch: Batch
    learning_rate: float
    loss: PendingLoss
    update: Pending


class Trainer:
    """One run in progress."""

    def __init__(
        self,
        job: Job,
        run: RunDir,
        log: events.EventLog,
        progress: events.Progress,
        store: ModelStore,
        saver: Saver,
        control: Control,
        telemetry: Telemetry,
        *,
        measure: bool,
    ) -> None:
        self._job, self._run, self._log, self._progress, self._store = job, run, log, progress, store
        self._tell = partial(tell, log, progress)
        self._saver, self._control, self._measure = saver, control, measure
        self._telemetry = telemetry
        self._opened = 0  # steps that were done when the engine was opened
        self._clock = 0.0
        self._seconds = 0.0  # of steps since the last report, while none is under way
        self._tokens = 0  # since the last report
        self._skipped = SkippedSteps(job, self._tell)
        self._loss_scale = starting_scale(job)  # of the weights with which the next engine begins
        self._patience = validation.Patience(job.config.train.early_stopping_patience)
        self._measured: tuple[int, float | None] = (0, None)  # a step, and the loss of held-out rows after it
        self._total = job.total_steps  # fewer where the run ends early
        self._frozen: dict[str, Any] | None = None  # what checkpoints say of frozen weights

    def run(self, checkpoint: Path | None) -> None:
        job, log = self._job, self._log
        log.write(
            events.RunStarted(
                job.config.digest,
                rptrain.__version__,
                job.devices,
                job.config.model.path,
                job.spec.num_parameters,
            )
        )
        self._tell_process()
        self._tell_plan()
        done, applied = self._load(checkpoint)
        if done == 0:
            self._evaluate(0)
        if self._patience.over:  # it was stopped early, and ended before its model was written
            self._total = done
        else:
            with self._control.signals():
                self._train(done, applied)
        log.check()
        if job.config.save.load_best_model_at_end:
            with self._telemetry.doing("loading"):
                load_best(self._run, self._store.units, self._total, self._tell)
        if name := pretrained.not_finite(job.spec, self._store.held, self._store.in_memory):
            raise TrainingError(
                f"the model has diverged: {name} holds values that are infinite or not numbers. {AGAIN}"
            )
        self._evaluate(self._total)
        log.check()
        base = self._run.checkpoints()[-1] / BASE
        with self._telemetry.doing("exporting"):
            view = lru_cache(maxsize=1)(self._store.view)  # tensor by tensor, a mapped parameter would be read for each
            export_store(view, job.spec, base, self._run.model_path, job.config.model.dtype, adapter=job.adapter)
        log.write(events.Finished(self._total))
        self._progress.note(f"model: {self._run.model_path}")

    def _train(self, done: int, applied: int) -> None:
        """The steps that are left. The first ones are measured; if their times give another plan, it takes the rest."""
        total = self._job.total_steps
        if self._measure and total - done >= MEASURE + 2:  # with fewer steps there is nothing to gain
            rest = done + MEASURE
            with (
                self._engine(done, applied, meter=Meter()) as engine,
                self._watched(engine),
                self._telemetry.watching(engine, done),
            ):
                self._loop(engine, range(done, rest))
                if self._total <= rest:  # it was stopped early
                    return
                if not self._replan(engine):
                    self._loop(engine, range(rest, total))
                    return
                self._saver.settle()  # another engine's updates would not wait for it
            done, applied, self._loss_scale = rest, engine.applied, engine.loss_scale
        with (
            self._engine(done, applied) as engine,
            self._watched(engine),
            self._telemetry.watching(engine, done),
        ):
            self._loop(engine, range(done, total))

    def _engine(self, done: int, applied: int, *, meter: Meter | None = None) -> Engine:
        self._opened = done
        engine = open_engine(
            self._job, self._store, applied=applied, loss_scale=self._loss_scale, meter=meter, watched=True
        )
        if not engine.locked and self._job.devices[0].startswith("cuda"):
            self._progress.note("host memory could not be page-locked: transfers will be slower")
        return engine

    def _watched(self, engine: Engine) -> Watchdog:
        seconds = self._job.config.engine.stall_timeout
        self._watchdog = Watchdog(seconds, self._run.path, engine.waiting, self._tell, self._log.check)
        return self._watchdog

    def _loop(self, engine: Engine, steps: range) -> None:
        """One step is reported while the next one runs: the pipeline is not flushed between them."""
        job, save, control = self._job, self._job.config.save, self._control
        started: _Started | None = None
        self._clock = time.perf_counter() - self._seconds
        for step in steps:
            self._log.check()
            rate = self._learning_rate(step)
            batch = job.batches.batch(step)
            loss, update = engine.forward_backward(batch), engine.step(rate)
            if started is not None:
                self._report(started, engine)
            started = _Started(step + 1, batch, rate, loss, update)
            self._saver.look()
            last, due = step + 1 == job.total_steps, save.save_steps and (step + 1) % save.save_steps == 0
            every = job.config.train.eval_steps
            measures = job.validation is not None and (last or (every and (step + 1) % every == 0))
            if last or due or measures or control.stops or control.saves or control.pauses:
                began = time.perf_counter()
                self._report(started, engine)
                drained = time.perf_counter() - began
                started = None
                last = bool(measures and self._validate(engine, step + 1)) or last
                self._obey(engine, step + 1, last=last, due=bool(due), drained=drained)
            if last:
                self._total = step + 1
                break
        if started is not None:
            self._report(started, engine)
        self._seconds = time.perf_counter() - self._clock

    def _replan(self, engine: Engine) -> bool:
        """Plans again with what the engine measured, and keeps that for a resumed run; whether the plan is another."""
        engine.synchronize()
        measured = engine.measured()
        if measured is None:  # every step was skipped
            return False
        self._log.check()
        Timings(_conditions(self._job), measured).save(self._run.path)
        plan = replan(self._job, measured)
        if plan.plan == self._job.plan.plan:
            return False
        self._job = replace(self._job, plan=plan)
        self._tell_plan()
        self._progress.note(f"planned again, with measured times: {plan.plan}")
        return True

    def _tell_process(self) -> None:
        own, job = ProcessId.of(os.getpid()), self._job
        places = tuple(place.to_event() for place in job.memory.places)
        self._log.write(
            events.ProcessStarted(own.pid, own.host, own.birth, job.total_steps, int(job.asynchronous), places)
        )

    def _tell_plan(self) -> None:
        run, plan = self._job.plan, self._job.plan.plan
        self._log.write(events.Plan((str(plan), *plan.grid().splitlines())))
        self._log.write(events.Estimated(run.estimate.period, run.estimate.bubble, run.floor_seconds))

    def _learning_rate(self, step: int) -> float:
        optim = self._job.config.optim
        return learning_rate(
            step,
            base=optim.learning_rate,
            kind=optim.lr_scheduler_type,
            warmup_steps=optim.warmup_steps,
            total_steps=self._job.total_steps,
        )

    def _report(self, started: _Started, engine: Engine) -> None:
        loss, update = started.loss.result(), started.update.result()
        self._watchdog.alive(started.step)
        self._tokens += started.batch.tokens
        self._skipped.follow(started.step, started.loss, update)
        if engine.trace is not None:
            self._log.write(slots(started.step, engine.trace.take(started.step - 1 - self._opened)))
        if started.step % self._job.config.log.logging_steps and started.step != self._job.total_steps:
            return
        now = time.perf_counter()
        event = events.Step(
            step=started.step,
            loss=loss,
            learning_rate=started.learning_rate,
            grad_norm=update.grad_norm,
            tokens=started.batch.tokens,
            supervised=started.batch.supervised,
            tokens_per_second=self._tokens / (now - self._clock),
            skipped=update.skipped,
        )
        self._clock, self._tokens = now, 0
        self._log.write(event)
        self._progress.update(event)

    # ---- state

    def _load(self, checkpoint: Path | None) -> tuple[int, int]:
        """Fills the store; returns the steps that are done and those of them that were applied."""
        job, seed = self._job, self._job.config.train.seed
        fresh = self._store.in_memory if checkpoint is None else job.spec.frozen
        fresh = [unit for unit in fresh if unit in self._store.in_memory]
        frozen.fill(job.spec, self._store.held, job.files, seed, fresh, self._store.mapped)
        if job.spec.frozen:
            states = [self._store.units[index] for index in job.spec.frozen]
            flats = [(state.unit, state.mapped or state.params[0]) for state in states]
            base = "bf16" if job.config.adapters is None else job.config.adapters.base
            self._frozen = frozen.describe(flats, job.config.train.freeze, seed, job.files is None, base)
        if checkpoint is None:
            if job.begin is not None:
                adapter.load(job.begin, job.spec, self._store.view)
            self._store.loaded()
            return 0, 0
        checkpoint, state = restore(
            self._run, checkpoint, job, self._store.units, partial(tell, self._log, self._progress)
        )
        if self._frozen is not None:
            frozen.check(state["meta"], self._frozen["sha256"])
        self._log.write(events.Resumed(state["step"], str(checkpoint)))
        self._progress.note(f"resumed from {checkpoint}")
        if (kept := state["meta"].get("validation")) is not None:
            self._patience = replace(self._patience, best=kept["best"], bad=kept["bad"])
        if (scale := state["meta"].get("loss_scale")) is not None:
            self._loss_scale = replace(self._loss_scale, **scale)
        return state["step"], state["meta"]["applied"]

    def _validate(self, engine: Engine, step: int) -> bool:
        """The loss of the rows that are held out; whether the run is to end, as it gets no better."""
        assert self._job.validation is not None
        began = time.perf_counter()
        with self._telemetry.doing("evaluating"):
            loss = validation.loss(engine, self._job.validation, partial(self._watchdog.alive, step))
        self._measured = step, loss
        ends = self._patience.follow(loss)
        self._tell(events.Evaluation(step, "loss", loss))
        self._progress.note(f"step {step}: loss of held-out rows {loss:.4f}" + (", no better: the end" if ends else ""))
        self._watchdog.alive(step)
        self._clock += time.perf_counter() - began
        return ends

    def _obey(self, engine: Engine, step: int, *, last: bool, due: bool, drained: float) -> None:
        """Between two steps: pauses, saves and stops as config and commands say."""
        began, control = time.perf_counter(), self._control
        if control.pauses:
            with self._telemetry.doing("paused"):
                self._pause(engine, step)
        stops = control.stops and not last
        if last or due or stops or control.saves:
            with self._telemetry.doing("saving"):
                self._save(engine, step, required=last or stops, drained=drained)
        self._clock += time.perf_counter() - began  # no part of the speed that is reported
        if stops:
            self._log.write(events.Stopped(step, "signal" if control.interrupted else STOP))
            if control.interrupted:
                raise KeyboardInterrupt
            control.stopped()
            raise StopRequested(f"stopped after step {step}, which is saved: the same command goes on")

    def _pause(self, engine: Engine, step: int) -> None:
        self._log.write(events.Paused(step))
        self._progress.note(f"paused after step {step}")
        while self._control.pauses:
            if self._control.saves:
                with self._telemetry.doing("saving"):
                    self._save(engine, step, required=False)
            self._saver.look()
            self._watchdog.alive(step)
            time.sleep(LOOK)
        self._log.write(events.Continued(step))

    def _save(self, engine: Engine, step: int, *, required: bool, drained: float = 0.0) -> None:
        done = self._control.take() if self._control.saves else None
        loss = self._measured[1] if self._measured[0] == step else None
        meta = checkpoint_meta(self._job, self._frozen, self._patience, loss)
        self._saver.begin(engine, step, meta, done, drained=drained)
        if required:
            self._saver.settle(required=True)
        self._watchdog.alive(step)  # a save may take longer than it has patience

    def _evaluate(self, step: int) -> None:
        count = self._job.config.eval.questions
        if not count:
            return
        with self._telemetry.doing("evaluating"):
            scores, shown = ask_questions(self._job.spec, self._store.weights, self._job.tokenizer, count)
        overall = scores.pop("overall")
        self._log.write(events.Evaluation(step, "exact_match", overall, scores))
        for prompt, text in shown:
            self._log.write(events.Sample(step, prompt, text))
        each = ", ".join(f"{name} {score:.1%}" for name, score in scores.items())
        when = "before training" if step == 0 else f"after {step} steps"
        self._progress.note(f"{count} held-out questions, {when}: {overall:.1%} answered exactly ({each})")


def _conditions(job: Job) -> Conditions:
    return Conditions.of(job.config, job.spec, job.devices)
