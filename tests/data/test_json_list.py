"""A JSON list is read in pieces, with the values and the mistakes of a list that is read at once."""

import json
from io import BytesIO

import pytest

from rptrain.data import json_list
from rptrain.data.json_list import values

ROWS = [{"text": "häh 𝄞"}, 12345, -1.5e10, True, None, 'a\\"]', [], {"a": {"b": [1, 2]}}, "z" * 50]


@pytest.mark.parametrize("piece", range(1, 30, 2))
@pytest.mark.parametrize("indent", [None, 1])
def test_any_pieces_give_the_same_values(monkeypatch: pytest.MonkeyPatch, piece: int, indent: int | None):
    monkeypatch.setattr(json_list, "PIECE", piece)
    text = json.dumps(ROWS, indent=indent, ensure_ascii=False)
    assert list(values(BytesIO(f"\ufeff[{text[1:]} \n\n".encode()))) == list(enumerate(ROWS, 1))
    assert list(values(BytesIO(b"[ ]  \n"))) == []


def test_no_more_is_read_than_is_used(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(json_list, "PIECE", 100)
    file = BytesIO(json.dumps(["x" * 30] * 1000).encode())
    read = values(file)
    assert next(read) == (1, "x" * 30) and file.tell() == 100
    assert next(read) and next(read) and file.tell() == 200


@pytest.mark.parametrize("piece", [1, 7, 1000])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[1,\n{"a": 1\n"b": 2}]', r"Expecting ',' delimiter in line 3 \(row 2\)"),
        ("[1,\n2", r"Expecting ',' or '\]' in line 2 \(row 2\)"),
        ("[1,]", r"Expecting value in line 1 \(row 2\)"),
        ("[1]\n2", r"more text after the list, which ends with row 1"),
        ("[]]", r"more text after the list"),
        ('["\xff"]', "codec can't decode"),
    ],
)
def test_mistakes(monkeypatch: pytest.MonkeyPatch, piece: int, text: str, message: str):
    monkeypatch.setattr(json_list, "PIECE", piece)
    with pytest.raises(ValueError, match=message):
        list(values(BytesIO(text.encode("latin-1"))))


def test_a_long_value_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(json_list, "PIECE", 100)
    monkeypatch.setattr(json_list, "MOST", 300)
    file = BytesIO(b"[1, " + b"x" * 10_000)
    with pytest.raises(ValueError, match="row 2 has a mistake, or more than 300 B"):
        list(values(file))
    assert file.tell() < 2000
