"""The part of a grid of cases that the fast suite runs: a hook for `pytest.mark.sample`."""

import random
from collections import defaultdict

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark with `grid` the cases of a test that are not in its sample, before markers are selected.

    The sample depends on the test's name only. A case alone on the command line is always in it.
    """
    tests: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sample") and hasattr(item, "callspec"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for name, cases in tests.items():
        marker = cases[0].get_closest_marker("sample")
        assert marker is not None
        for case in outside(name, cases, marker.args[0]):
            case.add_marker("grid")


def outside(name: str, cases: list[pytest.Function], size: int) -> list[pytest.Function]:
    """All but `size` of the cases. Those that have a value of a parameter which no other has come first."""
    seen: set[tuple[str, int]] = set()
    first, rest = [], []
    for case in random.Random(name).sample(cases, len(cases)):
        values = set(case.callspec.indices.items())
        (rest if values <= seen else first).append(case)
        seen |= values
    return (first + rest)[size:]
