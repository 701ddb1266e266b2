"""How long a run is, from the amount of data and the plan, and what is probably not meant."""

from dataclasses import replace
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
        ({"max_steps": 1}, None, ["1 step of 16 sequences", "About 2 s in total"]),
        (
            {"num_epochs": 30},
            replace(DATA, samples=1, sequences=1, filled=0.01, steps_per_epoch=1),
            ["30 steps of 1 sequence: 30 epochs of 1 sample", "30 tokens without padding; about 1 m 00 s in total"],
        ),
        (
            {"num_epochs": 1},
            DATA,
            [
                "20 steps of 16 sequences: 1 epoch of 1,000 samples",
                "24,000 tokens without padding; about 40 s in total",
            ],
        ),
    ],
)
def test_in_words(train: dict[str, Any], amount: Amount | None, lines: list[str]) -> None:
    settings = config(**train)
    found = length_of(settings, amount, 2.0)
    assert found is not None and list(sentences(settings, found)) == lines
    steps_per_epoch = 20 if amount is None else amount.steps_per_epoch
    assert found.sequences == found.per_step * found.steps == found.per_step * total_steps(settings, steps_per_epoch)


@pytest.mark.parametrize(
    ("steps", "sequences", "seconds"), [(2, 32, 4.0), (3, 37, 4.5), (4, 53, 6.5), (6, 74, 9.0), (7, 90, 11.0)]
)
def test_the_last_step_of_an_epoch_can_be_short(steps: int, sequences: int, seconds: float) -> None:
    amount = replace(DATA, sequences=37, steps_per_epoch=3)
    found = length_of(config(max_steps=steps), amount, 2.0, 0.5)
    assert found is not None and (found.sequences, found.seconds) == (sequences, seconds)
    assert found.tokens == round(sequences * 100 * 0.75)


def test_the_time_at_a_measured_speed() -> None:
    settings = config(max_steps=60)
    found = length_of(settings, None, 0.25)
    assert found is not None and found.measured_seconds is None
    found = found.at_speed(800.0, "old", settings.data.max_length)
    assert list(sentences(settings, found))[1] == (
        "About 2 m 00 s in total at the speed measured in the run old (planned: 15 s)"
    )


def test_data_that_fills_no_batch() -> None:
    settings = config()
    tiny = replace(DATA, samples=3, sequences=2, steps_per_epoch=1)
    full = replace(DATA, samples=17, sequences=17, steps_per_epoch=2)
    said = ["\n".join(warnings_of(settings, found)) for a in (tiny, full) if (found := length_of(settings, a, None))]
    assert "only 2 sequences, fewer than train.global_batch_size = 16" in said[0]
    assert "fewer than" not in said[1]
    estimated = length_of(settings, replace(tiny, exact=False), None)
    assert estimated and "only about 2 sequences, fewer than" in "".join(warnings_of(settings, estimated))


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
        (
            0,
            {"num_epochs": 0.45},
            ["9 steps, in which a model learns little: lower train.global_batch_size, or raise train"],
        ),
        (0, {"num_epochs": 0.45}, ["train.num_epochs to 5 for 100 steps"]),
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


@pytest.mark.parametrize(
    ("longest", "packing", "epochs", "shorter"),
    [
        (41, True, 0.45, 128),  # two samples share a sequence
        (41, True, 1, None),  # there are steps enough, and no padding
        (41, False, 1, 64),
        (20, False, 1, 64),
        (65, False, 1, 128),
        (64, False, 1, 64),
        (1025, False, 1, None),
        (5000, True, 0.45, None),
    ],
)
def test_a_shorter_sequence_for_short_samples(longest: int, packing: bool, epochs: float, shorter: int | None) -> None:
    """Where it saves padding, or makes more steps of few data."""
    settings = config(num_epochs=epochs)
    settings = settings.model_copy(
        update={"data": settings.data.model_copy(update={"packing": packing, "max_length": 2048})}
    )
    found = length_of(settings, replace(DATA, longest=longest), 2.0)
    assert found is not None and (found.longest, found.shorter) == (longest, shorter)
    said = " ".join(warnings_of(settings, found))
    assert ("25% of the sequences is padding" in said) == (shorter is not None and not packing)
    assert (f"data.max_length to {shorter}" in said) == (shorter is not None and packing)
