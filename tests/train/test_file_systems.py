"""Runs on file systems that lack something: they train to the same bits, or are refused before data is read."""

import errno
import mmap
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rptrain.runs.records import events

from .. import run_tools as tools
from ..refusals import Refusals, refuse

SOURCE = Path(__file__).with_name("refusals.c")


class Unmapped(mmap.mmap):
    def __new__(cls, descriptor: int, *given: Any, **named: Any) -> "Unmapped":
        if descriptor >= 0:
            refuse(errno.ENODEV)
        return super().__new__(cls, descriptor, *given, **named)

    def madvise(self, *_: Any) -> None:
        refuse(errno.EINVAL)


def test_a_run_where_much_is_refused(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = tools.state(tools.train_here(folder, "log.run_name=other"))
    with pytest.MonkeyPatch.context() as patch:
        refusals = Refusals(patch)
        refusals.syncing_folders(errno.EINVAL)
        refusals.locking()
        refusals.modes()
        patch.setattr(mmap, "mmap", Unmapped)
        run = tools.train_here(folder)
        assert run.finished and tools.state(run) == expected
        assert tools.train_here(folder, f"save.resume={run.path}", "train.max_steps=8") == run
    assert run.saved_step == 8 and run.finished
    warnings = [record.message for record in caplog.records if "has no locks" in record.message]
    assert len(warnings) == 2 and all("save.output_dir" in warning for warning in warnings)


@pytest.mark.parametrize(
    ("refused", "code"),
    [("syncing_folders", errno.EIO), ("renaming_folders", errno.ENOSYS)],
    ids=["folders", "renames"],
)
def test_a_run_that_could_not_save_is_refused(folder: Path, refused: str, code: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        getattr(Refusals(patch), refused)(code)
        result = tools.invoke("--config", _config(folder))
        assert result.exit_code == 2 and "save.output_dir" in result.stderr, result.stderr
        assert os.strerror(code) in result.stderr and not (folder / "runs").exists()
    run = tools.train_here(folder, "train.max_steps=2")
    before = sorted(run.path.rglob("*"))
    with pytest.MonkeyPatch.context() as patch:
        getattr(Refusals(patch), refused)(code)
        result = tools.invoke("--config", _config(folder), f"save.resume={run.path}")
    assert result.exit_code == 2 and "cannot be resumed" in result.stderr, result.stderr
    assert sorted(run.path.rglob("*")) == before
    assert not tools.events(run, events.Resumed)


def test_a_log_that_cannot_be_created_leaves_no_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        refuse(errno.EPERM)

    monkeypatch.setattr("rptrain.runs.folder.run_dir.EventLog.__init__", full)
    result = tools.invoke("--config", _config(folder))
    assert result.exit_code != 0 and not (folder / "runs").exists()


@pytest.mark.long
def test_libraries_where_much_is_refused(folder: Path) -> None:
    """In processes of their own: some libraries call the system from C and Rust."""
    library = folder / "refusals.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    environment = {"LD_PRELOAD": str(library), "REFUSED": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    for arguments in (
        ["--config", _config(folder)],
        ["export", folder / "runs/run", "--to", folder / "exported", "--dtype", "bfloat16"],
        ["generate", folder / "exported", "--prompt", "a", "--max-new-tokens", "2"],
    ):
        process = tools.command(*arguments, environment=environment)
        _, said = process.communicate()
        assert process.returncode == 0, said
        assert ("has no locks" in said) == (arguments[0] != "generate"), said


def _config(folder: Path) -> Path:
    tools.write_config(folder)
    return folder / "run.toml"
