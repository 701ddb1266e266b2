"""Exports to one target, or to a folder and one in it: the later one is refused, and nothing is deleted."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rptrain.checkpoint import export as module
from rptrain.checkpoint.export import export
from rptrain.checkpoint.state import save_state
from rptrain.checkpoint.target_lock import locked
from rptrain.checkpoint.verify import verify
from rptrain.utils.errors import UserError

HOLD = """
import sys
from pathlib import Path
from rptrain.checkpoint.target_lock import locked
with locked(Path(sys.argv[1]), force=False):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def run(tmp_path, model_dir, spec, states):
    (tmp_path / "run").mkdir()
    save_state(tmp_path / "run/checkpoints", states.make(spec), step=1, meta={"model_dir": str(model_dir)})
    return tmp_path / "run"


def lock(to: Path) -> None:
    with locked(to, force=False):
        pass


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"run", "base model"}


@pytest.mark.parametrize("force", [False, True], ids=["plain", "force"])
def test_a_second_export_leaves_the_first_alone(run, tmp_path, monkeypatch, force):
    to, refused = tmp_path / "new/model", list[str]()

    def second(*given: object) -> None:
        monkeypatch.setattr(module, "verify", verify)
        for target in (to, tmp_path / "link/model"):
            with pytest.raises(UserError) as error:
                export(run, target, force=force)
            refused.append(str(error.value))
        verify(*given)

    (tmp_path / "link").symlink_to("new")
    for _ in range(2):  # the second time it replaces the first
        monkeypatch.setattr(module, "verify", second)
        verify(export(run, to))
    assert len(refused) == 4 and left(tmp_path) == {"new", "link"} and left(tmp_path / "new") == {"model"}
    assert all(f"{Path('model')} is running (process {os.getpid()} on " in message for message in refused)


def test_a_folder_in_the_target_of_another_export_is_refused(run, tmp_path):
    with locked(tmp_path / "a", force=False):
        for inner in ("a/b", "a/b/c"):
            with pytest.raises(UserError, match=rf"an export to .*/a, which holds .*/{inner}, is running \(process"):
                export(run, tmp_path / inner)
        export(run, tmp_path / "b")
    assert left(tmp_path) == {"b"}


def test_a_target_that_holds_that_of_another_export_is_refused(run, tmp_path):
    with locked(tmp_path / "a/b/c", force=False):
        with pytest.raises(UserError, match=r"a is not empty"):
            export(run, tmp_path / "a")
        with pytest.raises(UserError, match=r"an export to .*a/b/c, which is in .*/a, is running \(process"):
            export(run, tmp_path / "a", force=True)
        assert left(tmp_path / "a/b") == {".c.rptrain-lock"}
    export(run, tmp_path / "a", force=True)


def test_the_lock_of_a_killed_process_is_gone(run, tmp_path):
    to = tmp_path / "model"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(to)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "locked\n"
        with pytest.raises(UserError, match=rf"another export to {to} is running \(process {other.pid} on "):
            export(run, to)
        other.send_signal(signal.SIGKILL)
    assert left(tmp_path) == {".model.rptrain-lock"}
    export(run, to)
    assert left(tmp_path) == {"model"}


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, 524], ids=["ENOLCK", "EOPNOTSUPP", "524"])
def test_a_file_system_without_locks(tmp_path, monkeypatch, caplog, code):
    def refused(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refused)
    with locked(tmp_path / "model", force=False), locked(tmp_path / "model/inner", force=False):
        pass
    assert "model: its file system has no locks" in caplog.text and not left(tmp_path / "model")


def test_a_lock_that_is_deleted_meanwhile_is_taken_again(tmp_path, monkeypatch):
    """Its holder deletes it while another process, which has opened it, is about to lock it."""
    path, flock = tmp_path / ".model.rptrain-lock", fcntl.flock

    def late(descriptor: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        path.unlink()
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with locked(tmp_path / "model", force=False), pytest.raises(UserError, match="is running"):
        lock(tmp_path / "model")


def test_what_is_not_a_lock_stays(tmp_path):
    path = tmp_path / ".model.rptrain-lock"
    (tmp_path / "mine").write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("mine")
    for name in ("mine", "pipe", "folder", "link"):
        (tmp_path / name).rename(path)
        with pytest.raises(UserError, match=r"rptrain-lock is in the way and was not written by rptrain"):
            lock(tmp_path / "model")
        path.rename(tmp_path / name)
    assert (tmp_path / "mine").read_text() == "mine"


def test_the_lock_of_another_user_is_respected(tmp_path, monkeypatch):
    path, opened = tmp_path / ".model.rptrain-lock", os.open

    def readable(name, flags, *mode, **more):
        if flags & os.O_CREAT and name == path and path.exists():
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(name, flags, *mode, **more)

    monkeypatch.setattr(os, "open", readable)
    with locked(tmp_path / "model", force=False), pytest.raises(UserError, match="is running"):
        lock(tmp_path / "model")
    path.touch()
    lock(tmp_path / "model")


def test_new_folders_stay_only_with_an_export(tmp_path):
    with pytest.raises(RuntimeError), locked(tmp_path / "a/b/model", force=False):
        raise RuntimeError
    assert not left(tmp_path)
    lock(tmp_path / "a/b/model")
    assert left(tmp_path / "a") == {"b"}
