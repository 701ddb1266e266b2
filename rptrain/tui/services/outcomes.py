"""How a run ended, in a sentence."""

from pathlib import Path
from typing import Literal

from rptrain.runs.ending import ending_of
from rptrain.runs.listing import GLANCE
from rptrain.runs.view import RunView


def outcome(run: Path, code: int | None = None, began: float = 0.0) -> tuple[str, Literal["information", "error"]]:
    """A sentence for a notification, and its severity. `code`: how the process ended, if it is known. `began`: the Unix
    time at which it was started.
    """
    view = RunView(run, large=GLANCE)
    if (view.taken_up or 0.0) < began:
        return f"{run.name} did not start", "error"
    if view.state in ("finished", "stopped"):
        change = view.loss_change if view.state == "finished" else None
        return f"{run.name} {view.state} after step {view.step:,}" + (f": {change}" if change else ""), "information"
    ending = ending_of(view, code)
    return f"{run.name} {view.state}{'' if ending is None else f': {ending.cause}'}", "error"
