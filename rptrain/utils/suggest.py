"""Suggestions for words that are not known."""

from collections.abc import Iterable
from difflib import get_close_matches

LONGEST = 100  # characters of a word that are compared: the time grows with their square


def nearest(word: str, known: Iterable[str], count: int = 1, cutoff: float = 0.6) -> list[str]:
    """The known words most like `word`, at most `count`, the best first. `cutoff`: the least likeness, from 0 to 1."""
    return get_close_matches(word[:LONGEST], list(known), count, cutoff)


def typo_of(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` misspells: one edit away from it, or two if it has 8 characters or more. None if there
    is none, so that a word of another meaning is not suggested.
    """
    distances = [(edits(word, one), one) for one in known if abs(len(word) - len(one)) <= 2]
    likely = [(count, one) for count, one in distances if count <= min(2, max(len(word), len(one)) // 4)]
    return min(likely, key=lambda pair: pair[0])[1] if likely else None


def edits(first: str, second: str) -> int:
    """The insertions, deletions, replacements and swaps of neighbors that make the second word of the first (optimal
    string alignment). Only the first LONGEST characters of each are compared.
    """
    first, second = first[:LONGEST], second[:LONGEST]
    before, last = list[int](), list(range(len(second) + 1))
    for i, letter in enumerate(first, 1):
        row = [i]
        for j, other in enumerate(second, 1):
            cost = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == second[j - 2] and first[i - 2] == other:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before, last = last, row
    return last[-1]
