"""A run's numbers for TensorBoard, Weights & Biases and Trackio; each is imported only where it is asked for."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from rptrain.config import Config
from rptrain.errors import UserError
from rptrain.metrics import Evaluation, Event, Step
from rptrain.rundir import RunDir

MODULES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}

Log = Callable[[Mapping[str, float], int], None]  # values by name, and the step


def check(names: Sequence[str]) -> None:
    """UserError that names the first tracker which is not installed."""
    for name in names:
        if find_spec(MODULES[name]) is None:
            raise UserError(
                f'log.report_to names "{name}", but {MODULES[name]} is not installed: pip install "rptrain[{name}]", '
                "or take it out"
            )


def open_trackers(config: Config, run: RunDir, stack: ExitStack) -> Callable[[Event], None]:
    """What passes records on to the trackers of log.report_to, which are closed with the stack. After `check`."""
    logs = [OPENERS[name](import_module(MODULES[name]), config, run, stack) for name in config.log.report_to]

    def report(event: Event) -> None:
        if (values := scalars(event)) is not None:
            for log in logs:
                log(*values)

    return report


def scalars(event: Event) -> tuple[dict[str, float], int] | None:
    """The numbers of a record, with its step; None where it has none to plot."""
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
            tasks = {f"eval/{event.name}/{name}": score for name, score in event.tasks.items()}
            return {f"eval/{event.name}": event.score} | tasks, event.step
    return None


def _tensorboard(module: Any, config: Config, run: RunDir, stack: ExitStack) -> Log:
    """Files in the run's folder, for `tensorboard --logdir`."""
    writer = module.SummaryWriter(logdir=str(run.path / "tensorboard"))
    stack.callback(writer.close)

    def log(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return log


def _wandb(module: Any, config: Config, run: RunDir, stack: ExitStack) -> Log:
    """A resumed run goes on under the identity that follows from its folder."""
    identity = sha256(str(run.path.absolute()).encode()).hexdigest()[:16]
    settings = config.model_dump(mode="json")
    opened = module.init(
        project=config.log.project, name=run.path.name, dir=str(run.path), id=identity, resume="allow", config=settings
    )
    stack.callback(opened.finish)
    return lambda values, step: opened.log(dict(values), step=step)


def _trackio(module: Any, config: Config, run: RunDir, stack: ExitStack) -> Log:
    settings = config.model_dump(mode="json")
    module.init(project=config.log.project, name=run.path.name, config=settings, resume="allow")
    stack.callback(module.finish)
    return lambda values, step: module.log(dict(values), step=step)


OPENERS = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}
