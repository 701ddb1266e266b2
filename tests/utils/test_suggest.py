"""Suggestions for words that are not known."""

from rptrain.utils.suggest import LONGEST, nearest


def test_the_nearest_words():
    assert nearest("seeds", {"seed": 1, "steps": 2}) == ["seed"]
    assert nearest("xyz", ["seed"]) == [] and nearest("xyz", ["seed", "steps"], 2, 0) != []


def test_a_long_word_is_compared_by_its_beginning():
    assert nearest("x" * LONGEST + "y" * 10_000_000, ["x" * LONGEST]) == ["x" * LONGEST]
