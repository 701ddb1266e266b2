"""Partial sums are added as one tree, whoever adds which part of it."""

import itertools

import pytest

from rptrain.engine.tree import additions, joins, subtrees


def added(pairs, parts):
    for to, source in pairs:
        parts[to] = f"({parts[to]}+{parts.pop(source)})"
    return parts


def tree(count):
    (total,) = added(additions(count), {i: str(i) for i in range(count)}).values()
    return total


def test_is_balanced():
    assert tree(1) == "0"
    assert tree(3) == "((0+1)+2)"
    assert tree(6) == "(((0+1)+(2+3))+(4+5))"
    assert tree(7) == "(((0+1)+(2+3))+((4+5)+6))"


@pytest.mark.parametrize("count", range(1, 10))
def test_any_division_into_parts_gives_the_same_tree(count):
    """Of every division into consecutive parts: each adds up its subtrees, and one adds these."""
    for cuts in itertools.product([False, True], repeat=count - 1):
        bounds = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), count]
        parts = [range(*pair) for pair in itertools.pairwise(bounds)]
        totals = {}
        for part in parts:
            for subtree in subtrees(part, count):
                own = added(additions(len(subtree)), {i: str(subtree[i]) for i in range(len(subtree))})
                totals[subtree.start] = own[0]
        assert added(joins([*totals], count), totals) == {0: tree(count)}


def test_equal_parts_of_a_power_of_two_are_one_subtree_each():
    assert subtrees(range(4, 8), 16) == [range(4, 8)]
    assert subtrees(range(16), 16) == [range(16)]
    assert subtrees(range(1, 5), 6) == [range(1, 2), range(2, 4), range(4, 5)]
    assert subtrees(range(4, 6), 6) == [range(4, 6)]
