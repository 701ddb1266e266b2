"""Suggestions for words that are not known."""

from collections.abc import Iterable
from difflib import get_close_matches

LONGEST = 100  # characters of a word that are compared: the time grows with their square


def nearest(word: str, known: Iterable[str], count: int = 1, cutoff: float = 0.6) -> list[str]:
    """The known words most like `word`, at most `count`, the best first. `cutoff`: the least likeness, from 0 to 1."""
    return get_close_matches(word[:LONGEST], list(known), count, cutoff)
