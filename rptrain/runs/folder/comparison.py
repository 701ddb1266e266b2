"""Runs side by side: curves of a metric, their results, and the settings that differ."""

import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rptrain.config.errors import dotted, leaves
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records.events import VALIDATION_LOSS
from rptrain.runs.view.run_view import RunView
from rptrain.runs.view.series import thinned
from rptrain.utils.errors import UserError
from rptrain.utils.text import printable
from rptrain.utils.units import DASH, format_duration, format_loss, format_score, format_speed

if TYPE_CHECKING:
    from rich.console import Console

Axis = Literal["steps", "tokens", "time"]
AXES: tuple[Axis, ...] = ("steps", "tokens", "time")
VALIDATION = "validation loss"
METRICS = {  # their columns in `Steps`; the validation loss is in the scores
    "loss": "loss",
    VALIDATION: None,
    "gradient norm": "grad_norm",
    "learning rate": "learning_rate",
    "tokens/s": "tokens_per_second",
}
WHERE = ("data.cache_dir", "data.max_bad_rows")  # settings of the data that do not change it
NAMES = ("log.run_name", "save.output_dir", "save.resume")  # settings that always differ


@dataclass(frozen=True)
class Row:
    """What is compared, with a value for each run. `best`: the index of the best one, if there is one."""

    name: str
    values: tuple[str, ...]
    best: int | None = None


def curve(view: RunView, metric: str, axis: Axis, count: int) -> tuple[list[float], list[float]]:
    """At most `count` points of a metric (of METRICS) over the steps, the tokens (padding included) or the seconds of
    training. Breaks and pauses of the training take no time.
    """
    import numpy as np

    places = _places(view, axis)
    if metric == "tokens/s":
        return thinned(places, _speeds(view), count)
    if (column := METRICS[metric]) is not None:
        return thinned(places, view.steps.column(column), count)
    scores = [(score.step, score.score) for score in view.results.scores if score.name == VALIDATION_LOSS]
    xs = np.interp([step for step, _ in scores], [0.0, *view.steps.column("step")], [0.0, *places]).tolist()
    return thinned(xs, [np.nan if score is None else score for _, score in scores], count)


def _speeds(view: RunView) -> Sequence[float]:
    """The speed of each reported step, NaN for the first one of each process, which is slow, if others are known."""
    speeds, times = view.steps.column("tokens_per_second"), view.steps.column("time")
    first = {bisect_right(times, start) for start in view.training_time.starts}
    known = [nan if index in first else speed for index, speed in enumerate(speeds)]
    return speeds if all(map(isnan, known)) else known


def _places(view: RunView, axis: Axis) -> Sequence[float]:
    """Where each reported step is on the axis. Steps without a report count as the next one that has a report."""
    import numpy as np

    steps = view.steps.column("step")
    if axis == "steps":
        return steps
    each = np.array(view.steps.column("tokens"))
    if axis == "time":
        speeds = np.array(view.steps.column("tokens_per_second"))
        each = np.divide(each, speeds, out=np.zeros_like(each), where=speeds > 0)
    return np.cumsum(np.diff(np.array(steps), prepend=0.0) * each).tolist()


def results(views: Sequence[RunView]) -> list[Row]:
    """The state, steps, losses, scores and speed of each run; the best loss and scores. The highest speed is not marked
    as best: it depends on the settings.
    """
    rows = [
        Row("state", tuple(view.state for view in views)),
        Row("steps", tuple(f"{view.step:,}" for view in views)),
        Row("training time", tuple(format_duration(view.seconds(time.time())) for view in views)),
        Row("last loss", tuple(format_loss(view.loss) for view in views)),
        Row("median of last losses", tuple(format_loss(_final_loss(view)) for view in views)),
        *_lowest_losses(views),
    ]
    names = dict.fromkeys(
        score.name for view in views for score in view.results.scores if score.name != VALIDATION_LOSS
    )
    rows += [_ranked(name, [_newest(view, name) for view in views], format_score, max) for name in names]
    rows.append(Row("tokens/s", tuple(format_speed(view.tokens_per_second) for view in views)))
    return [row for row in rows if set(row.values) != {DASH}]


def differences(runs: Sequence[Path]) -> list[Row]:
    """The settings that differ between runs, those of a config that cannot be read left out. Paths as in the configs.

    Values that are not set, and sections that a run does not have, are a dash.
    """
    settings = [_settings(run, _written(run)) for run in runs]
    known = [values for values in settings if values is not None]
    keys = dict.fromkeys(key for values in known for key in values)
    return [
        Row(key, tuple("" if values is None else values.get(key, DASH) for values in settings))
        for key in keys
        if key not in NAMES and len({values.get(key, DASH) for values in known}) > 1
    ]


def comparable(rows: Sequence[Row]) -> bool:
    """Whether losses of runs with these differences are of the same data."""
    return not any(row.name.startswith(("data.", "model.path")) and row.name not in WHERE for row in rows)


def show(views: Sequence[RunView], console: "Console") -> None:
    """Prints the results of runs and the settings that differ, with a column for each run."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in ("", *(view.path.name for view in views)):
        table.add_column(Text(printable(name)), overflow="fold")
    different = differences([view.path for view in views])
    for row in results(views):
        best = (f"{value} (best)" if row.best == place else value for place, value in enumerate(row.values))
        table.add_row(*(Text(printable(text)) for text in (row.name, *best)))
    table.add_row()
    table.add_row(Text("settings that differ" if different else "no settings differ", "bold"))
    for row in different:
        table.add_row(*(Text(printable(text)) for text in (row.name, *row.values)))
    console.print(table)
    if not comparable(different):
        console.print("The data or the models differ: the losses may not be comparable.")


def _written(run: Path) -> tuple[int, int]:
    """What changes when the config is written again."""
    try:
        status = RunDir(run).config_path.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


@lru_cache(maxsize=64)
def _settings(run: Path, written: tuple[int, int]) -> Mapping[str, str] | None:
    """The values of a run's config as text, by dotted key; None if it cannot be read."""
    try:
        config = RunDir(run).config().model_dump(mode="json")
    except (UserError, OSError):
        return None
    return {dotted(key): text for key in leaves(config) if (text := _text(_value(config, key))) != DASH}


def _value(values: Any, key: Sequence[str | int]) -> Any:
    for part in key:
        values = values[part]
    return values


def _text(value: Any) -> str:
    match value:
        case None:
            return DASH
        case bool():
            return str(value).lower()
        case list() | tuple():
            return ", ".join(map(_text, value)) or DASH
        case float():
            return f"{value:g}"
        case _:
            return str(value)


def _ranked(name: str, values: Sequence[float | None], form: Any, best: Any) -> Row:
    known = [value for value in values if value is not None]
    first = best(known) if len(set(known)) > 1 else None
    return Row(name, tuple(map(form, values)), None if first is None else values.index(first))


def _final_loss(view: RunView) -> float | None:
    return None if view.loss_change is None else view.loss_change.last


def _lowest_losses(views: Sequence[RunView]) -> Iterator[Row]:
    """With their steps: of runs of different lengths, the best is often the longest."""
    lowest = [view.results.best for view in views]
    yield _ranked("lowest validation loss", [best and best.score for best in lowest], format_loss, min)
    yield Row("  at step", tuple(DASH if best is None else f"{best.step:,}" for best in lowest))


def _newest(view: RunView, name: str) -> float | None:
    return next(iter([*_scores(view, name)][::-1]), None)


def _scores(view: RunView, name: str) -> Iterator[float]:
    return (score.score for score in view.results.scores if score.name == name and score.score is not None)
