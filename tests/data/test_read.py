"""Every kind of file gives the same examples, and says what is wrong with it."""

import gzip
import json
import os
import subprocess
import sys

import pytest

from rptrain.data import json_list, tables
from rptrain.data import read as reading
from rptrain.data.formats import read
from rptrain.data.read import rows_of
from rptrain.utils.errors import UserError

ROWS = [{"instruction": f'Add {n}, "and"\n{n}.', "input": "", "output": f"{2 * n} é"} for n in range(3)]
CHATS = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "4", "name": None}], "id": n}
    for n in range(2500)
]


def as_csv(path, rows):
    import csv

    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def as_parquet(path, rows, as_text=False):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(rows)
    if as_text:  # bytes, whether they are UTF-8 or not
        table = pyarrow.table(
            {name: table[name].combine_chunks().view(pyarrow.string()) for name in table.column_names}
        )
    pyarrow.parquet.write_table(table, path)


def as_arrow(path, rows, kind="stream"):
    import pyarrow

    table = pyarrow.Table.from_pylist(rows)
    open_writer = pyarrow.ipc.new_stream if kind == "stream" else pyarrow.ipc.new_file
    with open_writer(path, table.schema) as writer:
        writer.write_table(table)


WRITERS = {
    "rows.jsonl": lambda path, rows: path.write_text("\n".join(map(json.dumps, rows))),
    "rows.json": lambda path, rows: path.write_text(json.dumps(rows, indent=1)),
    "rows.csv": as_csv,
    "rows.parquet": as_parquet,
    "rows.arrow": as_arrow,
    "file.arrow": lambda path, rows: as_arrow(path, rows, "file"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_type_gives_the_same(tmp_path, name):
    WRITERS[name](tmp_path / name, ROWS)
    examples = list(read(tmp_path / name))
    said = [[message["content"] for message in example.messages or []] for example in examples]
    assert said == [[row["instruction"], row["output"]] for row in ROWS]
    lines = {"rows.csv": [3, 5, 7]}  # a header, and a line break in each row
    assert [example.line for example in examples] == lines.get(name, [1, 2, 3])


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_an_arrow_file_that_cannot_be_mapped(tmp_path, monkeypatch, kind):
    import pyarrow

    def unmapped(path):
        raise OSError("Memory mapping file failed: No such device")

    as_arrow(tmp_path / "rows.arrow", ROWS, kind)
    monkeypatch.setattr(pyarrow, "memory_map", unmapped)
    assert [row for rows in tables._read_arrow(tmp_path / "rows.arrow") for row in rows] == ROWS


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
def test_nested_columns_and_more_rows_than_are_read_at_once(tmp_path, name):
    WRITERS[name](tmp_path / name, CHATS)
    examples = list(read(tmp_path / name))
    assert [example.line for example in examples] == list(range(1, 2501))
    assert examples[2400].messages == [{"role": "user", "content": "2400?"}, {"role": "assistant", "content": "4"}]


def test_a_json_list_is_read_one_item_at_a_time(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('\ufeff \n[{"a": {"b": 1, "b": 2}} ,\n{"a": 1},3 ] \n', encoding="utf-8")
    (first, error), *others = rows_of(path)
    assert (first, str(error)) == (1, "an object has the key 'b' twice") and others == [(2, {"a": 1}), (3, 3)]
    for text in ("[1,]", "[1 2]", "[1", "[", "[1] 2", "[,]", '[{"a": 1, "a": }]'):
        path.write_text(text)
        with pytest.raises(UserError, match="not a JSON list"):
            list(rows_of(path))
    path.write_text("[ ]")
    assert not list(rows_of(path))


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "file.arrow"])
def test_tables_with_columns_that_do_no_good(tmp_path, name):
    """One name for two columns is refused; times that Python does not have are not looked at."""
    import pyarrow
    from pyarrow.parquet import write_table

    def write(arrays, names):
        table = pyarrow.Table.from_arrays(arrays, names=names)
        if name == "rows.parquet":
            write_table(table, tmp_path / name)
        else:
            open_writer = pyarrow.ipc.new_file if name == "file.arrow" else pyarrow.ipc.new_stream
            with open_writer(tmp_path / name, table.schema) as writer:
                writer.write_table(table)

    texts = pyarrow.array(["one", "two", "six"])
    write([texts, texts], ["text", "text"])
    with pytest.raises(UserError, match="more than one column named 'text': rename all but one"):
        list(rows_of(tmp_path / name))
    write([texts, pyarrow.array([2**62] * 3, pyarrow.timestamp("us"))], ["text", "when"])
    expected = [(1, {"text": "one"}), (2, {"text": "two"}), (3, {"text": "six"})]
    assert list(rows_of(tmp_path / name)) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b'{"text": "a"}', mtime=0), r"compressed \(gzip\): unpack it"),
        ('{"text": "a"}'.encode("utf-16"), "UTF-16: write it as UTF-8"),
        (b"PAR1\x15", "Parquet: name it .parquet"),
    ],
)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.txt", "rows"])
def test_files_that_are_no_text(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name}: this file is {message}"):
        list(rows_of(tmp_path / name))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt"])
def test_text_that_is_not_utf_8(tmp_path, name):
    row = '{"text": "café"}'
    (tmp_path / name).write_bytes((f"[{row}]" if name == "a.json" else row).encode("latin-1"))
    with pytest.raises(UserError, match=r"not UTF-8 text \(byte 0xe9\): save the file as UTF-8, for example"):
        list(read(tmp_path / name))


@pytest.mark.parametrize("name", ["a.json", "a.txt"])
@pytest.mark.parametrize("bad", [b"caf\xe9", b"\xff\xfe\x00", "é".encode()[:1]], ids=["latin", "utf-16", "cut"])
def test_the_line_of_text_that_is_not_utf_8(tmp_path, monkeypatch, name, bad):
    """Also in a file that is read in pieces, one of which ends within a character."""
    monkeypatch.setattr("rptrain.data.read.COUNTED", 8)
    monkeypatch.setattr("rptrain.data.json_list.PIECE", 8)
    (tmp_path / name).write_bytes('["ééé",\n"ééé",\n"'.encode() + bad)
    byte = next(byte for byte in bad if byte > 127)
    with pytest.raises(UserError, match=rf"{name}:3: not UTF-8 text \(byte 0x{byte:02x}\): save"):
        list(rows_of(tmp_path / name))


def test_a_row_with_text_that_is_not_utf_8_is_bad(tmp_path):
    row = b'{"text": "%s"}\n'
    texts = [b"a", b"\xff\xfe\x00", b"b", b"caf\xe9", b"c"]
    (tmp_path / "a.jsonl").write_bytes(b"".join(row % text for text in texts) + '{"text": "d"}'.encode("utf-16"))
    as_parquet(tmp_path / "a.parquet", [{"text": text} for text in texts], as_text=True)
    for name, lines in (("a.jsonl", {2: "ff", 4: "e9", 6: "ff"}), ("a.parquet", {2: "ff", 4: "e9"})):
        bad = {line: str(row) for line, row in rows_of(tmp_path / name) if not isinstance(row, dict)}
        assert bad.keys() == lines.keys()
        assert all(bad[line].startswith(f"not UTF-8 text (byte 0x{byte}): ") for line, byte in lines.items())


def test_bad_json_is_described_without_the_words_of_python(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": \n{"text": -' + "9" * 5000 + "}\n")
    (tmp_path / "a.json").write_text('[{"text": ' + "9" * 5000 + '}, {"text": "a"}]')
    said = [str(row) for name in ("a.jsonl", "a.json") for _, row in rows_of(tmp_path / name)]
    assert said == ["not valid JSON: Expecting value in column 9", *["a number has 5,000 digits"] * 2, "{'text': 'a'}"]


def test_a_row_that_is_nested_too_deeply(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ' + "[" * 100_000)
    ((line, row),) = rows_of(tmp_path / "a.jsonl")
    assert line == 1 and str(row).startswith("lists or objects are nested too deeply")
    (tmp_path / "a.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"a\.json: lists or objects are nested too deeply"):
        list(rows_of(tmp_path / "a.json"))


def test_a_list_as_json_text_in_a_table(tmp_path):
    as_csv(tmp_path / "rows.csv", [{"messages": json.dumps(CHATS[0]["messages"])}])
    (example,) = read(tmp_path / "rows.csv")
    assert example.messages == [{"role": "user", "content": "0?"}, {"role": "assistant", "content": "4"}]


def test_bad_rows_of_csv(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes(b'text,more\none,1\ntwo\n\nthree,3,3\n"caf\xe9",4\n' + b"a" * 200_000 + b",5\n")
    rows = list(rows_of(path))
    assert [(line, type(row)) for line, row in rows] == [
        (2, dict),
        (3, ValueError),
        (5, ValueError),
        (6, ValueError),
        (7, dict),
    ]
    assert str(rows[2][1]) == "3 fields, but 2 columns"
    assert str(rows[3][1]).startswith("not UTF-8 text (byte 0xe9): save the file as UTF-8")
    assert [example.line for example in read(path)] == [2, 7], "bytes that are not UTF-8 make a row bad, not the file"


@pytest.mark.parametrize(
    ("name", "message"),
    [("a.parquet", "not a Parquet file"), ("a.arrow", "not an Arrow file"), ("a.csv", "a.csv:2: not CSV")],
)
def test_files_that_are_damaged(tmp_path, name, message):
    (tmp_path / name).write_bytes(b'text,"more\n"x"y,\n')
    with pytest.raises(UserError, match=message):
        list(rows_of(tmp_path / name))
    if name in WRITERS:
        WRITERS[name](tmp_path / name, CHATS)
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(UserError, match=message):
            list(rows_of(tmp_path / name))


@pytest.mark.parametrize("place", [0, 8])
def test_an_arrow_file_with_offsets_outside_of_it(tmp_path, place):
    """Arrow itself would take what lies there in memory, or the process would be killed."""
    import pyarrow
    from pyarrow import ipc

    table = pyarrow.table({"text": ["one", "four", "seven"]})
    with ipc.new_stream(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    whole = (tmp_path / "a.arrow").read_bytes()
    offsets = table.column("text").chunk(0).buffers()[1].to_pybytes()[:16]
    assert whole.count(offsets) == 1
    changed = bytearray(offsets)
    changed[place : place + 4] = (2**30).to_bytes(4, "little")
    (tmp_path / "a.arrow").write_bytes(whole.replace(offsets, changed))
    with pytest.raises(UserError, match=r"a\.arrow: not an Arrow file that can be read"):
        list(rows_of(tmp_path / "a.arrow"))


LARGE = "ab " * 700_000  # 2 MB, of which Parquet cannot decode 1,000 at once


def large_tables(path):
    """A few megabytes, which stand for gigabytes. Noise makes the files as large as `expansion` wants them."""
    import pyarrow
    from pyarrow import ipc, parquet

    def with_noise(column, nbytes=16_000_000):
        return {"text": column, "noise": [os.urandom(nbytes // len(column)) for _ in range(len(column))]}

    def write_arrow(name, column, compression=None, nbytes=16_000_000):
        batch = pyarrow.record_batch(with_noise(column, nbytes))
        with ipc.new_stream(path / name, batch.schema, options=ipc.IpcWriteOptions(compression=compression)) as writer:
            writer.write_batch(batch)

    repeated = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1000, pyarrow.int32()), [LARGE])
    parquet.write_table(pyarrow.table(with_noise(repeated)), path / "dictionary.parquet", store_schema=False)
    write_arrow("dictionary.arrow", repeated)
    write_arrow("runs.arrow", pyarrow.RunEndEncodedArray.from_arrays(pyarrow.array([1000], pyarrow.int32()), [LARGE]))
    views = pyarrow.ListViewArray.from_arrays([0] * 1000, [1000] * 1000, pyarrow.array(["ab" * 5000] * 1000))
    write_arrow("views.arrow", views)
    one = pyarrow.array(["a" * (300 << 20)])
    write_arrow("row.arrow", one, "zstd")
    write_arrow("batch.arrow", pyarrow.array(["a" * (1 << 20)] * 100), "zstd", nbytes=0)
    return path


FIRST = """\
import sys
from itertools import islice
from pathlib import Path
from rptrain.data.read import rows_of

rows = [row["text"] for _, row in islice(rows_of(Path(sys.argv[1])), 20)]
peak = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]  # KiB
print(len(rows), len(rows[-1]), int(peak) >> 10)
"""


@pytest.mark.long
def test_values_that_are_stored_once_are_read_a_few_rows_at_a_time(tmp_path):
    large_tables(tmp_path)
    for name, length in (
        ("dictionary.parquet", len(LARGE)),
        ("dictionary.arrow", len(LARGE)),
        ("runs.arrow", len(LARGE)),
        ("views.arrow", 1000),
    ):
        command = [sys.executable, "-P", "-c", FIRST, str(tmp_path / name)]
        count, found, peak = map(int, subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.split())
        assert (count, found) == (20, length)
        assert peak < 400, "MiB; at once they would take 2 GB"


@pytest.mark.long
def test_what_is_decoded_to_too_much(tmp_path, monkeypatch):
    large_tables(tmp_path)
    with pytest.raises(UserError, match=r"row\.arrow: row 1 is decoded to 315 MiB, more than 256 MiB: split it"):
        list(rows_of(tmp_path / "row.arrow"))
    monkeypatch.setattr(tables, "MEMORY", 64 << 20)
    with pytest.raises(UserError, match=r"batch\.arrow: decoding the rows after row 0 needs more than 64\.0 MiB"):
        list(rows_of(tmp_path / "batch.arrow"))


def test_bytes_of_all_types_of_columns(tmp_path):
    import pyarrow as pa
    from pyarrow import ipc

    columns = {
        "map": pa.array([[("a", 1), ("b", 2)], None], pa.map_(pa.string(), pa.int64())),
        "union": pa.UnionArray.from_dense(
            pa.array([0, 1], pa.int8()), pa.array([0, 0], pa.int32()), [pa.array(["x"]), pa.array([1])]
        ),
        "decimal": pa.array([1, None], pa.decimal128(5, 2)),
        "null": pa.nulls(2),
        "fixed": pa.array([[1, 2], [3, 4]], pa.list_(pa.int8(), 2)),
        "lists": pa.DictionaryArray.from_arrays([0, None], pa.array([[1, 2]])),
        "words": pa.DictionaryArray.from_arrays(pa.array([0, None], pa.int8()), ["x"]),
        "view": pa.array(["a", None], pa.string_view()),
        "large": pa.array([b"a", None], pa.large_binary()),
        "uuid": pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"a" * 16] * 2, pa.binary(16))),
        "deep": pa.array([{"a": [{"b": "c"}]}, None]),
    }
    batch = pa.record_batch(columns)
    with ipc.new_stream(tmp_path / "a.arrow", batch.schema) as writer:
        writer.write_batch(batch)
    assert list(rows_of(tmp_path / "a.arrow")) == list(enumerate(batch.to_pylist(), 1))


@pytest.mark.sample(1, gate=4)
@pytest.mark.parametrize(
    ("name", "beginning", "message"),
    [
        ("a.jsonl", b'{"text": "one"}\n', r"a\.jsonl:2: this line has more than 256 MiB: write a row on each line"),
        ("a.csv", b"text\none\n", r"a\.csv:3: this line has more than 256 MiB"),
        (
            "a.json",
            b"[",
            r"a\.json: not a JSON list: row 1 has a mistake, or more than 1.00 MiB",
        ),
        ("a.txt", b"one", r"a\.txt has 40\.0 GiB, and at most 2\.00 GiB are read whole: split it into several files"),
    ],
)
def test_large_files_without_lines(tmp_path, monkeypatch, name, beginning, message):
    (tmp_path / name).write_bytes(beginning)
    os.truncate(tmp_path / name, 40 << 30)
    monkeypatch.setattr(reading, "check_holes", lambda file, path: None)  # as if somebody had written so many zeros
    monkeypatch.setattr(json_list, "MOST", 1 << 20)
    with pytest.raises(UserError, match=message):
        list(rows_of(tmp_path / name))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_text_with_holes(tmp_path, name):
    (tmp_path / name).write_bytes(b"text\n" * 1000)
    os.truncate(tmp_path / name, 40 << 30)
    with pytest.raises(UserError, match=r"is incomplete: nothing was written at byte [\d,]* of its 40\.0 GiB; copy"):
        list(rows_of(tmp_path / name))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt", "a.parquet", "a.arrow"])
def test_pipes(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match="pipe"):
        list(rows_of(tmp_path / name))
