"""The head of the Run screen: redrawing it does not look through all steps of a run again."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rptrain.runs import view as view_module
from rptrain.runs.view import RunView
from rptrain.tui.widgets import run_head

from .recorded import make_run


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

    for module, name in ((run_head, "_highest"), (view_module, "loss_change")):
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    for _ in range(3):
        assert dict(run_head._numbers(view))["learning rate"] and view.loss_change
    assert calls == looks
