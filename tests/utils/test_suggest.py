"""Suggestions for words that are not known."""

import pytest

from rptrain.utils.suggest import LONGEST, edits, nearest, typo_of


def test_the_nearest_words():
    assert nearest("seeds", {"seed": 1, "steps": 2}) == ["seed"]
    assert nearest("xyz", ["seed"]) == [] and nearest("xyz", ["seed", "steps"], 2, 0) != []


def test_a_long_word_is_compared_by_its_beginning():
    assert nearest("x" * LONGEST + "y" * 10_000_000, ["x" * LONGEST]) == ["x" * LONGEST]


@pytest.mark.parametrize(
    ("first", "second", "count"),
    [
        ("seed", "seed", 0),
        ("sed", "seed", 1),
        ("esed", "seed", 1),
        ("bias", "base", 2),
        ("", "abc", 3),
        ("ca", "abc", 3),
    ],
)
def test_edits(first, second, count):
    assert edits(first, second) == edits(second, first) == count


def test_a_word_of_another_meaning_is_no_typo():
    assert typo_of("weigth", ["path", "weight"]) == "weight" and typo_of("grdient_norm", ["gradient_norm"])
    for word, known in (("type", "path"), ("bias", "base"), ("steps", "eps"), ("lr", "r"), ("fp4", "fp8")):
        assert typo_of(word, [known]) is None
