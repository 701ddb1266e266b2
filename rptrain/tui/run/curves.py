"""The curves of a run by step and over time: those that fit, or one; smoothed; with the values at a cursor."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite

from textual.app import ComposeResult
from textual.containers import Horizontal, VerticalScroll

from rptrain.runs.records.events import VALIDATION_LOSS
from rptrain.runs.view.process_view import ENDED
from rptrain.runs.view.run_view import RunView
from rptrain.runs.view.series import smoothed, thinned
from rptrain.runs.view.usage import BUCKET, warming_up
from rptrain.tui.run.memory_panel import MemoryPanel
from rptrain.tui.widgets.plot import POINTS, Curve, Plot
from rptrain.utils.units import format_bytes, format_duration, format_loss, format_percent, format_short, format_speed

PAUSE = 1.0  # seconds between two drawings of growing curves
LEAST_RANGE = 0.1  # of curves over time: speed and memory vary a little without a reason
HINT, IN_REPLAY = "l next · m smooth · ← → values", "l next · m smooth · ← → seek"


def _by_step(column: str, style: str, view: RunView) -> Sequence[Curve]:
    return (Curve(view.steps.column("step"), view.steps.column(column), style),)


def _losses(view: RunView) -> Sequence[Curve]:
    scores = [score for score in view.results.scores if score.name == VALIDATION_LOSS and score.score is not None]
    training = Curve(view.steps.column("step"), view.steps.column("loss"), "$loss", "training" if scores else "")
    if not scores:
        return (training,)
    xs, ys = [score.step for score in scores], [score.score or 0.0 for score in scores]
    return training, Curve(xs, ys, "$warning", "validation")


def _over_time(column: str, style: str, view: RunView) -> Sequence[Curve]:
    times, ys = view.usage.curve(column, view.recent)
    return (Curve([view.training_time.at(time) for time in times], ys, style),)


def _speeds(view: RunView) -> Sequence[Curve]:
    """The speed, whose slow first steps after a start or a resume do not set the axis."""
    times, ys = view.usage.curve("tokens_per_second", view.recent)
    xs = [view.training_time.at(time) for time in times]
    outside = frozenset(xs[index] for index in warming_up(view.training_time.starts, times, ys))
    return (Curve(xs, ys, "$success", outside=outside),)


@dataclass(frozen=True)
class Kind:
    """A plot of a run. `read`: its curves from a view, the main one first."""

    id: str
    title: str
    read: Callable[[RunView], Sequence[Curve]]
    format: Callable[[float], str] = format_short
    timed: bool = False  # over the time of training, not by step
    bounds: tuple[float, float] | None = None  # of the axis
    value: Callable[[RunView], float | None] | None = None  # the newest, as the head has it; None: of the main curve

    def text(self, value: float | None) -> str:
        return "" if value is None else self.format(value)


KINDS = (
    Kind("loss", "loss", _losses, format_loss, value=lambda view: view.loss),
    Kind(
        "learning-rate",
        "learning rate",
        partial(_by_step, "learning_rate", "$muted"),
        value=lambda view: None if view.latest is None else view.latest.learning_rate,
    ),
    Kind(
        "grad-norm",
        "gradient norm",
        partial(_by_step, "grad_norm", "$backward"),
        value=lambda view: None if view.latest is None else view.latest.grad_norm,
    ),
    Kind("speed", "tokens/s", _speeds, format_speed, timed=True),
    Kind(
        "busy", "device utilization", partial(_over_time, "busy", "$fused"), format_percent, timed=True, bounds=(0, 1)
    ),
    Kind("vram", "memory of the fullest GPU", partial(_over_time, "vram", "$forward"), format_bytes, timed=True),
    Kind("host", "host memory", partial(_over_time, "host", "$primary"), format_bytes, timed=True),
    Kind("power", "power of all GPUs", partial(_over_time, "power", "$warning"), "{:,.0f} W".format, timed=True),
)


class Curves(Horizontal):
    """The plots, and the panel of memory beside them."""

    def __init__(self) -> None:
        super().__init__(id="middle")
        self._view: RunView | None = None
        self._state = ""
        self._drawn: tuple[object, ...] = ()  # what the curves were drawn from
        self._when = 0.0
        self._later = False  # whether a drawing is due
        self._smooth = False
        self.chosen: Kind | None = None  # None: all that fit

    def compose(self) -> ComposeResult:
        for kind in KINDS:
            plot = Plot(kind.title, logarithmic=kind.id == "loss", id=kind.id)
            plot.set_class(not kind.timed, "-by-step")
            plot.format_value = kind.format
            if kind.timed:
                plot.format_x, plot.format_y = format_duration, kind.format
                plot.bounds, plot.least_range = kind.bounds, LEAST_RANGE
            yield plot
        with VerticalScroll(id="memory"):
            yield MemoryPanel()

    def show(self, view: RunView, state: str) -> None:
        """Draws the curves of a view, unless nothing is new or the last drawing was just made. `state` is the view's,
        or "replay".
        """
        self._state = state
        self.query_one(MemoryPanel).show(view, ended=state in ENDED)
        for kind in KINDS:
            if kind.value is not None:
                self._plot(kind).tell(kind.text(kind.value(view)), self._hint(kind))
        now = asyncio.get_running_loop().time()
        timed = view.recent[-1].time // BUCKET if view.recent and self.chosen is not None and self.chosen.timed else 0
        source = (view, len(view.steps), len(view.results.scores), timed)
        grown = self._drawn[:1] == (view,) and len(view.steps) > 1
        if source == self._drawn:
            return
        if grown and now - self._when < PAUSE:
            if not self._later:
                self._later = True
                self.set_timer(PAUSE, self._catch_up)
        else:
            self._drawn, self._when, self._view = source, now, view
            self._draw(view)

    def _catch_up(self) -> None:
        """Draws what was too soon to draw, if nothing else did: a run may have ended."""
        self._later = False
        if self._view is not None:
            self.show(self._view, self._state)

    def turn(self) -> None:
        """Shows the next plot that has points alone, and after the last one all that fit."""
        later = KINDS if self.chosen is None else KINDS[KINDS.index(self.chosen) + 1 :]
        self.choose(next((kind for kind in later if self._has_points(kind)), None))

    def choose(self, kind: Kind | None) -> None:
        """Shows a plot alone; None: all that fit."""
        self.chosen = kind
        self.screen.set_class(kind is not None, "-one-curve")
        for one in KINDS:
            plot = self._plot(one)
            plot.set_class(one == kind, "-chosen")
            plot.hint, plot.cursor = self._hint(one), None
        if self._view is not None:
            self._draw(self._view)

    def smooth(self) -> None:
        """Smooths the curves, or no longer; their titles say so."""
        self._smooth = not self._smooth
        if self._view is not None:
            self._draw(self._view)

    def move(self, columns: int) -> None:
        """Moves the cursor of the chosen plot; without one it appears at the end."""
        if self.chosen is not None:
            self._plot(self.chosen).move(columns)

    def on_plot_clicked(self, event: Plot.Clicked) -> None:
        """A click on a plot shows it alone; another one places its cursor."""
        event.stop()
        kind = next(kind for kind in KINDS if kind.id == event.plot.id)
        if self.chosen is None:
            self.choose(kind)
        else:
            event.plot.cursor = 0
            event.plot.move(event.column)

    def _draw(self, view: RunView) -> None:
        for kind in KINDS:
            if kind == self.chosen or (self.chosen is None and not kind.timed):
                main, *others = kind.read(view)
                value = kind.value(view) if kind.value else next((y for y in reversed(main.ys) if isfinite(y)), None)
                if self._smooth:
                    others = (replace(main, style="$faint", name="", valued=False), *others)
                    xs, ys = smoothed(main.xs, main.ys)
                    main = replace(main, xs=xs, ys=ys)
                self._plot(kind).note = "smoothed" if self._smooth else ""
                self._plot(kind).show(tuple(map(_thin, (*others, main))), kind.text(value))

    def _has_points(self, kind: Kind) -> bool:
        return self._view is not None and any(isfinite(y) for y in kind.read(self._view)[0].ys)

    def _hint(self, kind: Kind) -> str:
        return "" if kind != self.chosen else IN_REPLAY if self._state == "replay" else HINT

    def _plot(self, kind: Kind) -> Plot:
        return self.query_one(f"#{kind.id}", Plot)


def _thin(curve: Curve) -> Curve:
    xs, ys = thinned(curve.xs, curve.ys, POINTS)
    return replace(curve, xs=xs, ys=ys)
