"""Reading on in a file that grows, is cut, replaced, or too large to be read whole."""

from itertools import pairwise
from pathlib import Path

import pytest

from rptrain.runs.records.tail import BLOCK, Tail, end_of


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


@pytest.mark.parametrize("place", [10_000, 50_001, 99_000])
def test_the_last_mark_is_not_passed_over(path, place):
    lines = [b"%07d" % number for number in range(100_000)]
    lines[3000 + place // 50] = b"MARK 01"
    lines[place] = b"MARK 02"
    path.write_bytes(b"\n".join(lines) + b"\n")
    assert set(lines[place : place + 3]) <= set(Tail(path, large=80_000, marks=(b"none", b"MARK")).read())


def test_a_mark_between_blocks_of_the_search(path):
    before = b"x" * 99 + b"\n"
    for shift in range(8):
        start = b"y" * shift + b"\n"
        path.write_bytes(before * 30_000 + b"{MARK}\n" + start + b"x" * (2 * BLOCK - 4 - len(start)) + b"\n")
        assert b"{MARK}" in Tail(path, large=8192, marks=(b"none", b"MARK")).read()


def test_lines_with_a_text_are_all_read(path):
    lines = [b"%07d" % number for number in range(400_000)]  # more than BLOCK
    kept = [20_000, 131_070, 131_071, 131_072, 131_073, 262_143, 330_001]
    for place in kept:
        lines[place] = b"A KEEP:" if place % 2 else b"the OTHER, longer than the rest"
    path.write_bytes(b"\n".join(lines) + b"\nhalf")
    found = Tail(path, large=80_000, kept=(b"KEEP:", b"OTHER")).read()
    assert [line for line in found if not line.isdigit()] == [lines[place] for place in kept]
    assert found.index(lines[20_000]) < found.index(lines[131_071]) and len(found) < 5000
    assert len(set(found)) == len(found) - 5, "the kept lines that are alike, and no other is read twice"


def test_of_too_many_lines_with_a_text_the_newest_are_read(path, monkeypatch):
    monkeypatch.setattr("rptrain.runs.records.tail.KEPT", 3)
    lines = [b"%07d %s" % (number, b"KEEP" if number % 100 == 50 else b"") for number in range(20_000)]
    path.write_bytes(b"\n".join(lines) + b"\n")
    found = [line for line in Tail(path, large=0, kept=(b"KEEP",)).read() if b"KEEP" in line]
    assert found == [b"0019750 KEEP", b"0019850 KEEP", b"0019950 KEEP"]


def test_the_end_alone(path):
    lines = [b"%07d" % number for number in range(100_000)]
    path.write_bytes(b"\n".join(lines) + b"\nhalf")
    tail = Tail(path, large=80_004, end_only=True)
    assert tail.read() == lines[-10_000:] and tail.skipped == 720_000
    with path.open("ab") as file:
        file.write(b"way\nnext\n")
    assert tail.read() == [b"halfway", b"next"]


def test_long_lines_are_read_once(path, monkeypatch):
    """A line that is longer than all pieces costs what the pieces hold; one without its end is not read again."""
    path.write_bytes(b"first\n" * 10_000 + b"\0" * 2_000_000 + b"\n" + b"last\n" * 10_000)
    tail = Tail(path, large=80_000)
    found = tail.read()
    assert set(found) == {b"first", b"last"} and len(found) < 5000
    with path.open("ab") as file:
        file.write(b"half" * 1000)
    assert tail.read() == []
    monkeypatch.setattr("rptrain.runs.records.tail._whole_lines", None)
    assert tail.read() == []
    monkeypatch.undo()
    with path.open("ab") as file:
        file.write(b"\n")
    assert tail.read() == [b"half" * 1000]


def test_what_cannot_be_read_has_no_lines(tmp_path):
    assert Tail(tmp_path).read() == [] and end_of(tmp_path, 10) == ""


def test_the_end_of_a_text(path):
    path.write_bytes(b"before\nloading\r 50 %\r100 %\nend\n")
    assert end_of(path, 100) == "before\n100 %\nend\n" and end_of(path, 4) == "end\n"
    assert end_of(path, 100, start=7) == "100 %\nend\n"
