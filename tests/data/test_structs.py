"""Values of Parquet and Arrow files are those of the row, not of the union of all rows."""

import json

import pytest

from rptrain.data.formats import Tally, read
from rptrain.data.read import rows_of

CITY, SUM = {"city": "Paris"}, {"a": 1, "b": 2}
SCHEMAS = [
    {"type": "object", "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}}, "required": ["city"]},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "description": "the other"}}},
]


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def declared(name, schema):
    return {"type": "function", "function": {"name": name, "parameters": schema}}


ROWS = [
    {
        "messages": [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": "", "tool_calls": [call(name, arguments)]},
        ],
        "tools": [declared(name, schema)],
    }
    for name, arguments, schema in zip(("weather", "add", "now"), (CITY, SUM, {}), (*SCHEMAS, {}), strict=True)
]


def write(path, table):
    from pyarrow import ipc, parquet

    if path.suffix == ".parquet":
        parquet.write_table(table, path)
    else:
        with ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.fixture(params=["rows.parquet", "rows.arrow"])
def path(tmp_path, request):
    return tmp_path / request.param


def examples(path):
    tally = Tally()
    found = list(read(path, tally=tally))
    assert not tally.bad, tally.first
    return found, tally.notes


def test_fields_of_other_rows_are_left_out(path):
    import pyarrow

    found, notes = examples(write(path, pyarrow.Table.from_pylist(ROWS)))
    assert [example.messages for example in found] == [row["messages"] for row in ROWS]
    assert [example.tools for example in found] == [row["tools"] for row in ROWS]
    assert notes == {"nulls": 3}


def test_null_keys_of_messages_are_not_noted(path):
    import pyarrow

    rows = [{"messages": [{"role": "user", "content": "2", "name": name}], "id": {"a": name}} for name in ("Ann", None)]
    found, notes = examples(write(path, pyarrow.Table.from_pylist(rows)))
    assert [len(example.messages[0]) for example in found if example.messages] == [3, 2] and not notes


def test_nulls_of_json_text_stay(path):
    import pyarrow

    texts = [json.dumps([call("add", {"a": None})])]
    rows = [{"messages": [{"role": "assistant", "tool_calls": text}], "tools": "null"} for text in texts]
    found, notes = examples(write(path, pyarrow.Table.from_pylist(rows)))
    assert found[0].messages and found[0].messages[0]["tool_calls"] == [call("add", {"a": None})]
    assert found[0].tools is None and notes == {"calls": 1}


def test_all_types_with_structs(path):
    import pyarrow as pa

    struct = pa.struct([("a", pa.int64()), ("b", pa.struct([("c", pa.int64())]))])
    values = [{"a": 1, "b": None}, {"a": None, "b": {"c": None}}, None]
    kinds = {
        "list": (pa.list_(struct), [values]),
        "lists": (pa.list_(pa.large_list(struct)), [[values]]),
        "fixed": (pa.list_(struct, 3), [values]),
        "map": (pa.map_(pa.string(), struct), [[("x", values[0])]]),
        "within": (pa.struct([("m", pa.map_(pa.string(), pa.int64()))]), [{"m": [("x", 1), ("y", None)]}]),
        "plain": (pa.list_(pa.int64()), [[1, None]]),
    }
    table = pa.table({name: pa.array(items, kind) for name, (kind, items) in kinds.items()})
    ((_, row),) = rows_of(write(path, table))
    kept = [{"a": 1}, {"b": {}}, None]
    assert row == {
        "list": kept,
        "lists": [kept],
        "fixed": kept,
        "map": {"x": {"a": 1}},
        "within": {"m": {"x": 1, "y": None}},
        "plain": [1, None],
    }


def as_json(texts):
    import pyarrow

    return pyarrow.ExtensionArray.from_storage(pyarrow.json_(), pyarrow.array(texts, pyarrow.string()))


def test_columns_of_json(path):
    """As `datasets` stores `Json()` and `List(Json())`."""
    import pyarrow

    row = ROWS[1]
    tools = pyarrow.ListArray.from_arrays([0, 1], as_json([json.dumps(row["tools"][0])]))
    table = pyarrow.table({"messages": as_json([json.dumps(row["messages"])]), "tools": tools})
    found, _ = examples(write(path, table))
    assert found[0].messages == row["messages"] and found[0].tools == row["tools"]


@pytest.mark.parametrize("size", [100, 1000, 1024])
def test_row_groups_of_any_size(tmp_path, size):
    """A column such as `role` is stored as a dictionary in each of them."""
    import pyarrow
    from pyarrow import parquet

    answer = {"role": "assistant", "content": "2"}
    rows = [{"messages": [{"role": "user", "content": f"{number}?"}, answer]} for number in range(2100)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=size)
    assert [example.messages for example in examples(tmp_path / "rows.parquet")[0]] == [row["messages"] for row in rows]


def test_content_of_mixed_types(path):
    """A field of texts and lists is stored as JSON: a text has quotes, unless it is JSON itself."""
    import pyarrow

    parts = [{"type": "text", "text": "two"}]
    content = as_json([json.dumps("hi"), json.dumps(parts), "4", "null"])
    roles = pyarrow.array(["user", "assistant"] * 2)
    messages = pyarrow.ListArray.from_arrays(
        [0, 4], pyarrow.StructArray.from_arrays([roles, content], ["role", "content"])
    )
    found, notes = examples(write(path, pyarrow.table({"messages": messages})))
    assert [message["content"] for message in found[0].messages or ()] == ["hi", "two", "4", "null"]
    assert notes["json_text:messages"] == 1
