"""Log metrics to TensorBoard, Weights & Biases and Trackio. A tracker is imported only if it is used."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from rptrain.config.schema import Config
from rptrain.runs.events import Evaluation, Event, Step, TrackerFailed
from rptrain.runs.run_dir import RunDir
from rptrain.utils.errors import UserError, describe

MODULES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}

Log = Callable[[Mapping[str, float], int], None]  # values by metric name; step
Close = Callable[[], object]

_log = logging.getLogger(__name__)


def check(names: Sequence[str]) -> None:
    """UserError if a tracker is not installed."""
    for name in names:
        if find_spec(MODULES[name]) is None:
            raise UserError(
                f'log.report_to names "{name}", but {MODULES[name]} is not installed: pip install "rptrain[{name}]", '
                "or remove it from log.report_to"
            )


def open_trackers(
    config: Config, run: RunDir, stack: ExitStack, emit: Callable[[Event], None]
) -> Callable[[Event], None]:
    """Open the trackers of log.report_to. Returns a listener that logs the metrics of events to them.

    Call `check` first. The stack closes the trackers. If a tracker raises an error, TrackerFailed is emitted and the
    tracker is disabled; training continues.
    """
    logs: dict[str, Log] = {}

    def close(name: str, call: Close) -> None:
        if reason := _error_of(call):  # not an event: the run's last one is written already
            _log.warning("%s could not be closed: %s", name, reason)

    for name in config.log.report_to:
        logs[name], end = OPENERS[name](import_module(MODULES[name]), config, run)
        stack.callback(close, name, end)

    def report(event: Event) -> None:
        if (values := scalars(event)) is not None:
            for name, log in list(logs.items()):
                if reason := _error_of(partial(log, *values)):
                    del logs[name]
                    emit(TrackerFailed(name, reason))

    return report


def _error_of(call: Callable[[], object]) -> str | None:
    """What a call of a tracker raised, if anything."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 (third-party code that talks to servers may raise anything)
        return describe(error, with_type=True)
    return None


def scalars(event: Event) -> tuple[dict[str, float], int] | None:
    """The metrics of an event and its step; None if it has none."""
    match event:
        case Step():
            found = {
                "train/loss": event.loss,
                "train/grad_norm": event.grad_norm,
                "train/learning_rate": event.learning_rate,
                "train/tokens_per_second": event.tokens_per_second,
            }
            return {name: value for name, value in found.items() if value is not None}, event.step
        case Evaluation():
            scores = {} if event.score is None else {f"eval/{event.name}": event.score}
            return scores | {f"eval/{event.name}/{name}": score for name, score in event.tasks.items()}, event.step
    return None


def _tensorboard(module: Any, config: Config, run: RunDir) -> tuple[Log, Close]:
    """Writes to the run's folder; view it with `tensorboard --logdir`."""
    writer = module.SummaryWriter(logdir=str(run.path / "tensorboard"))

    def log(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def _wandb(module: Any, config: Config, run: RunDir) -> tuple[Log, Close]:
    """The run id is derived from the run's folder, so that a resumed run continues the same one."""
    identity = sha256(str(run.path.absolute()).encode()).hexdigest()[:16]
    settings = config.model_dump(mode="json")
    opened = module.init(
        project=config.log.project, name=run.path.name, dir=str(run.path), id=identity, resume="allow", config=settings
    )
    return lambda values, step: opened.log(dict(values), step=step), opened.finish


def _trackio(module: Any, config: Config, run: RunDir) -> tuple[Log, Close]:
    settings = config.model_dump(mode="json")
    module.init(project=config.log.project, name=run.path.name, config=settings, resume="allow")
    return lambda values, step: module.log(dict(values), step=step), module.finish


OPENERS = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}
