"""How long a run is, from the amount of data and the plan, and what is probably not meant."""

from typing import Any

import pytest

from rptrain.config.schema import Config
from rptrain.data.amount import Amount
from rptrain.planner.length import length_of, sentences, total_steps, warnings_of

DATA = Amount(samples=1000, sequences=320, filled=0.75, steps_per_epoch=20, exact=True)
ABOUT = Amount(samples=1000, sequences=320, filled=0.75, steps_per_epoch=20, exact=False)


def config(warmup: float = 0.0, **train: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": [{"path": "d"}], "max_length": 100},
            "train": {"global_batch_size": 16, **train},
            "optim": {"warmup_steps": warmup},
        }
    )


@pytest.mark.parametrize(
    ("train", "amount", "lines"),
    [
        (
            {"num_epochs": 2.5},
            DATA,
            [
                "50 steps of 16 sequences: 2.5 epochs of 1,000 samples",
                "60,000 tokens without padding; about 1 m 40 s in total",
            ],
        ),
        (
            {"num_epochs": 2.5},
            ABOUT,
            [
                "About 50 steps of 16 sequences: 2.5 epochs of about 1,000 samples",
                "About 60,000 tokens without padding; about 1 m 40 s in total",
            ],
        ),
        (
            {"max_steps": 5},
            ABOUT,
            [
                "5 steps of 16 sequences: about 0.25 epochs of about 1,000 samples",
                "About 6,000 tokens without padding; about 10 s in total",
            ],
        ),
        ({"max_steps": 5}, None, ["5 steps of 16 sequences", "About 10 s in total"]),
    ],
)
def test_in_words(train: dict[str, Any], amount: Amount | None, lines: list[str]) -> None:
    settings = config(**train)
    found = length_of(settings, amount, 2.0)
    assert found is not None and list(sentences(settings, found)) == lines
    assert found.sequences == 16 * found.steps == 16 * total_steps(settings, 20)


def test_what_is_unknown() -> None:
    assert length_of(config(), None, 2.0) is None
    found = length_of(config(max_steps=5), None, None)
    assert found is not None and list(sentences(config(max_steps=5), found)) == ["5 steps of 16 sequences"]


@pytest.mark.parametrize(
    ("warmup", "train", "parts"),
    [
        (0.5, {"num_epochs": 1}, []),
        (19, {"num_epochs": 1}, []),
        (20, {"num_epochs": 1}, ["warm-up of 20 steps is not shorter than the run of about 20 steps"]),
        (200, {"max_steps": 20}, ["warm-up of 200 steps is not shorter than the run of 20 steps"]),
        (0, {"num_epochs": 0.5}, []),
        (0, {"num_epochs": 0.45}, ["the run has only 9 steps, in which a model learns little"]),
        (0, {"max_steps": 1}, []),
        (0, {"num_epochs": 49}, []),
        (0, {"num_epochs": 100}, ["repeats its data 100 times, and will learn it by heart: lower train.num_ep"]),
        (0, {"max_steps": 2000}, ["repeats its data about 100 times, and will learn it by heart: lower train.max_s"]),
    ],
)
def test_what_is_probably_not_meant(warmup: float, train: dict[str, Any], parts: list[str]) -> None:
    settings = config(warmup, **train)
    found = length_of(settings, ABOUT, None)
    assert found is not None
    said = list(warnings_of(settings, found))
    assert len(said) == len(parts) and all(part in text for part, text in zip(parts, said, strict=True))
