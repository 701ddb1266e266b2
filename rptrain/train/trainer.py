"""The training loop: loads the weights, runs the steps and what happens between them, and exports the model."""

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from rptrain.checkpoint.atomic_dir import BASE
from rptrain.checkpoint.export import ModelInMemory, export_store
from rptrain.engine.engine import Engine
from rptrain.engine.meter import Meter
from rptrain.engine.recorder import Observers
from rptrain.inference.evaluate import ask_questions
from rptrain.kernels.compiling import COMPILED
from rptrain.models.weights import pretrained
from rptrain.models.weights.carried import NOTHING, Carried
from rptrain.planner.short_steps import tokens_of
from rptrain.runs.folder.control import POLL, Commands, StopRequested
from rptrain.runs.records import events
from rptrain.runs.records.lanes import StepNumbers
from rptrain.train import validation
from rptrain.train.answers import record_answers
from rptrain.train.begin import record_plan
from rptrain.train.end import Stopping
from rptrain.train.group import ShareTimes
from rptrain.train.job import Job
from rptrain.train.lr import learning_rate
from rptrain.train.progress import closing_lines
from rptrain.train.replan import COMPARED, Candidate, Comparison, is_worthwhile
from rptrain.train.resume import restore
from rptrain.train.save import checkpoint_meta
from rptrain.train.session import Session, initial_hashes, load_weights, open_engine, optimizer_of
from rptrain.train.steps import (
    RESTART_ADVICE,
    Clock,
    RepeatedSteps,
    RunningStep,
    SkippedSteps,
    StepTimes,
    Throughput,
    step_phase,
)
from rptrain.train.telemetry import slots
from rptrain.train.validation import load_best
from rptrain.utils.errors import TrainingError
from rptrain.utils.page_locks import locking_advice
from rptrain.utils.phases import during, phase
from rptrain.utils.signals import PROCESS
from rptrain.utils.text import counted
from rptrain.utils.units import format_score


class Trainer:
    """One run in progress: `run` is the whole run, `_loop` its steps, `_after_step` what happens between two steps."""

    def __init__(self, session: Session) -> None:
        begun = session.begun
        self._session, self._group, self._store = session, session.group, session.store
        self._job, self._run, self._log, self._end = begun.job, begun.run, begun.log, begun.end
        self._progress, self._emit, self._saver = session.progress, session.journal.emit, session.saver
        self._control, self._telemetry, self._watchdog = session.control, session.telemetry, session.watchdog
        self._done = 0  # steps before the engine was opened
        self._optimizer = optimizer_of(begun.job)  # as when the engine is opened
        self._last = begun.job.total_steps  # the last step; early stopping makes it an earlier one
        self._running = deque[RunningStep]()  # steps that were submitted, until they are reported
        timeout = begun.job.config.save.stop_timeout
        self._stopping = Stopping(
            timeout, self._progress.note, lambda: begun.run.saved_step, alone=self._group.size == 1
        )
        self._next = 0  # steps that were submitted
        self._earlier = begun.earlier.steps
        self._repeats = RepeatedSteps(self._earlier, begun.job.total_steps, self._emit)
        self._clock = Clock()
        self._throughput = Throughput(self._clock, asynchronous=begun.job.asynchronous)
        self._made = 0  # kernels that were compiled or loaded until the end of the last step
        self._compiled = 0  # kernels that were compiled until the last report
        self._step_times = StepTimes(COMPARED)
        self._share_times = ShareTimes(self._group, self._emit)
        self._starved = 0.0  # seconds in which devices of the engine have waited for updates so far
        self._skipped = SkippedSteps(begun.job, self._emit)
        self._early_stopping = validation.EarlyStopping(begun.job.config.train.early_stopping_patience)
        self._validated: tuple[int, float | None] = (0, None)  # a step, and the validation loss after it
        self._locking_noted = False
        self._frozen: dict[str, Any] | None = None  # what checkpoints record about frozen weights

    def run(self, checkpoint: Path | None) -> None:
        """Train and export the model, from new weights or from a checkpoint."""
        job = self._job
        COMPILED.watch()
        record_plan(self._log, job)
        with self._session.doing("loading"):
            self._load(checkpoint)
        if self._done == 0:
            self._ask_questions(0)
        if self._early_stopping.stopped:  # before it was resumed: only the export is missing
            self._last = self._done
        else:
            with PROCESS.deferred("stopping with a checkpoint; once more to stop at once"):
                self._train()
        self._end.trained = True
        self._log.check()
        state = self._last, self._loss_after(self._last)
        if job.config.save.load_best_model_at_end:
            with self._session.doing("loading"):
                state = load_best(self._run, self._store.units, self._last, self._emit, self._group.main)
        with phase("checking the weights", unit=""):
            name = pretrained.not_finite(job.spec, self._store.stored_view, self._store.in_memory)
        if name:
            raise TrainingError(f"the model has diverged: {name} contains NaN or infinite values. {RESTART_ADVICE}")
        self._ask_questions(state[0])
        self._export(*state)
        self._end.finished(self._last)
        for line in closing_lines(self._run.path):
            self._progress.note(line)
        self._progress.note(f"model: {self._run.model_path}")

    # ---- steps

    def _train(self) -> None:
        """Run the remaining steps. If that is worthwhile, the first ones choose the plan of the others."""
        self._next = self._done
        if self._session.measure and is_worthwhile(self._job, self._job.total_steps - self._done):
            self._choose_plan()
        if self._next < self._last:
            with self._open_engine() as engine:
                self._loop(engine)

    def _choose_plan(self) -> None:
        """Measure some steps, plan again with their times, and compare steps of both plans.

        Runs the remaining steps unless the first plan is faster, which needs a new engine.
        """
        first = self._job
        with self._open_engine(meter=Meter(warm_up=first.warm_up)) as engine:
            if not self._loop(engine, first.warm_up + first.measuring):
                return
            engine.synchronize()
            candidate = Candidate.of(first, engine.measured())
            if candidate is None or candidate.job.plan.plan == first.plan.plan:
                self._keep(candidate)
                self._loop(engine)
                return
            seconds = self._time_steps(engine)
            if self._next == self._last:
                return
            self._leave(engine)
        self._use(candidate.job)
        self._progress.note(f"planned again with measured times: {self._job.plan.plan}")
        with self._open_engine() as engine:
            self._loop(engine, self._job.warm_up)
            comparison = Comparison(seconds, self._time_steps(engine))
            if self._next == self._last:
                return
            self._progress.note(comparison.sentence())
            if not comparison.slower:
                self._keep(None if comparison.gain is None else candidate)
                self._loop(engine)
                return
            self._leave(engine)
        self._use(first)

    def _loop(self, engine: Engine, steps: int | None = None) -> bool:
        """Run this many of the remaining steps, by default all; whether any are left.

        Each is reported while the next one runs, so the pipeline never drains between them.
        """
        stop = self._last if steps is None else self._next + steps
        if self._next == 0 and self._job.config.train.eval_on_start:
            self._validate(engine, 0)
        with self._clock.running():
            while self._next < min(stop, self._last):
                self._log.check()
                self._submit(engine, self._next)
                self._next += 1
                self._report(engine, running=1)  # the step before
                self._after_step(engine, self._next)
            self._report(engine)
        return self._next < self._last

    def _time_steps(self, engine: Engine) -> float | None:
        """Run some steps; the median of their seconds."""
        self._step_times = StepTimes(COMPARED)
        self._loop(engine, COMPARED)
        return self._step_times.median

    def _submit(self, engine: Engine, step: int) -> None:
        """Start a step, which counts from 0, without waiting for it."""
        rate = self._learning_rate(step)
        batch = self._job.batches.batch(step)
        index = step - self._done
        first = None if index else step_phase(engine, index, step + 1)
        loss, update = engine.forward_backward(batch), engine.step(rate)
        self._running.append(RunningStep(step + 1, batch, rate, loss, update, index, first))

    def _report(self, engine: Engine, running: int = 0) -> None:
        """Wait for the steps that run, except this many of the newest ones, and record them."""
        while len(self._running) > running:
            self._wait(engine, self._running[0])
            if self._running:  # else a signal came, and the last ones have just ended
                self._record(engine, self._running.popleft())

    def _wait(self, engine: Engine, step: RunningStep) -> None:
        """Wait for the end of a step, unless a signal leaves no time for it: then end the run with the steps before.

        Raises KeyboardInterrupt after these were saved.
        """
        with during(step.first or step_phase(engine, step.index, step.step)) as waiting:
            while not engine.ended(step.index, POLL):
                if self._stopping.drops(step.step, engine.progress(step.index), self._saver.seconds):
                    self._drop(engine)
                    return
            waiting.update()

    def _drop(self, engine: Engine) -> None:
        """Record the steps that are complete. If any others run, drop them, save, and raise KeyboardInterrupt."""
        applied = self._done + engine.hold()
        while self._running and self._running[0].step <= applied:
            self._record(engine, self._running.popleft())
        if not self._running:
            return
        step = self._running[0]
        self._stopping.dropped(step.step, engine.progress(step.index))
        engine.drop()
        self._saver.wait()
        if applied > self._run.saved_step:
            self._save(engine, applied, required=True)
        raise KeyboardInterrupt

    def _record(self, engine: Engine, done: RunningStep) -> None:
        """Record a step that has ended."""
        loss, update = done.loss.result(), done.update.result()
        batch, longest = done.batch, tokens_of(self._job.config, self._job.batches.per_epoch)
        seconds = self._step_times.finished(counts=batch.tokens == longest)
        made, self._made = self._made, COMPILED.made
        warm_up = COMPILED.made > made or done.first is not None
        speed = self._throughput.finished(batch.tokens, warm_up=warm_up)
        numbers = StepNumbers.of(done.step, loss, done.learning_rate, update.grad_norm, speed, seconds)
        self._telemetry.last = numbers
        self._compare_shares(engine, done.step, seconds if len(batch.input_ids) == batch.full else None)
        self._watchdog.heartbeat(done.step)
        self._skipped.update(done.step, done.loss, update)
        if engine.trace is not None:
            self._log.write(slots(done.step, engine.trace.take(done.step - 1 - self._done)))
        if done.step % self._job.config.log.logging_steps and done.step != self._job.total_steps:
            self._progress.advance(done.step)
            return
        speed = self._throughput.lap()
        event = events.Step(
            step=done.step,
            loss=loss,
            learning_rate=done.learning_rate,
            grad_norm=update.grad_norm,
            tokens=batch.tokens,
            supervised=batch.supervised,
            tokens_per_second=self._throughput.average() if speed is None else speed,
            skipped=update.skipped,
            warm_up=speed is None,
            compiled=COMPILED.count - self._compiled,
            epoch=done.step / self._job.batches.steps_per_epoch,
            skips=self._skipped.unreported,
        )
        self._compiled, self._skipped.unreported = COMPILED.count, 0
        self._log.write(event)
        self._progress.update(event)
        self._repeats.add(done.step, loss)

    def _compare_shares(self, engine: Engine, step: int, seconds: float | None) -> None:
        """Notice processes that are slower than the others. `seconds`: the duration of a step of equal shares."""
        before, self._starved = self._starved, engine.starved
        if seconds is not None:
            self._share_times.add(seconds - (self._starved - before))
        self._share_times.compare(step)

    def _after_step(self, engine: Engine, step: int) -> None:
        """Validate, pause, save and stop, as the config and commands say. If none of it is due, the step keeps running.

        Raises StopRequested or KeyboardInterrupt after a stop was saved.
        """
        job, last = self._job, step == self._last
        commands = self._commands()
        self._saver.poll()
        save = _is_due(step, job.config.save.save_steps)
        validate = job.validation is not None and (last or _is_due(step, job.config.train.eval_steps))
        if not (last or save or validate or commands):
            return
        with self._step_times.interrupted():
            began = time.perf_counter()
            self._report(engine)
            drained = time.perf_counter() - began
            with self._clock.paused():
                if validate:
                    self._validate(engine, step)
                last = step == self._last  # validation may end the run
                commands = self._commands()
                if commands.pauses:
                    commands = self._pause(engine, step)
                stop = commands.stops and not last
                if last or save or stop or commands.saves:
                    self._save(engine, step, required=last or stop, drained=drained)
        if stop:
            self._stop(step)

    def _validate(self, engine: Engine, step: int) -> None:
        """Record the validation loss. If early stopping ends the run, this step becomes the last one. The loss before
        training, of step 0, is only recorded.
        """
        assert self._job.validation is not None
        with self._session.doing("evaluating"):
            loss = validation.loss(engine, self._job.validation, partial(self._watchdog.heartbeat, step))
        loss, *_ = self._group.main.gather(loss)  # other CPUs may add in another order, and all must stop together
        self._validated = step, loss
        stopped = step > 0 and self._early_stopping.update(loss)
        if stopped:
            self._last = step
        evaluation = events.Evaluation(step, events.VALIDATION_LOSS, loss if math.isfinite(loss) else None)
        self._emit(evaluation)
        ending = ", no improvement: training ends" if stopped else ""
        self._progress.note(f"{evaluation.sentence()}{ending}")
        record_answers(self._session, step)
        self._watchdog.heartbeat(step)

    def _loss_after(self, step: int) -> float | None:
        """The validation loss, if it was evaluated after this step."""
        return self._validated[1] if self._validated[0] == step else None

    def _commands(self) -> Commands:
        """The commands to any of the processes."""
        return self._group.agreed(self._control.read())

    def _pause(self, engine: Engine, step: int) -> Commands:
        """Wait until the pause ends, and return the commands then. SAVE commands are obeyed meanwhile."""
        with self._session.doing("paused"):
            paused = events.Paused(step)
            self._log.write(paused)
            self._progress.note(paused.sentence())
            while (commands := self._commands()).pauses:
                if commands.saves:
                    self._save(engine, step, required=False)
                self._saver.poll()
                self._watchdog.heartbeat(step)
                time.sleep(POLL)
            self._log.write(events.Continued(step))
            return commands

    def _save(self, engine: Engine, step: int, *, required: bool, drained: float = 0.0) -> None:
        """Begin a checkpoint; wait for it if it is `required`. `drained`: see `Saver.begin`."""
        with self._session.doing("saving"):
            done = self._control.take() if self._control.saves else None
            loss = self._loss_after(step)
            meta = checkpoint_meta(self._job, self._frozen, self._early_stopping, loss)
            self._saver.begin(engine, step, meta, done, drained=drained)
            if required:
                self._saver.wait(required=True)
            self._watchdog.heartbeat(step)  # a save may take longer than engine.stall_timeout

    def _stop(self, step: int) -> None:
        """End the run after a checkpoint: KeyboardInterrupt for a signal, otherwise StopRequested.

        A process that only another one's signal stops ends as after STOP: torchrun does not start it again.
        """
        PROCESS.check()
        self._control.stopped()
        raise StopRequested(f"stopped after step {step}")

    # ---- engine and plan

    @contextmanager
    def _open_engine(self, *, meter: Meter | None = None) -> Iterator[Engine]:
        """Open an engine for the steps after `_done`, monitored by a watchdog and the telemetry."""
        job = self._job
        with phase("opening the devices", unit=""):
            engine = open_engine(
                job,
                self._store,
                self._optimizer,
                Observers(job.config.engine.trace, meter, watched=True),
                self._session.shared,
            )
        self._starved = 0.0
        if (locking := engine.locking).missing and not self._locking_noted:
            self._emit(events.MemoryNotLocked(locking.locked, locking.copied, locking_advice()))
            self._locking_noted = True
        telemetry, watchdog = self._telemetry, self._watchdog
        with (
            engine,
            watchdog.waiting(engine.waiting),
            watchdog.doing("training"),
            telemetry.watching(engine, self._done),
        ):
            try:
                yield engine
            except BaseException as error:
                self._end.record(error)  # before the engine closes, which may take long or hang
                raise

    def _leave(self, engine: Engine) -> None:
        """Prepare to open another engine for the steps after the last one."""
        self._saver.wait()  # the next engine's updates would not wait for this save
        self._done = self._next
        self._optimizer = replace(self._optimizer, applied=engine.applied, loss_scale=engine.loss_scale)

    def _use(self, job: Job) -> None:
        """Use the job's plan for the next engine."""
        self._job = job
        record_plan(self._log, job)

    def _keep(self, candidate: Candidate | None) -> None:
        """Record the measured times of a plan that stays in use, for later plans."""
        if candidate is not None:
            self._log.check()
            candidate.timings.save(self._session.begun.records.path)

    def _learning_rate(self, step: int) -> float:
        optim, total = self._job.config.optim, self._job.total_steps
        kind, warmup = optim.lr_scheduler_type, optim.warmup_steps
        return learning_rate(step, base=optim.learning_rate, kind=kind, warmup_steps=warmup, total_steps=total)

    # ---- start and end of the run

    def _load(self, checkpoint: Path | None) -> None:
        """Fill the store with the initial weights, or with the state of the checkpoint."""
        self._frozen = load_weights(self._job, self._store, resumed=checkpoint is not None)
        if checkpoint is None:
            if self._group.size > 1:
                self._group.check_equal({"weights": initial_hashes(self._store, self._frozen)})
            return
        checkpoint, state = restore(
            self._run, checkpoint, self._job, self._store.units, self._frozen, self._emit, self._group.main
        )
        self._emit(events.Resumed(state["step"], str(checkpoint)))
        meta = state["meta"]
        self._done = state["step"]
        self._optimizer = replace(self._optimizer, applied=meta["applied"])
        self._repeats = RepeatedSteps(self._earlier, self._done, self._emit)
        if (kept := meta.get("validation")) is not None:
            self._early_stopping = replace(self._early_stopping, best=kept["best"], bad=kept["bad"])
            self._validated = self._done, kept["loss"]
        if (scale := meta.get("loss_scale")) is not None:
            self._optimizer = replace(self._optimizer, loss_scale=replace(self._optimizer.loss_scale, **scale))

    def _ask_questions(self, step: int) -> None:
        """Record how many held-out questions (`eval.questions`) the model answers exactly, with samples."""
        count = self._job.config.eval.questions
        if not count:
            return
        with self._session.doing("evaluating"), self._group.main.together():
            if not self._group.first:
                return
            job = self._job
            with phase("answering the held-out questions", unit=""):
                scores, shown = ask_questions(job.spec, self._store.weights, job.tokenizer, count, job.eos_ids)
        overall = scores.pop("overall")
        self._log.write(events.Evaluation(step, "exact_match", overall, scores))
        for prompt, text in shown:
            self._log.write(events.Sample(step, prompt, text))
        each = ", ".join(f"{name} {format_score(score)}" for name, score in scores.items())
        when = "before training" if step == 0 else f"after {counted(step, 'step')}"
        self._progress.note(f"{count} held-out questions, {when}: {format_score(overall)} answered exactly ({each})")

    def _export(self, step: int, loss: float | None) -> None:
        """Exports the model, which has the state after this step, with this validation loss."""
        job = self._job
        self._log.check()
        with self._session.doing("exporting"), self._group.main.together():
            if not self._group.first:
                return
            base = self._run.checkpoints()[-1] / BASE
            view = lru_cache(maxsize=1)(self._store.view)  # reads a file-backed parameter once, not for each tensor
            carried = NOTHING
            if job.files is not None and self._frozen is not None:
                carried = Carried(job.files.carried, self._frozen.get("carried", {}))
            model = ModelInMemory(
                view,
                job.spec,
                adapter=job.adapter,
                base_weights=(self._frozen or {}).get("stored", {}),
                carried=carried,
                ends=job.ends,
                chat_template=job.chat_template,
                step=step,
                loss=loss,
            )
            export_store(model, base, self._run.model_path, job.config.model.dtype)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
