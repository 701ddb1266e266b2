"""A run that fails records why, even if the exception has no text."""

import pytest

import rptrain.train.trainer
from rptrain.engine.errors import EngineError
from rptrain.engine.stage_pass import StagePass
from rptrain.runs import events
from rptrain.runs.run_dir import RunDir

from .. import run_tools as tools


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("owner", "name", "kind"),
    [(StagePass, "run", EngineError), (rptrain.train.trainer, "learning_rate", Mute)],
    ids=["worker", "trainer"],
)
def test_an_exception_whose_text_raises_is_recorded(owner, name, kind, tmp_path, monkeypatch):
    def fail(*values, **named):
        raise Mute

    tools.write_model(tmp_path / "model")
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(kind):
        tools.train_here(tmp_path)
    (failed,) = tools.events(RunDir(tmp_path / "runs/run"), events.Failed)
    assert failed.message.endswith("Mute (its message cannot be shown: __str__ raised RuntimeError)")
