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
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            marked = item.get_closest_marker("sample") and not item.get_closest_marker("grid")
            if marked:
                tests[item.nodeid.partition("[")[0]].append(item)
    for name, cases in tests.items():
        marker = cases[0].get_closest_marker("sample")
        assert marker is not None
        for case in outside(name, cases, marker.args[0]):
            case.add_marker("grid")


def outside(name: str, cases: list[pytest.Function], size: int) -> list[pytest.Function]:
    """All but `size` of the cases, of which each has as many values as possible that no case before it has."""
    left = random.Random(name).sample(cases, len(cases))
    seen: set[tuple[str, int]] = set()
    for _ in range(min(size, len(cases))):
        chosen = max(left, key=lambda case: len(values(case) - seen))
        seen |= values(chosen)
        left.remove(chosen)
    return left


def values(case: pytest.Function) -> set[tuple[str, int]]:
    """Parameters with the identity of their values: the cases of a test share them."""
    return {(name, id(value)) for name, value in case.callspec.params.items()}
