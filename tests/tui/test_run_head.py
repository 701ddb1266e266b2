"""The head of the Run screen: it fits, and redrawing it does not look through all steps of a run again."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rptrain.runs.records.lanes import Work
from rptrain.runs.view import process_view
from rptrain.runs.view.run_view import RunView
from rptrain.tui.run import run_head

from .conftest import Page, driven, widget_text
from .recorded import make_run

CHANGE = "loss 10.205 -> 4.6e-4 (-100%)"
NOTE = "not saved: s saves"


@pytest.mark.parametrize(
    ("end", "looks"), [(None, ["loss_change"]), ("finished", ["_highest", "loss_change"])], ids=["active", "finished"]
)
def test_all_steps_are_looked_through_at_most_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str | None, looks: list[str]
):
    view, calls = RunView(make_run(tmp_path, steps=20, devices=1, end=end)), list[str]()
    view.steps.keep(19)  # forgets what was computed from 20 steps

    def counted(name: str, function: Callable[..., object]) -> Callable[..., object]:
        return lambda *given: calls.append(name) or function(*given)

    for module, name in ((run_head, "_highest"), (process_view, "loss_change")):
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    for _ in range(3):
        assert dict(run_head._numbers(view))["learning rate"] and view.loss_change
    assert calls == looks


@driven
@pytest.mark.parametrize(
    ("width", "end", "note", "shown"),
    [
        (78, "finished", CHANGE, "✓ finished loss 10.205 -> 4.6e-4 2,000/2,000 took 12 m 11 s"),
        (58, "finished", CHANGE, "✓ finished 2,000/2,000 took 12 m 11 s"),
        (78, "paused", NOTE, "⏸ paused not saved: s saves ━ 2,000/2,000"),
        (58, "paused", NOTE, "⏸ paused not saved: s saves 2,000/2,000"),
    ],
)
async def test_no_number_is_cut(tmp_path: Path, width: int, end: str, note: str, shown: str):
    view = RunView(make_run(tmp_path, "support", steps=345, total=2000, end=end))
    view.progress.completed = 2000
    head = run_head.RunHead()
    async with Page(head).run_test(size=(width, 4)) as pilot:
        head.show(view, view.state, note)
        await pilot.pause()
        line = widget_text(head).splitlines()[0]
    assert len(line) == width and re.sub(" +", " ", re.sub("━+", "━", line)) == f"support {shown}"


WORK = Work("reading weights: 4.00 GiB of 16.0 GiB, 25%, 30 s left", 0.25)


@driven
@pytest.mark.parametrize(
    ("width", "work", "shown"),
    [
        (90, WORK, f"{'━' * 6}{'─' * 18} {WORK.text}"),
        (68, WORK, f"{'━' * 3}╸{'─' * 10} {WORK.text}"),
        (58, WORK, WORK.text),
        (30, WORK, "reading weights: 4.00 GiB of…"),
        (90, Work("loading libraries: 4 s", None), "loading libraries: 4 s"),
    ],
)
async def test_a_long_phase_is_shown_in_place_of_the_numbers(tmp_path: Path, width: int, work: Work, shown: str):
    view = RunView(make_run(tmp_path, "support", steps=0, total=2000))
    view.recent.append(replace(view.recent[-1], work=work))
    head = run_head.RunHead()
    async with Page(head).run_test(size=(width, 4)) as pilot:
        head.show(view, view.state)
        await pilot.pause()
        assert widget_text(head).splitlines()[1].rstrip() == shown


@driven
async def test_the_progress_of_a_step_is_shown_behind_the_numbers(tmp_path: Path):
    view = RunView(make_run(tmp_path, "support", steps=5, total=2000))
    step = Work("running step 6: 37 of 128 micro-batches, 29%, 2 m 10 s left", 0.29, beside=True)
    view.recent.append(replace(view.recent[-1], work=step))
    head = run_head.RunHead()
    async with Page(head).run_test(size=(90, 4)) as pilot:
        head.show(view, view.state)
        await pilot.pause()
        line = widget_text(head).splitlines()[1].rstrip()
    assert line.endswith(f"   {step.text}") and "loss" in line.removesuffix(step.text)


@driven
@pytest.mark.parametrize("state", ["dead", "failed", "replay"])
async def test_no_phase_is_shown_of_a_process_that_does_not_run(tmp_path: Path, state: str):
    view = RunView(make_run(tmp_path, "support", steps=5, total=2000))
    view.recent.append(replace(view.recent[-1], work=WORK))
    head = run_head.RunHead()
    async with Page(head).run_test(size=(90, 4)) as pilot:
        head.show(view, state)
        await pilot.pause()
        assert WORK.text not in widget_text(head) and "loss" in widget_text(head).splitlines()[1]
