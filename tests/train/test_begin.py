"""How processes begin a run together."""

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rptrain.checkpoint.processes import Processes
from rptrain.runs.folder.run_dir import RunDir
from rptrain.train import begin
from rptrain.train.group import Group


@pytest.mark.parametrize(
    ("checkpoint", "found"),
    [(None, Path("/runs/a")), ("/runs/a/checkpoints/checkpoint-4", Path("/runs/a/checkpoints/checkpoint-4"))],
)
def test_others_count_the_space_of_checkpoints_as_the_first_process_does(monkeypatch, checkpoint, found):
    class Prepared(Exception):
        pass

    def prepare(resolved, found, launch, *, resumed):
        raise Prepared(found, resumed)

    told = {"run": "/runs/a", "checkpoint": checkpoint, "token": "t"}
    said = iter([None, told, None])
    group = Group(SimpleNamespace(world=2), Processes(1, lambda own: [next(said), own]))  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(begin, "_check_shared", lambda *arguments: None)
    monkeypatch.setattr(begin, "changed", lambda *arguments: [])
    monkeypatch.setattr(RunDir, "config", lambda run: None)
    monkeypatch.setattr(begin, "_prepare", prepare)
    something: Any = SimpleNamespace(config=None)
    with pytest.raises(Prepared) as raised:
        begin.share(None, something, something, group, something, ExitStack())
    assert raised.value.args == ((RunDir(Path("/runs/a")), found), checkpoint is not None)
