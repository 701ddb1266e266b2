"""Samples that repeat earlier ones: how they are counted, and the warnings about them."""

import json
from pathlib import Path

import pytest

from rptrain.config.schema import Config
from rptrain.data.amount import warnings_of
from rptrain.data.browse import page
from rptrain.data.excerpt import PLANNING, excerpt
from rptrain.data.repeats import Repeats

from .documents import stream_of


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def config(rows: int, distinct: int, **data: object) -> Config:
    """Of two files with these rows in all."""
    chats = [
        json.dumps({"messages": [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "a" * size}]})
        for size in (1 + number % distinct for number in range(rows))
    ]
    for name, some in (("a.jsonl", chats[: rows // 2]), ("b.jsonl", chats[rows // 2 :])):
        Path(name).write_text("\n".join(some))
    sets = [{"path": "a.jsonl"}, {"path": "b.jsonl"}]
    return Config.model_validate({"model": {"path": "tiny-tasks"}, "data": {"train": sets, "max_length": 64, **data}})


def test_copies_have_the_same_tokens_and_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    first = stream_of([[1, 2], [1, 2, 3], [1, 2]])
    second = stream_of([[1, 2], [1, 2]], [[True, True], [False, True]])
    assert Repeats.of([first]) == Repeats(1, 3)
    assert Repeats.of([first, second]) == Repeats(2, 5)
    monkeypatch.setattr("rptrain.data.repeats.COMPARED", 4)
    assert Repeats.of([first, second]) == Repeats(2, 4)


@pytest.mark.parametrize(
    ("distinct", "val_size", "warning"),
    [
        (40, 0, []),
        (39, 0, []),
        (30, 0, ["10 of 40 samples repeat earlier ones: remove the copies if they are not meant"]),
        (
            30,
            0.1,
            ["10 of 40 samples repeat earlier ones, and validation samples may have copies in the training set"],
        ),
    ],
)
def test_many_copies_are_a_warning(distinct: int, val_size: float, warning: list[str], tokenizer: object) -> None:
    of = config(40, distinct, val_size=val_size)
    found = list(warnings_of(of, [excerpt(source, of.data, tokenizer, PLANNING) for source in of.data.train]))
    assert len(found) == len(warning) and all(map(str.startswith, found, warning))


def test_the_data_browser_counts_copies() -> None:
    assert [page(config(40, distinct), 0, 0, 5, problems=False).repeats for distinct in (19, 15)] == [0, 5]
