"""How far data files are read: rows, rows per second and the time left."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from rptrain.data.formats import Tally
from rptrain.data.progress import FIRST, PAUSE, ROWS, ReadProgress, Watch
from rptrain.data.read import Position, share_of
from rptrain.utils.errors import UserError
from rptrain.utils.phases import is_sentence, phase


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class At:
    """A document that was made from a line."""

    line: int


ROW = json.dumps({"text": "Two and two is four."}) + "\n"


def file_of(folder: Path, rows: int, name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_text(ROW * rows)
    return path


def read(clock: Clock, tally: Tally, rows: int, seconds: float) -> Iterator[At]:
    """Documents that take so many seconds each."""
    for line in range(1, rows + 1):
        clock.now += seconds
        tally.total += 1
        yield At(line)


def reported(
    files: Sequence[Path], rows: Sequence[int], seconds: float, skipped: Sequence[int] = ()
) -> list[ReadProgress]:
    clock, readings = Clock(), list[ReadProgress]()
    watch = Watch(files, readings.append, clock)
    for number, count in enumerate(rows):
        if number not in skipped:
            tally = Tally()
            watch.begin(number, tally)
            assert len([*watch.documents(read(clock, tally, count, seconds))]) == count
    return readings


def test_rows_rate_and_the_time_that_is_left(tmp_path):
    readings = reported([file_of(tmp_path, 1000)], [1000], 0.05)
    middle = readings[len(readings) // 2]
    assert middle.rate == pytest.approx(20) and middle.share == pytest.approx(middle.rows / 1000)
    assert middle.left == pytest.approx((1000 - middle.rows) * 0.05, abs=0.1)
    assert readings[-1] == ReadProgress(
        "rows.jsonl", 1, 1, 1000, pytest.approx(50), pytest.approx(20), 1.0, None, done=True
    )
    assert len(readings) <= 50 / PAUSE + 2


def test_neither_rate_nor_time_left_in_the_first_second(tmp_path):
    for reading in reported([file_of(tmp_path, 1000)], [1000], 0.05):
        known = [reading.rate is not None, reading.left is not None or reading.done]
        assert known == [reading.seconds > FIRST] * 2 or FIRST <= reading.seconds < FIRST + 2 * PAUSE


def test_the_pace_is_that_of_the_last_rows(tmp_path):
    clock, readings, tally = Clock(), list[ReadProgress](), Tally()
    watch = Watch([file_of(tmp_path, 3 * ROWS)], readings.append, clock)
    watch.begin(0, tally)
    for row, _ in enumerate(watch.documents(read(clock, tally, 3 * ROWS, 0.01))):
        clock.now += 0.09 * (row > ROWS)
    before = next(reading for reading in readings if reading.rows > 4000)
    assert before.rate == pytest.approx(100, rel=0.02)
    assert readings[-2].rate == pytest.approx(10, rel=0.02) and readings[-2].left == pytest.approx(0.1, abs=0.2)


def test_rows_that_are_finished_many_at_once_have_a_steady_pace(tmp_path):
    """As where a machine is so slow that a thousand of them take longer than the pace is measured."""
    clock, readings, tally = Clock(), list[ReadProgress](), Tally()
    watch = Watch([file_of(tmp_path, 20_000)], readings.append, clock)
    watch.begin(0, tally)
    for row, _ in enumerate(watch.documents(read(clock, tally, 20_000, 0.001))):
        clock.now += 30 * (row % 1000 == 999)
    steady = [one for one in readings if 2000 < one.rows < 18_000]
    for one in steady:
        assert one.rate == pytest.approx(1000 / 31, rel=0.5)
        assert one.left == pytest.approx((20_000 - one.rows) * 31 / 1000, rel=0.5)


def test_several_files_have_one_share_and_one_time_left(tmp_path):
    files = [file_of(tmp_path, 100 * n, f"{n}.jsonl") for n in (1, 2, 3)]
    readings = reported(files, [100, 200, 300], 0.1)
    shares = [reading.share for reading in readings if reading.share is not None]
    assert shares == sorted(shares) and shares[-1] == 1
    second = next(reading for reading in readings if reading.number == 2 and reading.rows >= 100)
    assert second.share == pytest.approx(200 / 600, abs=0.01) and second.left == pytest.approx(40, abs=0.5)


def test_cached_files_do_not_count_as_fast_ones(tmp_path):
    files = [file_of(tmp_path, 1000, f"{n}.jsonl") for n in range(3)]
    readings = reported(files, [1000] * 3, 0.01, skipped=[1])
    last = next(reading for reading in readings if reading.number == 3 and reading.rows >= 500)
    assert last.left == pytest.approx(5, abs=0.1) and last.rate == pytest.approx(100)


def test_rows_that_give_no_documents_are_counted(tmp_path):
    clock, readings, tally = Clock(), list[ReadProgress](), Tally()
    watch = Watch([file_of(tmp_path, 100)], readings.append, clock)
    watch.begin(0, tally)
    for example in watch.examples(read(clock, tally, 100, 0.1)):
        tally.add(example.line, "refused")
    assert readings[-1].rows >= 95 and readings[-1].rate == pytest.approx(10) and readings[-1].left is None


def test_a_file_that_disappears_has_no_time_left(tmp_path):
    path = file_of(tmp_path, 100)
    clock, readings, tally = Clock(), list[ReadProgress](), Tally()
    watch = Watch([path], readings.append, clock)
    path.unlink()
    watch.begin(0, tally)
    assert len([*watch.documents(read(clock, tally, 100, 0.1))]) == 100
    assert {reading.left for reading in readings} == {None} and readings[-1].done


READING = ReadProgress("a.jsonl", 1, 1, 24_000, 9.6, 2500.0, 0.404, 14.2)


@pytest.mark.parametrize(
    ("reading", "sentence"),
    [
        (READING, "reading a.jsonl: 24,000 rows, 2,500 rows/s, 40%, 14 s left"),
        (ReadProgress("a: b\n.txt", 2, 5, 1, 0.1, None, None, None), "reading a: b␊.txt (2 of 5): 1 row"),
        (ReadProgress("a.json", 1, 1, 0, 9.6, 2.5, 0.996, None), "reading a.json: 0 rows, 2.5 rows/s, 99%"),
        (replace(READING, share=1.0, left=None, done=True), "reading a.jsonl: 24,000 rows, 2,500 rows/s, 100%"),
    ],
)
def test_sentences(reading: ReadProgress, sentence: str):
    with phase("reading data", unit="") as shown:
        reading.show(shown)
        assert shown.sentence() == sentence and is_sentence(sentence)
    assert "rows, 2,500 rows/s)" in shown.summary() or reading.rate != 2500


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.unknown", "a.csv"])
def test_the_place_of_rows_in_a_file_of_lines(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"1\n333\n" + b"\n" * 3 + b"x" * 91)
    position = Position(path)
    assert [position.share(line) for line in (0, 1, 2, 2, 5, 6, 7)] == [0, 0.02, 0.06, 0.06, 0.09, 1, 1]
    assert share_of(path, 2, 0) == 0.06


def test_the_place_of_rows_in_lists_tables_and_texts(tmp_path, monkeypatch):
    monkeypatch.setattr("rptrain.data.tables.rows_in", lambda path: 200)
    rows = [{"text": f"row {n:03}"} for n in range(200)]
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=2))
    (tmp_path / "a.txt").write_text("a text")
    assert Position(tmp_path / "a.json").share(50) == pytest.approx(0.25, abs=0.01)
    assert Position(tmp_path / "a.parquet").share(50) == 0.25
    assert Position(tmp_path / "a.txt").share(1) == 1
    (tmp_path / "b.json").write_text('[{"text": ')
    assert Position(tmp_path / "b.json").share(1) is None
    with pytest.raises((UserError, OSError)):
        Position(tmp_path / "none.jsonl").share(1)
