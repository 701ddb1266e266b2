"""Every kind of file gives the same examples, and says what is wrong with it."""

import json
import shutil

import pytest

from rptrain.data.files import files_of, rows_of
from rptrain.data.formats import read
from rptrain.errors import UserError

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


def as_parquet(path, rows):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


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


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow"])
def test_nested_columns_and_more_rows_than_are_read_at_once(tmp_path, name):
    WRITERS[name](tmp_path / name, CHATS)
    examples = list(read(tmp_path / name))
    assert [example.line for example in examples] == list(range(1, 2501))
    assert examples[2400].messages == [{"role": "user", "content": "2400?"}, {"role": "assistant", "content": "4"}]


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
        (6, dict),
        (7, dict),
    ]
    assert str(rows[2][1]) == "3 fields, but 2 columns"
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


def names_of(path, split="train"):
    return [str(file.relative_to(path)) for file in files_of(path, split)]


def test_folders_of_files(tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("train-00001-of-00002.parquet", "train-00000-of-00002.parquet", "test-00000-of-00001.parquet"):
        (tmp_path / "data" / name).touch()
    (tmp_path / "README.md").touch()
    (tmp_path / "dataset_infos.json").touch()
    assert names_of(tmp_path) == ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]
    assert names_of(tmp_path, "test") == ["data/test-00000-of-00001.parquet"]
    with pytest.raises(UserError, match="no data files of the split 'dev' are in this folder: test-00000-of-00001"):
        files_of(tmp_path, "dev")
    (tmp_path / "plain").mkdir()
    for name in ("b.jsonl", "a.jsonl", "notes.md", "trainer.csv"):
        (tmp_path / "plain" / name).touch()
    assert names_of(tmp_path / "plain") == ["a.jsonl", "b.jsonl", "trainer.csv"]
    with pytest.raises(UserError, match="no data files of the split 'test'"):
        files_of(tmp_path / "plain", "test")


def described(folder, rows, name="data-00000-of-00001.arrow"):
    """What `Dataset.save_to_disk` leaves: a stream of record batches, and a description of them."""
    folder.mkdir(parents=True)
    as_arrow(folder / name, rows)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}], "_split": "train"}))
    (folder / "dataset_info.json").write_text("{}")


def test_what_datasets_saves(tmp_path):
    described(tmp_path / "one", ROWS)
    assert names_of(tmp_path / "one") == ["data-00000-of-00001.arrow"]
    for split in ("train", "test"):
        described(tmp_path / "two" / split, ROWS)
    (tmp_path / "two/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert names_of(tmp_path / "two", "test") == ["test/data-00000-of-00001.arrow"]
    with pytest.raises(UserError, match="there is no split 'dev'; it has train, test"):
        files_of(tmp_path / "two", "dev")
    (tmp_path / "one/state.json").write_text('{"_data_files": [{"filename": "../../secret.arrow"}]}')
    assert names_of(tmp_path / "one") == ["secret.arrow"], "files outside the folder are not looked at"
    (tmp_path / "one/state.json").write_text("[]")
    with pytest.raises(UserError, match="not what `datasets` writes"):
        files_of(tmp_path / "one")


def test_datasets_itself(tmp_path):
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": made, "test": made.select([1])}).save_to_disk(str(tmp_path / "saved"), num_proc=None)
    (file,) = files_of(tmp_path / "saved", "test")
    assert [row for _, row in rows_of(file)] == ROWS[1:2]
    shutil.rmtree(tmp_path / "saved")
    made.save_to_disk(str(tmp_path / "saved"), num_shards=2)
    assert [row for file in files_of(tmp_path / "saved") for _, row in rows_of(file)] == ROWS
