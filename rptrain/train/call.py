"""Train from Python, as `rptrain train` does, in a process that is not ours: a script or a notebook."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rptrain.config.resolve import Resolved
from rptrain.config.schema import Config
from rptrain.utils.allocator import keep_allocator_tidy
from rptrain.utils.errors import UserError
from rptrain.utils.signals import PROCESS

if TYPE_CHECKING:
    from rptrain.runs.records.events import Event


@dataclass(frozen=True)
class TrainResult:
    """How a run ended, and what it has written."""

    run: Path  # the run's folder
    model: Path | None  # a Hugging Face directory; None if the run was stopped
    ended: Literal["finished", "stopped"]
    steps: int  # that are done, with those before it was resumed
    loss: float | None  # of the last reported step
    evaluation: Mapping[str, float | None]  # the newest by name, "loss" of the validation set; None: not finite


def train(config: Config, on_event: "Callable[[Event], None] | None" = None, *, progress: bool = True) -> TrainResult:
    """Train a config, or resume the run that `save.resume` selects, as `rptrain train` does. Returns when it has ended.

    `on_event` is called with each record of the run (rptrain/runs/records/events.py), in one of its threads: it should
    return soon and raise nothing. `progress`: print the head of the run and its progress.

    The first interrupt (Ctrl-C, or the stop button of a notebook) saves a checkpoint and raises KeyboardInterrupt; the
    second one raises it at once. Interrupts arrive in the main thread only: from another one, create the file
    `control/STOP` in the run's folder.

    Raises UserError for mistakes in the config, before anything large is loaded; TrainingError or EngineError if
    training fails, after which the last checkpoint remains.
    """
    resolved = Resolved.of(config)
    keep_allocator_tidy()
    with PROCESS.handled(third_ends=False):
        with PROCESS.importing():
            from rptrain.runs.view.run_view import RunView
            from rptrain.train.mistakes import with_others
            from rptrain.train.run import train as run

        try:
            trained = run(resolved, quiet=not progress, on_event=on_event)
        except UserError as error:
            raise with_others(resolved, error) from None
    view = RunView(trained.path)
    return TrainResult(
        trained.path,
        trained.model_path if trained.finished else None,
        "finished" if trained.finished else "stopped",
        view.step,
        view.loss,
        {score.name: score.score for score in view.results.scores},
    )
