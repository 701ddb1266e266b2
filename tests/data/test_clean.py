"""Copies of data files without their bad rows: no row is lost, changed or written twice."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import ipc, parquet

from rptrain.config.resolve import resolve
from rptrain.data import clean as module
from rptrain.data.clean import clean
from rptrain.data.read import rows_of
from rptrain.data.row_text import as_bytes
from rptrain.utils.errors import UserError

GOOD, BAD = b'{"text": "a"}', b'{"text": 5}'


def texts(*values: object) -> pyarrow.RecordBatch:
    """A table with these texts, and columns that JSON does not have."""
    count = len(values)
    when = pyarrow.array([2**62, *range(count - 1)], pyarrow.timestamp("us"))
    said = pyarrow.array([[{"role": "user", "content": "é"}]] * count)
    columns = [pyarrow.array(values), when, said, pyarrow.array([b"\xff"] * count)]
    return pyarrow.record_batch(columns, ["text", "when", "messages", "image"])


def bad_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_are_copied_to_the_byte(tmp_path: Path) -> None:
    lines = [
        *(b"\xef\xbb\xbf" + GOOD + b"\r\n", b"\n", BAD + b"\n", b'{"text": "\xc3\xa9",  "id": 1e400}\n', b"{\r\n"),
        *(b'{"text": "\xe9"}\n', b'{"text": "a", "text": "b"}\n', b"[1]\n", b'{"text": "\\ud83d"}\n', GOOD),
    ]
    source, to = tmp_path / "rows.jsonl", tmp_path / "good.jsonl"
    source.write_bytes(b"".join(lines))
    cleaned = clean(source, to)
    assert to.read_bytes() == lines[0] + lines[3] + lines[9]
    assert (cleaned.rows, cleaned.good, cleaned.bad) == (9, 3, 6) and cleaned.first[0] == "3: `text` is not text"
    found = bad_rows(tmp_path / "good.bad.jsonl")
    assert [row["line"] for row in found] == [3, 5, 6, 7, 8, 9] and found[2]["reason"].startswith("not UTF-8 text")
    for row in found:
        value, line = row["row"], lines[row["line"] - 1]
        assert as_bytes(value) == line.rstrip() if isinstance(value, str) else value == json.loads(line)


def test_values_of_a_list_keep_their_text(tmp_path: Path) -> None:
    source, to = tmp_path / "rows.json", tmp_path / "good.json"
    source.write_text('\n[{"text": "a",\n  "n": 1.50}, {"text": 1} ,{"text": "b", "text": "c"},{"text":"d"}  ]\n')
    clean(source, to)
    assert to.read_text() == '[\n{"text": "a",\n  "n": 1.50},\n{"text":"d"}\n]\n'
    first, second = bad_rows(tmp_path / "good.bad.jsonl")
    assert first == {"line": 2, "reason": "`text` is not text", "row": {"text": 1}}
    assert second["line"] == 3 and second["row"] == '{"text": "b", "text": "c"}'


def test_records_of_csv_keep_their_quotes(tmp_path: Path) -> None:
    source, to = tmp_path / "rows.csv", tmp_path / "good.csv"
    header, good = b'\xef\xbb\xbf"text",id\r\n', b'"a ""b""\r\nc",1\r\n'
    source.write_bytes(header + good + b"a,2,3\r\n\r\n  ,3\r\n\xe9,4\r\nlast,5")
    clean(source, to)
    assert to.read_bytes() == header + good + b"last,5"
    found = bad_rows(tmp_path / "good.bad.jsonl")
    assert [(row["line"], row["row"]) for row in found] == [
        (4, "a,2,3"),
        (6, {"text": "  ", "id": "3"}),
        (7, "\udce9,4"),
    ]


def write_parquet(path: Path, batch: pyarrow.RecordBatch) -> None:
    parquet.write_table(pyarrow.Table.from_batches([batch]), path, row_group_size=3)


def write_stream(path: Path, batch: pyarrow.RecordBatch) -> None:
    with ipc.new_stream(path, batch.schema) as writer:
        writer.write_batch(batch.slice(0, 3))
        writer.write_batch(batch.slice(3))


def write_file(path: Path, batch: pyarrow.RecordBatch) -> None:
    with ipc.new_file(path, batch.schema) as writer:
        writer.write_batch(batch)


def read_arrow(path: Path) -> pyarrow.Table:
    opened = ipc.open_file if path.read_bytes().startswith(b"ARROW1") else ipc.open_stream
    return opened(path.read_bytes()).read_all()


@pytest.mark.parametrize(
    ("name", "write", "read"),
    [
        ("rows.parquet", write_parquet, parquet.read_table),
        ("rows.arrow", write_stream, read_arrow),
        ("rows.arrow", write_file, read_arrow),
    ],
    ids=["parquet", "stream", "file"],
)
def test_tables_keep_all_columns(
    tmp_path: Path, name: str, write: Callable[..., None], read: Callable[[Path], pyarrow.Table]
) -> None:
    batch = texts(" ", "a", "b", "", "c", "d", None)
    batch = batch.replace_schema_metadata({"made": "by hand"})
    write(tmp_path / name, batch)
    cleaned = clean(tmp_path / name, to := (tmp_path / "good").with_suffix(Path(name).suffix), "text")
    assert (cleaned.good, cleaned.bad) == (4, 3)
    expected = pyarrow.Table.from_batches([batch.slice(1, 2), batch.slice(4, 2)])
    assert read(to).equals(expected) and read(to).schema.metadata[b"made"] == b"by hand"
    found = bad_rows(tmp_path / "good.bad.jsonl")
    assert [(row["line"], row["row"]["text"]) for row in found] == [(1, " "), (4, ""), (7, None)]
    assert found[0]["row"]["when"] == 2**62 and found[0]["row"]["image"] == "\udcff"


def test_text_of_a_table_that_is_not_utf8(tmp_path: Path) -> None:
    kind = pyarrow.list_(pyarrow.struct([("content", pyarrow.string())]))
    raw = pyarrow.list_(pyarrow.struct([("content", pyarrow.binary())]))
    said = pyarrow.array([[{"content": b"a"}], [{"content": b"\xe9"}]], raw).view(kind)
    table = pyarrow.table({"text": ["a", "b"], "said": said})
    parquet.write_table(table, tmp_path / "rows.parquet")
    assert clean(tmp_path / "rows.parquet", tmp_path / "good.parquet").bad == 1
    (found,) = bad_rows(tmp_path / "good.bad.jsonl")
    assert found["row"] == {"text": "b", "said": [{"content": "\udce9"}]}


def test_rows_that_the_template_refuses(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    rows = [{"messages": [{"role": "user", "content": said}, {"role": "assistant", "content": "b"}]} for said in "aab"]
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    strict = (
        "{{ raise_exception('not b') if messages[0].content == 'b' }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    text = (
        f'[model]\npath = "tiny-tasks"\n[[data.train]]\npath = "{source}"\nformat = "messages"\n'
        f"[data]\nassistant_only_loss = false\nchat_template = {json.dumps(strict)}\n"
    )
    config = resolve(Path("c.toml"), text=text).config
    assert clean(source, tmp_path / "format.jsonl").bad == 0 and not (tmp_path / "format.bad.jsonl").exists()
    cleaned = clean(source, tmp_path / "good.jsonl", config=config)
    assert cleaned.bad == 1 and "not b" in cleaned.first[0]
    assert [row for _, row in rows_of(tmp_path / "good.jsonl")] == rows[:2]
    assert bad_rows(tmp_path / "good.bad.jsonl")[0]["row"] == rows[2]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD + b"\n" + BAD + b"\n")
    return path


def test_what_is_refused(source: Path, tmp_path: Path) -> None:
    for name in ("link.jsonl", "hard.jsonl"):
        (os.symlink if name.startswith("link") else os.link)(source, tmp_path / name)
    (tmp_path / "there.jsonl").touch()
    (tmp_path / "beside.bad.jsonl").touch()
    (tmp_path / "text.txt").touch()
    (tmp_path / "all.jsonl").write_bytes(BAD)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for name in ("rows.jsonl", "link.jsonl", "hard.jsonl"):
        with pytest.raises(UserError, match="is the file to clean itself"):
            clean(source, tmp_path / name, force=True)
    for name in ("there.jsonl", "beside.jsonl"):
        with pytest.raises(UserError, match="exists: name another file, or add --force"):
            clean(source, tmp_path / name)
    for given, to, message in [
        (source, tmp_path / "new.csv", "its name must end with .jsonl"),
        (source, tmp_path, "is a folder: name the file"),
        (tmp_path, tmp_path / "new.jsonl", "is a folder: clean its files"),
        (tmp_path / "text.txt", tmp_path / "new.txt", "one document"),
        (tmp_path / "none.jsonl", tmp_path / "new.jsonl", "cannot be read: No such file"),
        (tmp_path / "all.jsonl", tmp_path / "new.jsonl", "(?s)1 of 1 rows are bad.*Nothing was written"),
        (source, tmp_path / "none" / "new.jsonl", "No such file"),
    ]:
        with pytest.raises((UserError, FileNotFoundError), match=message):
            clean(given, to, "text")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_force_replaces_both_files(source: Path, tmp_path: Path) -> None:
    to, bad = tmp_path / "good.jsonl", tmp_path / "good.bad.jsonl"
    to.write_text("old")
    bad.write_text("old")
    source.chmod(0o600)
    clean(source, to, force=True)
    assert to.read_bytes() == GOOD + b"\n" and bad_rows(bad)[0]["line"] == 2
    source.write_bytes(GOOD)
    assert clean(source, to, force=True).bad_path is None and to.read_bytes() == GOOD and not bad.exists()
    assert stat.S_IMODE(clean_mode(source, tmp_path)) == 0o600


def clean_mode(source: Path, folder: Path) -> int:
    clean(source, folder / "new.jsonl")
    return (folder / "new.jsonl").stat().st_mode


def test_nothing_is_written_if_the_file_changes_meanwhile(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = module._copy

    def late(*given: Any) -> int:
        source.write_bytes(BAD + b"\n" + GOOD + b"\n")
        return copy(*given)

    monkeypatch.setattr(module, "_copy", late)
    with pytest.raises(UserError, match="was changed while it was read"):
        clean(source, tmp_path / "good.jsonl")
    assert os.listdir(tmp_path) == ["rows.jsonl"]
