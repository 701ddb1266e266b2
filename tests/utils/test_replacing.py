"""Files that are replaced as a whole."""

import os
import stat

import pytest

from rptrain.utils.replacing import remove_unfinished, replace_file


def test_the_mode_and_links_stay(tmp_path):
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("before")
    file.chmod(0o640)
    link.symlink_to("file")
    replace_file(link, b"after")
    assert file.read_text() == "after" and stat.S_IMODE(file.stat().st_mode) == 0o640 and link.is_symlink()
    assert len(os.listdir(tmp_path)) == 2


def test_a_file_stays_if_the_new_one_cannot_be_written(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("before")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(file, b"after")
    assert file.read_text() == "before" and os.listdir(tmp_path) == ["file"]


def test_what_a_killed_process_left_is_removed(tmp_path, monkeypatch):
    (tmp_path / "other").touch()
    with monkeypatch.context() as killed:
        killed.setattr("pathlib.Path.replace", lambda *_: None)
        killed.setattr("pathlib.Path.unlink", lambda *_: None)
        replace_file(tmp_path / "file", b"content")
    assert len(os.listdir(tmp_path)) == 2
    remove_unfinished(tmp_path)
    assert os.listdir(tmp_path) == ["other"]


def test_a_given_mode_replaces_the_earlier_one_and_a_link(tmp_path):
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("before")
    link.symlink_to("file")
    replace_file(link, b"after", 0o600)
    assert file.read_text() == "before" and link.read_text() == "after" and not link.is_symlink()
    assert stat.S_IMODE(link.stat().st_mode) == 0o600
