"""Byte ranges of a file."""

import os

import pytest

from rptrain.utils.errors import UserError
from rptrain.utils.file_ranges import OpenFile


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "some file"
    path.write_bytes(b"0123456789")
    return path


@pytest.mark.parametrize("most", [None, 1, 3])
def test_a_range_also_where_the_system_gives_less_at_a_time(file, most, monkeypatch):
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: read(fd, [buffers[0][:most]], at))
    with OpenFile(file) as opened:
        for begin, end in ((0, 10), (3, 8), (9, 10), (4, 4)):
            buffer = bytearray(end - begin)
            opened.read(begin, memoryview(buffer))
            assert buffer == b"0123456789"[begin:end]


def test_a_file_that_ends_before(file):
    with OpenFile(file) as opened, pytest.raises(UserError, match="some file ends after 10 bytes"):
        opened.read(8, memoryview(bytearray(3)))


def test_a_file_that_is_gone_or_cannot_be_read(file, tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*gone: No such file"):
        OpenFile(tmp_path / "gone")
    with OpenFile(tmp_path) as folder, pytest.raises(UserError, match=r"cannot read .*: Is a directory"):
        folder.read(0, memoryview(bytearray(1)))


def test_a_file_is_closed_again(file):
    before = len(os.listdir("/proc/self/fd"))
    with OpenFile(file):
        assert len(os.listdir("/proc/self/fd")) == before + 1
    assert len(os.listdir("/proc/self/fd")) == before
