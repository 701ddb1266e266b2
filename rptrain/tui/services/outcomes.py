"""How a run ended, in a sentence."""

from pathlib import Path
from typing import Literal

from rptrain.runs.ending import ending_of
from rptrain.runs.listing import GLANCE, summaries
from rptrain.runs.loss_change import finished_sentence
from rptrain.runs.view import RunView


def died(folder: Path) -> str | None:
    """A sentence about the newest run in a folder if its process died, with the keys that help; None otherwise."""
    newest = next(iter(summaries(folder)), None)
    ending = None if newest is None or newest.state != "dead" else ending_of(RunView(newest.path, large=GLANCE))
    if newest is None or ending is None or ending.gone:
        return None
    key = f"r resumes it from step {ending.saved:,}" if ending.saved else "n begins it again"
    return f"{newest.path.name} ended without a last record after step {newest.step:,}: press F3, then {key}"


def outcome(run: Path, code: int | None = None, began: float = 0.0) -> tuple[str, Literal["information", "error"]]:
    """A sentence for a notification, and its severity. `code`: how the process ended, if it is known. `began`: the Unix
    time at which it was started.
    """
    view = RunView(run, large=GLANCE)
    if (view.taken_up or 0.0) < began:
        return f"{run.name} did not start", "error"
    if view.state == "finished":
        return f"{run.name} {finished_sentence(view.step, view.loss_change)}", "information"
    if view.state == "stopped":
        return f"{run.name} stopped after step {view.step:,}", "information"
    ending = ending_of(view, code)
    return f"{run.name} {view.state}{'' if ending is None else f': {ending.cause}'}", "error"
