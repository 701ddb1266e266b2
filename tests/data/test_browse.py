"""Pages of the data browser: which rows they have, and what is counted."""

import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from rptrain.config.resolve import resolve
from rptrain.config.schema import Config
from rptrain.data import browse
from rptrain.data.excerpt import Limits


def config_of(*paths: Path, max_length: int = 26, extra: str = "") -> Config:
    sets = "".join(f"[[data.train]]\npath = {json.dumps(str(path))}\n" for path in paths)
    text = f'[model]\npath = "tiny-tasks"\n{sets}[data]\nmax_length = {max_length}\n{extra}'
    return resolve(Path("c.toml"), text=text).config


def chat(answer: str) -> str:
    said = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": said})


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([chat("cba"), '{"messages": []}', chat("x" * 99), *[chat("cba")] * 7]))
    return path


def test_pages_have_all_rows_in_order(rows: Path) -> None:
    config = config_of(rows)
    pages = [browse.page(config, 0, first, 4, False) for first in (0, 4, 8, 99)]
    lines = [[row.place.rpartition(":")[2] for row in page.rows] for page in pages]
    assert lines == [["1", "2", "3", "4"], ["5", "6", "7", "8"], ["9", "10"], ["10"]]
    first = pages[0]
    assert (first.read, first.total, first.whole, first.sets) == (10, 10, True, (str(rows),))
    good, bad, long, _ = first.rows
    assert not good.problem and [part.text for part in good.parts if part.supervised] == ["cba<|end|>"]
    assert bad.parts == () and "messages" in bad.problem and bad.tokens == 0 and bad.written == '{"messages": []}'
    assert not any(row.written for page in pages for row in page.rows if row.place != bad.place)
    assert long.problem == f"truncated by {long.tokens - 26} tokens" and sum(part.supervised for part in long.parts)
    assert first.span == (min(row.tokens for page in pages for row in page.rows if row.parts), long.tokens)
    assert first.counts == (("bad", 1), ("longer than max_length", 1))
    bounds = [bound for bound, _ in first.histogram]
    assert 26 in bounds and bounds == sorted(bounds) and sum(count for _, count in first.histogram) == 9
    assert first.histogram[-1][0] >= long.tokens and first.histogram[-1][1] == 1


def test_rows_with_problems_alone(rows: Path) -> None:
    page = browse.page(config_of(rows, extra='overlong = "drop"'), 0, 0, 9, True)
    assert [row.place.rpartition(":")[2] for row in page.rows] == ["2", "3"] and page.total == 2
    assert page.rows[1].problem.startswith("left out: ") and page.read == 10
    short = browse.page(config_of(rows, max_length=2000), 0, 0, 9, True)
    assert short.counts == (("bad", 1),)


def test_a_row_without_a_supervised_token(rows: Path) -> None:
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": "abc"}]}) + f"\n{chat('cba')}\n")
    first, second = browse.page(config_of(rows), 0, 0, 9, False).rows
    assert first.problem == "left out: no supervised token" and first.tokens and not second.problem


def test_several_sets_and_large_files(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(f"{chat('cba')}\n" * 500)
    monkeypatch.setattr(browse, "BROWSING", Limits(rows=64, characters=1 << 20, seconds=60.0))
    page = browse.page(config_of(rows, other), 1, 60, 9, False)
    assert (page.number, page.read, page.whole, len(page.rows)) == (1, 64, False, 4)
    assert browse.page(config_of(Path("builtin:random")), 0, 0, 9, False).total == 0


@pytest.mark.parametrize(
    ("name", "content", "shown"),
    [
        ("rows.jsonl", b'{"text": "a"}\n{"te\xffxt": \n', '{"te\ufffdxt":'),
        ("rows.json", b'[{"text": "a"},\n{"text":\t5 }]', '{"text":\t5 }'),
        ("rows.csv", b'text,id\na,1\n"  ",2\n', '"  ",2'),
        ("long.jsonl", b'{"text": "a"}\n{"text": [' + b"1," * 9000, '{"text": [' + "1," * 1995 + "…"),
    ],
)
def test_what_a_bad_row_shows(tmp_path: Path, monkeypatch, name: str, content: bytes, shown: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / name
    path.write_bytes(content)
    (row,) = browse.page(config_of(path), 0, 0, 9, True).rows
    assert row.written == shown and row.problem


def test_a_bad_row_of_a_table_is_shown_as_json(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    table = pyarrow.table({"text": ["a", None, "b"], "n": [1, 2, 3]})
    parquet.write_table(table, tmp_path / "rows.parquet")
    (row,) = browse.page(config_of(tmp_path / "rows.parquet"), 0, 0, 9, True).rows
    assert row.written == '{"text": null, "n": 2}'
