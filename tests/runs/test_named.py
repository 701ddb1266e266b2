"""Runs by name, by path, and the newest one."""

import os
from pathlib import Path

import pytest

from rptrain.runs.folder.event_log import EventLog
from rptrain.runs.folder.named import named_run, named_source
from rptrain.runs.records.events import RunStarted
from rptrain.utils.errors import UserError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for time, name in enumerate(("first-chats", "second-chats", "other"), 1):
        path = Path("runs", name)
        path.mkdir(parents=True)
        (path / "config.toml").touch()
        with EventLog(path / "events.jsonl") as log:
            log.write(RunStarted("", "", (), "", 0, time=10.0 * (-time % 4)))
    return Path("runs")


def test_a_name_and_a_path_and_the_newest(folder):
    for given in ("other", "runs/other", os.path.abspath("runs/other")):
        assert named_run(given, folder).samefile(folder / "other")
    assert named_run(None, folder) == folder / "first-chats"


def test_a_name_that_is_not_there(folder):
    with pytest.raises(
        UserError,
        match=r"first-chat does not exist, .* run in runs: did you mean first-chats\?",
    ):
        named_run("first-chat", folder)
    with pytest.raises(UserError, match="`rptrain runs` lists the runs"):
        named_run("zzz", folder)
    (folder / "empty").mkdir()
    with pytest.raises(UserError, match="runs/empty is not a run"):
        named_run("runs/empty", folder)
    with pytest.raises(UserError, match="no runs in nowhere"):
        named_run(None, Path("nowhere"))
    with pytest.raises(UserError, match=r"^a␊b does not exist"):
        named_run("a\nb", folder)
    for name in ("", " "):
        for find in (named_run, named_source):
            with pytest.raises(UserError, match="the name of the run is empty: `rptrain runs` lists"):
                find(name, folder)


def test_a_run_or_any_other_path_to_answer_from(folder):
    assert named_source("other", folder) == folder / "other"
    Path("other/model").mkdir(parents=True)
    assert named_source("other", folder) == Path("other"), "a path comes before a name"
    assert named_source("other/model", folder) == Path("other/model")
    with pytest.raises(UserError, match=r"did you mean second-chats\?"):
        named_source("second-chat", folder)
