"""Smoothing of curves, and what is computed from columns; the thinning of curves is tested with views."""

from collections.abc import Sequence
from math import inf, nan

from rptrain.runs.view.series import COLUMNS, Steps, smoothed


def test_each_point_is_the_average_of_its_neighbors():
    assert smoothed([1, 2, 3, 4, 5], [0.0, 3.0, nan, 6.0, inf]) == ([1, 2, 4], [1.5, 3.0, 4.5])
    xs, ys = smoothed(range(1000), [float(n % 2) for n in range(1000)])
    assert xs == list(range(1000)) and all(0.48 < y < 0.52 for y in ys)
    assert smoothed([], []) == ([], [])


def test_a_huge_value_changes_only_the_averages_near_it():
    values = [1.0 + n % 7 for n in range(1000)]
    _, without = smoothed(range(1000), values)
    _, ys = smoothed(range(1000), [*values[:300], 1e18, *values[301:]])
    near = range(300 - 25, 300 + 26)
    assert ys[: near.start] == without[: near.start] and ys[near.stop :] == without[near.stop :]
    assert all(ys[place] > 1e15 for place in near)


def test_a_column_is_looked_through_only_after_rows_were_added_or_removed():
    calls, steps = list[int](), Steps()

    def total(values: Sequence[float]) -> float:
        calls.append(len(values))
        return sum(values)

    for number in (1, 2, 3):
        steps.append(dict.fromkeys(COLUMNS, number))
        assert [steps.derived("loss", total) for _ in range(3)] == [sum(range(number + 1))] * 3
    steps.keep(1)
    assert [steps.derived("loss", total) for _ in range(3)] == [1.0] * 3
    assert calls == [1, 2, 3, 1]
