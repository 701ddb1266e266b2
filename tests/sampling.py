"""The part of a grid of cases that the fast suite and the gate run: a hook for `pytest.mark.sample`."""

import random
from collections import defaultdict

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of a test that are not in its sample, before markers are selected: those that the gate runs
    besides with `long`, the others with `grid`.

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
        size, gate = marker.args[0], marker.kwargs.get("gate", 0)
        chosen = sample(name, cases, max(size, gate))
        for case in chosen[size:]:
            case.add_marker("long")
        for case in cases:
            if case not in chosen:
                case.add_marker("grid")


def sample(name: str, cases: list[pytest.Function], size: int) -> list[pytest.Function]:
    """As many of the cases, of which each has as many values as possible that no case before it has."""
    left, chosen = random.Random(name).sample(cases, len(cases)), list[pytest.Function]()
    seen: set[tuple[str, int]] = set()
    for _ in range(min(size, len(cases))):
        chosen.append(max(left, key=lambda case: len(values(case) - seen)))
        seen |= values(chosen[-1])
        left.remove(chosen[-1])
    return chosen


def values(case: pytest.Function) -> set[tuple[str, int]]:
    """Parameters with the identity of their values: the cases of a test share them."""
    return {(name, id(value)) for name, value in case.callspec.params.items()}
