"""Reading on in a file that grows, is cut, replaced, or too large to be read whole."""

from itertools import pairwise
from pathlib import Path

import pytest

from rptrain.runs.tail import Tail


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lines"


def test_lines_come_once_and_whole(path):
    tail = Tail(path)
    assert tail.read() == []
    path.write_bytes(b"one\ntwo\nthr")
    assert tail.read() == [b"one", b"two"] and tail.read() == []
    with path.open("ab") as file:
        file.write(b"ee\n")
    assert tail.read() == [b"three"]


def test_a_torn_line_that_was_cut_off(path):
    path.write_bytes(b"one\ntorn")
    tail = Tail(path)
    assert tail.read() == [b"one"]
    path.open("r+b").truncate(4)
    assert tail.read() == []
    path.open("ab").write(b"two\n")
    assert tail.read() == [b"two"]


def test_a_file_that_was_replaced_is_begun_anew(path):
    path.write_bytes(b"one\ntwo\n")
    tail = Tail(path)
    tail.read()
    path.rename(path.with_suffix(".old"))
    path.write_bytes(b"three, which is longer than both\n")
    assert tail.read() == [b"three, which is longer than both"]


def test_a_large_file_is_read_in_part_from_end_to_end(path):
    lines = [b"%07d" % number for number in range(100_000)]
    path.write_bytes(b"\n".join(lines) + b"\nhalf")
    tail = Tail(path, large=800_000)
    found = tail.read()
    assert set(found) <= set(lines) and found == sorted(set(found))
    assert found[:3000] == lines[:3000] and found[-12_000:] == lines[-12_000:]
    places = [int(line) for line in found]
    assert max(after - before for before, after in pairwise(places)) < 5000
    assert 8 * len(found) <= 200_000 and 8 * len(found) + tail.skipped == 8 * len(lines)
    with path.open("ab") as file:
        file.write(b"way\n")
    assert tail.read() == [b"halfway"]
