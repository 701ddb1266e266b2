"""The plan of a draft: whether it fits, the duration of a step, and the use of memory."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from textual.content import Content
from textual.geometry import Size
from textual.reactive import reactive
from textual.widget import Widget

from rptrain.tui.new_run.planning import Planned
from rptrain.tui.new_run.setting_text import with_labels
from rptrain.tui.widgets.bars import bar
from rptrain.utils.text import as_message
from rptrain.utils.units import (
    format_about,
    format_bytes,
    format_count,
    format_duration,
    format_epochs,
    format_percent,
    format_seconds,
    format_speed,
)

PARTS = 5  # parts of a place to show, the largest first


class PlanPanel(Widget):
    """Shows mistakes, and the plan, or with mistakes the plan before them.

    `busy` marks an outdated plan; `starts`: the run starts when the new one is ready; `detailed` lists the parts of
    memory.
    """

    planned: reactive[Planned | None] = reactive(None, layout=True)
    problem: reactive[str] = reactive("", layout=True)
    note: reactive[str] = reactive("", layout=True)  # about the name of the run
    busy: reactive[bool] = reactive(False)
    starts: reactive[bool] = reactive(False, layout=True)
    detailed: reactive[bool] = reactive(False, layout=True)

    @property
    def refusal(self) -> str:
        """Why a run that does not fit the shown plan is not started."""
        if self.problem:
            return self.problem
        if self.planned is not None and not self.planned.too_large:
            return "the plan says what would refuse the run"
        return "the run does not fit; the plan lists changes that make it fit"

    def render(self) -> Content:
        return self._text(self.size.width)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return self._text(width).get_height({}, width) if width else 0  # `size` is still the previous size

    def _text(self, width: int) -> Content:
        return Content("\n").join(self._lines(max(width, 20)))

    def _lines(self, width: int) -> Iterator[Content]:
        if self.starts:
            yield Content.styled("the run starts when the plan is ready and fits; esc cancels", "bold $accent")
        if self.problem:
            yield Content.styled("Not ready", "bold $error")
            yield Content.styled(as_message(with_labels(self.problem)), "$foreground")
            if self.planned is None:
                return
            yield Content("")
            yield Content.styled("the plan before this change:", "$muted")
        elif self.planned is None:
            yield Content.styled("planning …", "$muted")
            return
        else:
            yield self._verdict(self.planned)
            if self.note:
                yield Content.styled(as_message(self.note), "$warning")
            yield from self._said(self.planned.report)
        report = self.planned.report
        yield Content("")
        model = report["model"]
        yield from self._pair(width, format_count(model["parameters"]), "parameters", str(model["layers"]), "layers")
        if plan := report["plan"]:
            speed = format_speed(plan["tokens_per_second"])
            yield from self._pair(width, format_seconds(plan["seconds_per_step"]), "per step", speed, "tokens/s")
            if past := plan["past"]:
                measured = f"{format_speed(past['tokens_per_second'])} tokens/s measured by the run {past['run']}"
                yield Content.styled(as_message(measured), "$accent")
            bubble, devices = format_percent(plan["bubble"]), str(report["machine"]["devices"])
            yield from self._pair(width, bubble, "bubble", devices, self._machine(report))
            yield Content.styled(self.planned.stages, "$muted")
        if (length := report["length"]) and not self.planned.too_large:  # otherwise remedies need the space
            yield from self._length(length, width)
        for places in _alike(report["memory"]):
            yield Content("")
            yield from self._place(places[0], len(places), width)

    def _verdict(self, planned: Planned) -> Content:
        if self.busy:
            return Content.styled("planning … (previous plan below)", "$muted")
        if planned.fits:
            return Content.styled("✓ fits", "bold $success")
        return Content.styled(f"✗ {'does not fit' if planned.too_large else 'cannot start'}", "bold $error")

    @staticmethod
    def _said(report: Mapping[str, Any]) -> Iterator[Content]:
        """What would refuse the run, and warnings."""
        refusals = (as_message(with_labels(one["message"])) for one in report["refusals"])
        yield from (Content.styled(f"· {text}", "$error") for text in refusals)
        of_data = report["data_warnings"]
        for text in report["warnings"]:
            yield Content.styled(f"! {as_message(with_labels(text))}", "$warning")
            if of_data and text == of_data[-1]:
                yield Content.styled("  ctrl+t shows these rows", "$muted")

    def _length(self, length: Mapping[str, Any], width: int) -> Iterator[Content]:
        """What depends on an amount of data that is estimated is "about" so much."""
        about = "" if length["exact"] else "about "
        steps = "step" if length["steps"] == 1 else "steps"
        of_steps, of_epochs = ("", about) if length["fixed"] else (about, "")
        epochs = ("", "")
        if length["epochs"] is not None:
            number, unit = format_epochs(length["epochs"]).split()
            epochs = f"{of_epochs}{number}", unit
        yield from self._pair(width, f"{of_steps}{length['steps']:,}", steps, *epochs)
        tokens = ("", "")
        if length["tokens"] is not None:
            tokens = f"{about}{format_count(length['tokens'])}", "tokens without padding"
        yield from self._pair(width, f"{of_steps}{length['sequences']:,}", "sequences", *tokens)
        if (seconds := length["seconds"]) is not None:
            measured = length["measured_seconds"]
            source = "" if measured is None else f" as measured (planned: {format_duration(seconds)})"
            total = format_about(seconds if measured is None else measured)
            yield Content.assemble((total, "bold"), (f" in total{source}", "$muted"))

    @staticmethod
    def _machine(report: Mapping[str, Any]) -> str:
        machine = report["machine"]
        name = machine["card"] if machine["gpus"] else "CPU worker"
        return name if machine["devices"] == 1 else f"{name}s"

    @staticmethod
    def _pair(width: int, first: str, unit: str, second: str, other: str) -> Iterator[Content]:
        """Two values with their units: in one line if there is space."""
        left = Content.assemble((first, "bold"), (f" {unit}", "$muted"))
        right = Content.assemble((second, "bold"), (f" {other}", "$muted"))
        gap = max(2, 18 - left.cell_length)
        if left.cell_length + gap + right.cell_length > width:
            yield from (left, right)
        else:
            yield Content.assemble(left, " " * gap, right)

    def _place(self, place: Mapping[str, Any], count: int, width: int) -> Iterator[Content]:
        total, limit = place["total"], place["limit"]
        name = place["name"] if place["kind"] == "GPU memory" else place["kind"]
        name = f"each of {count} GPUs" if count > 1 else name
        fits = place["fits"]
        style = "$error" if fits is False else "$primary"
        of = f"{format_bytes(total)} {'of ' + format_bytes(limit) if limit is not None else '(limit unknown)'}"
        gap = "\n" if len(name) + len(of) >= width else " " * (width - len(name) - len(of))
        yield Content.assemble((name, "bold" if fits is False else ""), gap, (of, style if fits is False else "$muted"))
        yield bar(total / limit if limit else 0.0, width, style)
        if self.detailed:
            parts = sorted(place["parts"], key=lambda part: -part["nbytes"])[:PARTS]
            for part in parts:
                if part["nbytes"] >= total / 100:
                    taken = format_bytes(part["nbytes"])
                    name = part["name"][: width - len(taken) - 4]
                    gap = " " * (width - len(name) - len(taken) - 2)
                    yield Content.styled(f"  {name}{gap}{taken}", "$muted")


def _alike(places: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Groups of places that differ only in name."""
    return [
        list(same) for _, same in groupby(places, key=lambda place: (place["kind"], place["total"], place["limit"]))
    ]
