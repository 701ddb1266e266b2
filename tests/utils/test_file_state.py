"""States of files: a change shows, whatever it keeps."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rptrain.utils import file_state
from rptrain.utils.file_state import states_of


def in_place(file: Path) -> None:
    file.write_text("after.")


def restored(file: Path) -> None:
    before = file.stat()
    file.write_text("after.")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def replaced(file: Path) -> None:
    other, before = file.with_name("other"), file.stat()
    other.write_text("after.")
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(file)


@pytest.mark.parametrize("change", [in_place, restored, replaced], ids=lambda change: change.__name__)
def test_a_change_at_once_of_the_same_size_shows(tmp_path: Path, change: Callable[[Path], None]) -> None:
    file = tmp_path / "file"
    for _ in range(5):
        file.write_text("before")
        before = states_of([file])
        assert states_of([file]) == before
        change(file)
        assert states_of([file]) != before


def test_only_a_file_that_was_just_changed_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []
    monkeypatch.setattr(file_state.time, "sleep", waits.append)
    (tmp_path / "file").touch()
    monkeypatch.setattr(file_state.time, "time_ns", lambda: (tmp_path / "file").stat().st_ctime_ns + 1)
    states_of([tmp_path / "file"])
    assert waits == [file_state.TICK]
    monkeypatch.undo()
    time.sleep(2 * file_state.TICK)
    monkeypatch.setattr(file_state.time, "sleep", waits.append)
    states_of([tmp_path / "file"])
    assert len(waits) == 1 and states_of([]) == ()
