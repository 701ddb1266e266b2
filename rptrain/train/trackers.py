"""Log metrics, answers and the config to TensorBoard, Weights & Biases and Trackio. A tracker is imported only if it is
used.
"""

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha256
from importlib import import_module
from types import TracebackType
from typing import Any, Self

from rptrain.config.schema import Config
from rptrain.preflight.checks import TRACKERS
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records.events import Evaluation, Event, Sample, Step, TrackerFailed
from rptrain.utils.errors import describe
from rptrain.utils.liveness import progressed
from rptrain.utils.paths import inside

Values = Mapping[str, float | Sample]  # by metric name
Log = Callable[[Values, int], None]  # values; step
Close = Callable[[], object]
GLOBAL_STEP = "train/global_step"  # at W&B: the step, as transformers names it
FLUSH = 1.0  # seconds after which figures are in TensorBoard's file: a process that is killed loses the later ones
POLL = 0.02  # seconds between two checks of a tracker that is waited for


class Trackers:
    """The trackers of log.report_to, each on a thread of its own: one that fails or hangs is disabled, with a
    TrackerFailed, and training continues.

    Context manager; call `check_trackers` first. `patience`: the most seconds that anything waits for a tracker. One
    that takes longer for a call has failed.
    """

    def __init__(self, config: Config, run: RunDir, emit: Callable[[Event], None], patience: float) -> None:
        self._prompts = config.log.sample_prompts
        openers = {name: partial(OPENERS[name], config, run) for name in config.log.report_to}
        self._trackers = [_Tracker(name, opener, emit, patience) for name, opener in openers.items()]
        for tracker in self._trackers:
            tracker.opened()

    def hear(self, event: Event) -> None:
        """A listener of the run's records: logs their metrics and answers."""
        if (values := self._values(event)) is not None:
            for tracker in self._trackers:
                tracker.log(*values)

    def _values(self, event: Event) -> tuple[Values, int] | None:
        if not isinstance(event, Sample):
            return scalars(event)
        if event.prompt not in self._prompts:  # an answer to one of eval.questions
            return None
        return {f"samples/{self._prompts.index(event.prompt) + 1}": event}, event.step

    def close(self) -> None:
        """Close the trackers, once they have logged everything."""
        trackers, self._trackers = self._trackers, []
        for tracker in trackers:
            tracker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _Tracker:
    """One tracker and its thread, which is left behind if it hangs."""

    def __init__(
        self, name: str, opener: Callable[[Any], tuple[Log, Close]], emit: Callable[[Event], None], patience: float
    ) -> None:
        self._name, self._opener, self._emit, self._patience = name, opener, emit, patience
        self._failed = False
        self._lock = threading.Lock()
        self._began: float | None = None  # when its current call began
        self._opened = threading.Event()
        self._queue: queue.SimpleQueue[tuple[Values, int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def opened(self) -> None:
        """Wait until the tracker is open: it may ask the user something."""
        if not self._wait(self._opened.is_set):
            self._fail(f"did not open within {self._patience:g} seconds")

    def log(self, values: Values, step: int) -> None:
        began = self._began
        if self._failed:
            return
        if began is not None and time.monotonic() - began > self._patience:
            self._fail(f"did not answer within {self._patience:g} seconds")
            return
        self._queue.put((values, step))

    def close(self) -> None:
        if self._failed:
            return
        self._queue.put(None)
        if not self._wait(lambda: not self._thread.is_alive()):
            self._fail(f"did not close within {self._patience:g} seconds")

    def _wait(self, ended: Callable[[], bool]) -> bool:
        """Wait while the tracker makes progress, and return whether it ended."""
        until, left = time.monotonic() + self._patience, self._queue.qsize()
        while not ended():
            if self._queue.qsize() < left:
                until, left = time.monotonic() + self._patience, self._queue.qsize()
            if time.monotonic() > until:
                return False
            progressed()  # the run waits on purpose
            time.sleep(POLL)
        return True

    def _main(self) -> None:
        try:
            self._began = time.monotonic()
            log, close = self._opener(import_module(TRACKERS[self._name]))
            self._opened.set()
            while True:
                self._began = None
                item = self._queue.get()
                self._began = time.monotonic()
                if item is None:
                    break
                log(*item)
            close()
        except BaseException as error:  # noqa: BLE001 (third-party code that talks to servers may raise anything)
            self._fail(describe(error, with_type=True))
        finally:
            self._opened.set()

    def _fail(self, reason: str) -> None:
        with self._lock:
            before, self._failed = self._failed, True
        if not before:
            self._emit(TrackerFailed(self._name, reason))


def scalars(event: Event) -> tuple[dict[str, float], int] | None:
    """The metrics of an event, under the names that transformers' Trainer gives them, and its step; None if it has
    none.
    """
    match event:
        case Step():
            found = {
                "train/loss": event.loss,
                "train/grad_norm": event.grad_norm,
                "train/learning_rate": event.learning_rate,
                "train/epoch": event.epoch,
                "train/tokens_per_second": None if event.warm_up else event.tokens_per_second,
            }
            return {name: value for name, value in found.items() if value is not None}, event.step
        case Evaluation():
            scores = {} if event.score is None else {f"eval/{event.name}": event.score}
            return scores | {f"eval/{event.name}/{name}": score for name, score in event.tasks.items()}, event.step
    return None


def _tensorboard(config: Config, run: RunDir, module: Any) -> tuple[Log, Close]:
    """Writes to the run's folder; view it with `tensorboard --logdir`. A resumed run hides what was logged after its
    checkpoint, and logs it again.
    """
    logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)  # it warns of NaN, which lines of steps show
    saved = run.saved_step
    purge = {"purge_step": saved + 1} if saved else {}
    writer = module.SummaryWriter(logdir=str(inside(run.path, "tensorboard")), flush_secs=FLUSH, **purge)
    writer.add_text("config", _code(json.dumps(_settings(config), indent=2)), saved)

    def log(values: Values, step: int) -> None:
        for name, value in values.items():
            if isinstance(value, Sample):
                writer.add_text(name, f"{_code(value.prompt)}\n\nanswer:\n\n{_code(value.text)}", step)
            else:
                writer.add_scalar(name, value, step)

    return log, writer.close


def _wandb(config: Config, run: RunDir, module: Any) -> tuple[Log, Close]:
    """The run id is derived from the run's folder, so that a resumed run continues the same one.

    The step is a metric, as transformers logs it: W&B drops values of its own steps that come again or late, such as
    those of a resumed run, and scores of the best checkpoint.
    """
    identity = sha256(str(run.path.absolute()).encode()).hexdigest()[:16]
    inside(run.path, "wandb")  # it is created there
    opened = module.init(
        project=config.log.project,
        name=run.path.name,
        dir=str(run.path),
        id=identity,
        resume="allow",
        config=_settings(config),
    )
    opened.define_metric(GLOBAL_STEP)
    opened.define_metric("*", step_metric=GLOBAL_STEP, step_sync=True)

    def log(values: Values, step: int) -> None:
        opened.log(_with_tables(values, module) | {GLOBAL_STEP: step})

    return log, opened.finish


def _trackio(config: Config, run: RunDir, module: Any) -> tuple[Log, Close]:
    module.init(project=config.log.project, name=run.path.name, config=_settings(config), resume="allow")
    return lambda values, step: module.log(_with_tables(values, module), step=step), module.finish


def _settings(config: Config) -> dict[str, Any]:
    return config.model_dump(mode="json")


def _with_tables(values: Values, module: Any) -> dict[str, Any]:
    """The values, with a table for each answer."""
    return {
        name: module.Table(columns=["step", "prompt", "answer"], data=[[value.step, value.prompt, value.text]])
        if isinstance(value, Sample)
        else value
        for name, value in values.items()
    }


def _code(text: str) -> str:
    """Text that Markdown shows as it is."""
    return "\n".join(f"    {line}" for line in text.split("\n"))


OPENERS = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}
