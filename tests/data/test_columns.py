"""Columns of the user's own in place of the names that a format has."""

import json
from pathlib import Path
from typing import Any

import pytest

from rptrain.config.columns import NAMES
from rptrain.config.resolve import resolve
from rptrain.config.schema import Data, TrainSet
from rptrain.data.clean import clean
from rptrain.data.formats import FORMATS, Tally, read
from rptrain.data.loader import prepare
from rptrain.data.preview import first_samples
from rptrain.data.row_format import RowFormat
from rptrain.utils.errors import UserError

CHAT = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
TURNS = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]
PAIR = {"prompt": "question", "completion": "answer"}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def found(path: Path, columns: dict[str, str], name: str = "auto", tally: Tally | None = None) -> list[Any]:
    examples = read(path, RowFormat(name, tuple(columns.items())), tally)
    return [(example.messages, example.text, example.prompt, example.tools) for example in examples]


@pytest.mark.parametrize(
    ("row", "columns", "more"),
    [
        ({"prompt": "2 + 2 =", "completion": " 4"}, PAIR, {"prompt": "x", "text": "x", "messages": CHAT}),
        ({"prompt": "2 + 2 =", "completion": " 4"}, {"prompt": "completion", "completion": "prompt"}, {}),
        ({"instruction": "2 + 2?", "output": "4"}, {"instruction": "input"}, {}),
        ({"instruction": "Add", "input": "2", "output": "4", "system": "S"}, {"system": "persona", "input": "n"}, {}),
        ({"messages": CHAT, "tools": "[]"}, {"messages": "dialog", "tools": "functions_json"}, {"text": "x"}),
        ({"conversations": TURNS}, {"conversations": "messages"}, {}),
        ({"text": "2 + 2 = 4"}, {"text": "body"}, {"text": 5}),
    ],
    ids=["pair", "swapped", "taken", "optional", "chat", "sharegpt", "text"],
)
def test_renamed_columns_are_read_as_the_names_are(tmp_path, row, columns, more):
    renamed = more | {columns.get(name, name): value for name, value in row.items()}
    assert found(write(tmp_path / "own.jsonl", renamed), columns) == found(write(tmp_path / "rows.jsonl", row), {})


def test_every_name_that_a_format_needs_can_be_given():
    assert {name: set(names) >= FORMATS[name].keys for name, names in NAMES.items()} == dict.fromkeys(FORMATS, True)


def test_a_column_that_no_row_has_stops_before_anything_else(tmp_path):
    path = write(tmp_path / "rows.jsonl", {"id": 1, "question": "?", "anwser": "!"})
    for name in ("auto", "prompt_completion"):
        with pytest.raises(UserError, match=r"rows\.jsonl:1: .*'answer'.*`completion`.*did you mean 'anwser'"):
            found(path, PAIR, name)


def test_a_row_without_a_column_is_bad_and_named_in_its_own_words(tmp_path):
    rows = {"question": "?"}, {"question": "?", "answer": "!"}, {"question": 5, "answer": "!"}
    tally = Tally()
    assert len(found(write(tmp_path / "rows.jsonl", *rows), PAIR, tally=tally)) == 1
    assert tally.first == ["1: `answer` is missing", "3: `question` is not a list"]


def test_columns_apply_to_sets_without_their_own_and_are_part_of_the_cache_key(tmp_path, tokenizer):
    path = str(write(tmp_path / "rows.jsonl", {"question": "two", "answer": "four", "prompt": "a", "completion": "b"}))

    def tokens(of_set: dict[str, str] | None, of_all: dict[str, str] | None) -> list[int]:
        train = (TrainSet(path=path, columns=of_set),)
        prepared = prepare(
            Data(train=train, columns=of_all, max_length=64, cache_dir=str(tmp_path / "kept")), tokenizer
        )
        return prepared.streams[0].tokens.tolist()

    own, plain = tokens(PAIR, None), tokens(None, None)
    assert own != plain
    assert tokens(None, PAIR) == own and tokens({}, PAIR) == plain
    assert tokens({"prompt": "answer", "completion": "question"}, None) not in (own, plain)


@pytest.mark.long
def test_previews_and_clean_copies_read_the_same_columns(tmp_path):
    path = write(tmp_path / "rows.jsonl", {"q": "Spell backwards: ab", "a": "ba"}, {"q": "x", "a": 1})
    text = '[model]\npath = "tiny-tasks"\n[data]\ncolumns = {instruction = "q", output = "a"}\n[[data.train]]\n'
    config = resolve(tmp_path / "c.toml", (), f'{text}path = "{path}"\n').config
    (sample,) = first_samples(config, 1).samples
    assert "".join(part.text for part in sample.parts if part.supervised).startswith("ba")
    cleaned = clean(path, tmp_path / "good.jsonl", config=config)
    assert (cleaned.good, cleaned.bad) == (1, 1) and cleaned.first == ("2: `a` is not text",)
    with pytest.raises(UserError, match="instruction"):
        clean(path, tmp_path / "other.jsonl", "text", config)
