"""Links in a run's folder that lead out of it, and things in the way of what a resumed run writes."""

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from rptrain.checkpoint import export
from rptrain.config.resolve import Resolved, resolve
from rptrain.runs.folder import control, listing
from rptrain.runs.folder.event_log import EventLog
from rptrain.runs.folder.run_dir import RunDir, begin, find
from rptrain.runs.records.events import Paused
from rptrain.runs.records.lanes import FILE
from rptrain.runs.records.line_file import LineFile
from rptrain.runs.records.tail import Tail, end_of
from rptrain.runs.view.run_view import RunView
from rptrain.train.resume import Resume
from rptrain.utils.errors import UserError

from .. import run_tools as tools

LINES = b'{"schema":1,"event":"paused","time":1.0,"step":1}\nno line end'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("c.toml").write_text(
        '[model]\npath = "tiny-tasks"\n[[data.train]]\npath = "builtin:tasks"\n[log]\nrun_name = "r"\n'
    )
    return tmp_path


@pytest.fixture
def run() -> RunDir:
    run, _, log = begin(config(), None)
    log.close()
    for step in (3, 6):
        tools.write_checkpoint(run.checkpoint_path(step))
    with EventLog(run.events_path) as log:
        log.write(Paused(1))
    return run


def config(*overrides: str) -> Resolved:
    return resolve("c.toml", overrides)


def resume() -> None:
    found = find(config())
    assert found is not None
    with ExitStack() as stack:
        Resume.open(*found, stack)


def moved_outside(path: Path) -> Path:
    """Moves a file or folder out of the run and links to it."""
    target = Path("outside") / path.name
    target.parent.mkdir(exist_ok=True)
    if path.exists():
        path.rename(target)
    path.symlink_to(target.absolute())
    return target


NAMES = (
    "config.toml",
    "events.jsonl",
    "checkpoints",
    "checkpoints/checkpoint-6",
    "checkpoints/checkpoint-6/complete.json",
    "checkpoints/checkpoint-6/trainer_state.json",
    "control",
    "model",
)


@pytest.mark.parametrize("name", NAMES, ids=[name.rpartition("/")[2] for name in NAMES])
def test_a_run_with_a_link_that_leads_out_is_not_resumed(run, name):
    target = moved_outside(run.path / name)
    if name.count("/") == 2:  # the checkpoint before would be used
        (run.checkpoint_path(3) / "complete.json").unlink()
    with pytest.raises(UserError, match=f"{name} leads to {target.absolute()}, outside of "):
        resume()


def test_a_checkpoint_with_a_file_that_leads_out_counts_as_damaged(run):
    moved_outside(run.checkpoint_path(6) / "trainer_state.json")
    assert run.newest() == run.checkpoint_path(3)
    with pytest.raises(UserError, match=r"trainer_state\.json leads to "):
        export.checked_files(run.checkpoint_path(6))


def test_a_run_and_its_folder_may_be_links(run, folder):
    (folder / "elsewhere").mkdir()
    run.path.rename("elsewhere/r")
    run.path.symlink_to("../elsewhere/r")
    Path("runs").rename("disk")
    Path("runs").symlink_to("disk")
    (run.path / "near.jsonl").symlink_to("events.jsonl")
    assert find(config()) == (run, run.checkpoint_path(6))
    resume()
    assert RunView(run.path).log and Tail(run.path / "near.jsonl").read()


def test_files_outside_are_not_changed(run):
    target = moved_outside(run.events_path)
    target.write_bytes(LINES)
    for act in (
        lambda: EventLog(run.path / "events.jsonl"),
        lambda: LineFile(run.path / "events.jsonl"),
        lambda: listing.delete(run.path),
        resume,
    ):
        with pytest.raises(UserError, match=r"events\.jsonl leads to "):
            act()
    assert target.read_bytes() == LINES and run.path.exists()


def test_files_outside_are_not_read(run):
    moved_outside(run.events_path).write_bytes(LINES)
    moved_outside(run.path / FILE).write_bytes(LINES)
    (summary,) = listing.summaries(Path("runs"))
    assert (summary.state, summary.step) == ("new", 0) and not RunView(run.path).log
    assert end_of(run.path / "events.jsonl", 100) == ""


@pytest.mark.parametrize("name", ["control", "control/STOP"])
def test_commands_are_not_sent_outside(run, name):
    run.control_path.mkdir()
    target = moved_outside(run.path / name)
    for act in (control.ask, control.withdraw):
        with pytest.raises(UserError, match=r"control(/STOP)? leads to "):
            act(run.path, control.STOP)
    assert name == "control/STOP" or not os.listdir(target)
    assert not Path("outside/STOP").exists()


# Things in the way


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("model", Path.touch),
        ("control", Path.touch),
        (".model.rptrain-partial", Path.touch),
        (".model.rptrain-partial/mine", lambda path: path.mkdir(parents=True)),
        ("checkpoints/.checkpoint-9.rptrain-partial", Path.touch),
        ("checkpoints/.checkpoint-9.rptrain-partial/mine", lambda path: path.mkdir(parents=True)),
    ],
)
def test_what_is_in_the_way_is_found_before_training(run, name, make):
    make(run.path / name)
    with pytest.raises(UserError, match=r"(model|control|partial) is in the way .*move"):
        resume()
    assert (run.path / name).exists()


def test_what_a_killed_process_left_is_not_in_the_way(run):
    for folder in (run.path / ".model.rptrain-partial", run.checkpoints_path / ".checkpoint-9.rptrain-partial"):
        (folder / "new").mkdir(parents=True)
        (folder / "made-by-rptrain").touch()
    resume()
