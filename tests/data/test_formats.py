import json
import logging

import pytest

from rptrain.data.formats import Tally
from rptrain.data.formats import read as read_lazily
from rptrain.data.row_format import RowFormat
from rptrain.utils.errors import UserError

CHAT = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
ALPACA = {"instruction": "Add.", "input": "2 + 2", "output": "4"}
TEXT = {"text": "two and two"}


def read(path, format="auto"):
    tally = Tally()
    examples = list(read_lazily(path, RowFormat(format), tally))
    Tally.joined({str(path): tally}).judge(0.01)
    return examples


@pytest.fixture
def write(tmp_path):
    def write(name, rows):
        path = tmp_path / name
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_formats_are_told_apart(write, name):
    (chat,) = read(write(name, [CHAT]))
    assert chat.messages == CHAT["messages"] and chat.text is None
    (alpaca,) = read(write(name, [ALPACA]))
    assert alpaca.messages is not None
    assert [message["content"] for message in alpaca.messages] == ["Add.\n2 + 2", "4"]
    assert [message["role"] for message in alpaca.messages] == ["user", "assistant"]
    (text,) = read(write(name, [TEXT]))
    assert text.text == "two and two" and text.messages is None


@pytest.mark.parametrize("more", [{}, {"input": ""}, {"input": None}])
def test_alpaca_without_input(write, more):
    (example,) = read(write("rows.jsonl", [{"instruction": "Count.", "output": "1", **more}]))
    assert example.messages is not None and example.messages[0]["content"] == "Count."


def test_json_list_and_places(write, tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([CHAT, CHAT], indent=1))
    assert [example.line for example in read(path)] == [1, 2]
    spaced = write("rows.jsonl", [CHAT, "", CHAT])
    assert [example.place for example in read(spaced)] == [f"{spaced}:1", f"{spaced}:3"]


def test_text_file_is_one_document(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("One.\n\nTwo.\n")
    (example,) = read(path)
    assert example.text == "One.\n\nTwo.\n"


def test_byte_order_mark_and_unusual_line_ends(tmp_path):
    path = tmp_path / "rows.jsonl"
    row, mark = json.dumps({"text": "a\u2028b"}, ensure_ascii=False).encode(), b"\xef\xbb\xbf"
    for content in (mark + row + b"\r\n", mark + b" [" + row + b"]"):
        path.write_bytes(content)
        assert read(path)[0].text == "a\u2028b"


def test_only_the_first_rows_are_looked_at(write, monkeypatch):
    monkeypatch.setattr("rptrain.data.formats.LOOKED", 3)
    assert len(list(read_lazily(write("late.jsonl", ["{}", "{}", CHAT])))) == 1
    with pytest.raises(UserError, match="no known data format"):
        read_lazily(write("later.jsonl", ["{}", "{}", "{}", CHAT]))


@pytest.mark.parametrize(
    ("limit", "allowed", "said"),
    [
        (0, 0, "allows no row to be bad"),
        (0.07, 14, "allows 7% of the rows to be bad"),
        (0.9999, 199, "allows 99.99% of the rows to be bad"),
        (1, 1, "allows 1 row to be bad"),
        (30.0, 30, "allows 30 rows to be bad"),
    ],
)
def test_the_limit_is_a_fraction_or_a_number_of_rows(limit, allowed, said, caplog):
    tally = Tally(total=200)
    for line in range(1, allowed + 1):
        tally.add(line, "wrong")
    tally.judge(limit)
    assert ("These rows are left out." in caplog.text) == (allowed > 0)
    tally.add(200, "wrong")
    with pytest.raises(UserError, match=f"data.max_bad_rows {said}: fix these rows, .* `rptrain data clean`, or raise"):
        tally.judge(limit)


def test_explicit_format_overrides(write):
    path = write("rows.jsonl", [CHAT | TEXT])
    assert read(path)[0].messages is not None
    assert read(path, "text")[0].text == "two and two"
    with pytest.raises(
        UserError, match="unknown data format 'csv'; use auto, messages, sharegpt, prompt_completion, alpaca, text"
    ):
        read(path, "csv")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{not json", "Expecting property name"),
        ("[1]", "not a JSON object"),
        ('{"messages": [{"role": "user", "content": "a", "content": "b"}]}', "an object has the key 'content' twice"),
        ('{"messages": NaN}', "`messages` is not a list"),
        ({"messages": []}, "at least one message"),
        ({"messages": ["hello"]}, "not an object with `role` and `content`"),
        ({"messages": [{"role": "user"}]}, "`content` is missing"),
        ({"messages": [{"role": "user", "content": None}]}, "`content` is missing"),
        ({"messages": [{"role": "user", "content": 3}]}, "`content` is not text"),
        (CHAT | {"tools": ["search"]}, "`tools` has something that is not an object"),
        (TEXT, "`messages` is not a list"),
    ],
)
def test_bad_rows_are_reported_and_left_out(write, caplog, row, reason):
    path = write("rows.jsonl", [CHAT] * 60 + [row] + [CHAT] * 60)
    with caplog.at_level(logging.WARNING):
        examples = read(path)
    assert len(examples) == 120
    assert "1 of 121 rows are bad" in caplog.text and f"{path}:61: " in caplog.text and reason in caplog.text


def test_more_than_one_percent_bad_stops(write):
    path = write("rows.jsonl", [CHAT] * 93 + [TEXT] * 7)
    with pytest.raises(UserError) as caught:
        read(path)
    report = str(caught.value)
    assert "7 of 100 rows are bad" in report and "and 2 more" in report
    assert [f"{path}:{line}: " in report for line in range(93, 100)] == [False] + [True] * 5 + [False]


def test_exactly_one_percent_bad_is_left_out(write):
    assert len(read(write("rows.jsonl", [CHAT] * 99 + [TEXT]))) == 99


def test_files_that_cannot_be_read(write, tmp_path):
    with pytest.raises(UserError, match="the file has no rows"):
        read(write("empty.jsonl", [""]))
    with pytest.raises(UserError, match=r"no known data format; its first row has answer, question.*alpaca"):
        read(write("other.jsonl", [{"question": "?", "answer": "!"}]))
    with pytest.raises(UserError, match=r"its first row: an object over several lines: write each on one line"):
        read(write("pretty.json", [json.dumps(CHAT, indent=1)]))
    with pytest.raises(UserError, match=r"no known data format \(read as JSON, because its suffix is none of .jsonl, "):
        read(write("table.tsv", ["text\tmore"]))
    with pytest.raises(UserError, match="not a JSON list"):
        read(write("broken.json", ["[{}"]))
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(UserError, match="not UTF-8 text"):
        read(tmp_path / "latin.txt")
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(UserError, match="`text` is empty"):
        read(tmp_path / "blank.txt")


def test_the_rows_of_a_file_in_two_data_sets_count_twice():
    tally = Tally.joined({"chats.jsonl": Tally(600, 1, ["51: not valid JSON"])})
    assert tally + tally == Tally(1200, 2, ["chats.jsonl:51: not valid JSON"])
