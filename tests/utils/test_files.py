"""Files that are something else, or too large, are refused without waiting."""

import errno
import os
import socket
from pathlib import Path

import pytest

from rptrain.utils.errors import UserError
from rptrain.utils.files import check_holes, open_regular, read_small, read_small_text, regular

from ..refusals import refuse

pytestmark = pytest.mark.timeout(120)


def test_a_file_is_read(tmp_path):
    file = tmp_path / "file"
    file.write_bytes("\ufeffa\r\nb\rä".encode())
    assert read_small(file, 12) == file.read_bytes() and len(file.read_bytes()) == 10
    assert read_small_text(file, "utf-8-sig") == file.read_text(encoding="utf-8-sig") == "a\nb\nä"
    with pytest.raises(UserError, match=r"file is too large: 10 B, and at most 9 B can be read"):
        read_small(file, 9)
    with pytest.raises(FileNotFoundError):
        read_small(tmp_path / "none")
    with pytest.raises(IsADirectoryError):
        read_small(tmp_path)


def test_a_path_that_is_not_a_regular_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        for path in ("pipe", "socket", "/dev/zero"):
            with pytest.raises(UserError, match=f"^{path} is not a regular file"):
                open_regular(Path(path))
    with pytest.raises(UserError, match="pipe is not a regular file"), open("pipe", "a+b", opener=regular):
        pass


def test_holes(tmp_path):
    file = tmp_path / "file"
    for content in (b"", b"a" * 10_000):
        file.write_bytes(content)
        with open_regular(file) as opened:
            check_holes(opened, file)
            assert opened.read() == content
    os.truncate(file, 1 << 30)
    with (
        open_regular(file) as opened,
        pytest.raises(UserError, match=r"file is incomplete: nothing was .*1\.00 GiB"),
    ):
        check_holes(opened, file)


def test_a_file_system_that_does_not_tell_where_holes_are(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"text")
    monkeypatch.setattr(os, "lseek", lambda *_: refuse(errno.EINVAL))
    with open_regular(tmp_path / "file") as opened:
        check_holes(opened, tmp_path / "file")
        assert opened.read() == b"text"


def test_no_descriptor_stays_open(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    before = len(os.listdir("/proc/self/fd"))
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises((OSError, UserError)):
            open_regular(path)
    assert len(os.listdir("/proc/self/fd")) == before
