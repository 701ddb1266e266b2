"""The plan and the first samples of a config that is being edited; these functions run in the helper process."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rptrain.config.errors import ConfigError
from rptrain.config.resolve import resolve
from rptrain.data.samples import FirstSamples
from rptrain.tui.services.launch import NEW_RUN
from rptrain.utils.errors import UserError

SAMPLES = 3  # samples in a preview


@dataclass(frozen=True)
class Planned:
    """A plan's report for the screen."""

    report: dict[str, Any]  # see rptrain.planner.report
    stages: str  # as text; empty without a plan
    advice: str

    @property
    def fits(self) -> bool:
        """Whether the run can start."""
        return self.report["fits"]

    @property
    def too_large(self) -> bool:
        """Whether no plan was found, or one that takes more memory than the machine has."""
        return self.report["plan"] is None or any(place["fits"] is False for place in self.report["memory"])


def plan(path: Path, text: str) -> Planned:
    """The report of `rptrain plan` for a new run of a config with this text."""
    from rptrain.machine.flags import MachineFlags
    from rptrain.planner.report import report
    from rptrain.planner.text import describe_stages

    try:
        found = report(resolve(path, [NEW_RUN], text), MachineFlags())
    except ConfigError as error:  # the form has no lines
        raise UserError("\n".join(f"· {message}" for _, message in error.mistakes)) from None
    stages = describe_stages(found.run.plan.stages) if found.run else ""
    return Planned(found.to_dict(), stages, str(found.advice))


def preview(path: Path, text: str) -> FirstSamples:
    """The first samples of a config's first data set, as its model reads them."""
    from rptrain.data.preview import first_samples

    return first_samples(resolve(path, text=text).config, SAMPLES)
