"""Smoothing of curves; their thinning is tested with views."""

from math import inf, nan

from rptrain.runs.series import smoothed


def test_each_point_is_the_average_of_its_neighbors():
    assert smoothed([1, 2, 3, 4, 5], [0.0, 3.0, nan, 6.0, inf]) == ([1, 2, 4], [1.5, 3.0, 4.5])
    xs, ys = smoothed(range(1000), [float(n % 2) for n in range(1000)])
    assert xs == list(range(1000)) and all(0.48 < y < 0.52 for y in ys)
    assert smoothed([], []) == ([], [])
