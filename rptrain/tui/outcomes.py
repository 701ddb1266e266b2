"""How a run ended, in a sentence."""

import shlex
from pathlib import Path
from typing import Literal

from rptrain.runs.folder.ending import ending_of
from rptrain.runs.folder.listing import GLANCE, newest
from rptrain.runs.records.loss_change import finished_sentence
from rptrain.runs.view.run_view import RunView
from rptrain.utils.paths import RUNS


def died(folder: Path) -> str | None:
    """A sentence about the newest run in a folder if its process died, with the keys that help; None otherwise."""
    if (run := newest(folder)) is None or (view := RunView(run, large=GLANCE)).state != "dead":
        return None
    ending = ending_of(view)
    if ending is None or ending.gone:
        return None
    key = f"r resumes it from step {ending.saved:,}" if ending.saved else "n begins it again"
    return f"{run.name} ended without a last record after step {view.step:,}: press F3, then {key}"


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


def still_trains(run: Path, *, starting: bool) -> str | None:
    """A sentence about a run that a process on this machine trains, with the command that shows it again; None for
    others. `starting`: a process that may not have recorded anything was started.
    """
    view = RunView(run, large=GLANCE)
    show = f"rptrain attach {shlex.quote(run.name if run.parent == RUNS else str(run))}"
    if view.ended or view.process is None:
        return f"{run.name} is starting: {show}" if starting else None
    total = "" if view.total_steps is None else f" of {view.total_steps:,}"
    state = "is paused" if view.state == "paused" else "keeps training"
    return f"{run.name} {state} (step {view.step:,}{total}): {show}"
