"""Tables that are decoded to far more than their size are refused before their rows are read."""

import pytest

from rptrain.data import expansion
from rptrain.data.expansion import check_arrow, check_parquet
from rptrain.data.read import rows_of
from rptrain.utils.errors import UserError

LARGE = "ab " * 20_000
TIMES = 1000


@pytest.fixture(autouse=True)
def a_low_limit(monkeypatch):
    monkeypatch.setattr(expansion, "ALWAYS", 8 << 20)


def repeated(text=LARGE):
    import pyarrow

    return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * TIMES, pyarrow.int32()), [text])


def as_parquet(columns, path, **options):
    import pyarrow
    from pyarrow.parquet import write_table

    write_table(pyarrow.table(columns), path, **options)


def as_arrow(columns, path, compression=None):
    import pyarrow
    from pyarrow import ipc

    table = pyarrow.table(columns)
    with ipc.new_stream(path, table.schema, options=ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table)


def check(path):
    """Counts the batches."""
    if path.suffix == ".parquet":
        return sum(1 for _ in check_parquet(path, 1024))
    from pyarrow import ipc

    with ipc.open_stream(path) as batches:
        return sum(1 for _ in check_arrow(path, batches))


def refused(path):
    with pytest.raises(
        UserError, match=rf"{path.name}: the .* of this file are decoded to at least .*, more than 500 "
    ):
        check(path)


@pytest.mark.parametrize("store_schema", [False, True])
@pytest.mark.parametrize("name", ["text", "a.b"])
def test_a_dictionary_of_parquet(tmp_path, name, store_schema):
    as_parquet({name: repeated()}, tmp_path / "a.parquet", store_schema=store_schema)
    refused(tmp_path / "a.parquet")


def test_a_dictionary_in_lists_of_parquet(tmp_path):
    """The first rows have no values."""
    import pyarrow

    lists = pyarrow.ListArray.from_arrays([0] * 5000 + [TIMES], pyarrow.StructArray.from_arrays([repeated()], ["text"]))
    as_parquet({"messages": lists}, tmp_path / "a.parquet", store_schema=False)
    refused(tmp_path / "a.parquet")


def test_dictionaries_in_many_row_groups(tmp_path):
    """Each of them is decoded to less than the limit."""
    table = {"text": repeated()}
    as_parquet(table, tmp_path / "a.parquet", row_group_size=100, compression="zstd")
    refused(tmp_path / "a.parquet")


def test_columns_of_parquet_that_are_not_text(tmp_path):
    import pyarrow

    fixed = pyarrow.array([b"a" * 30_000] * TIMES, pyarrow.binary(30_000))
    for column in (pyarrow.nulls(2_000_000), fixed):
        as_parquet({"other": column}, tmp_path / "a.parquet", compression="zstd")
        refused(tmp_path / "a.parquet")


def test_compressed_text(tmp_path):
    table = {"text": ["a" * 300_000] * 100}
    as_parquet(table, tmp_path / "a.parquet", compression="zstd", use_dictionary=False)
    refused(tmp_path / "a.parquet")
    as_arrow(table, tmp_path / "a.arrow", "zstd")
    refused(tmp_path / "a.arrow")


def test_a_dictionary_of_arrow(tmp_path):
    as_arrow({"text": repeated()}, tmp_path / "a.arrow")
    refused(tmp_path / "a.arrow")


def test_no_row_is_read_of_a_file_that_is_refused(tmp_path):
    """With the real limit, in the process that reads."""
    table = {"text": repeated(LARGE * 100)}
    as_parquet(table, tmp_path / "a.parquet")
    as_arrow(table, tmp_path / "a.arrow")
    for name in ("a.parquet", "a.arrow"):
        with pytest.raises(
            UserError, match=rf"{name}: the .* of this file are decoded to at least 5\.59 GiB, more than"
        ):
            next(rows_of(tmp_path / name))


def test_a_small_size_is_accepted(tmp_path, monkeypatch):
    as_parquet({"text": repeated()}, tmp_path / "a.parquet")
    monkeypatch.setattr(expansion, "ALWAYS", len(LARGE + "12345678") * TIMES)
    assert check(tmp_path / "a.parquet") == 1
    monkeypatch.setattr(expansion, "ALWAYS", expansion.ALWAYS - 1)
    refused(tmp_path / "a.parquet")


def test_a_long_prompt_in_short_rows_is_accepted(tmp_path, monkeypatch):
    monkeypatch.setattr(expansion, "ALWAYS", 0)
    prompt = {"role": "system", "content": "You are a helper. " * 115}
    rows = [[prompt, {"role": "user", "content": f"What is {n} + {n}?"}] for n in range(10_000)]
    table = {"messages": rows}
    as_parquet(table, tmp_path / "a.parquet")
    as_arrow(table, tmp_path / "a.arrow", "zstd")
    assert check(tmp_path / "a.parquet") == 10
    assert check(tmp_path / "a.arrow") == 1
