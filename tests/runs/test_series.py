"""Smoothing of curves; their thinning is tested with views."""

from math import inf, nan

from rptrain.runs.series import smoothed


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
