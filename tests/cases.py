"""Cases that the fast suite leaves out: other values of what one of its cases tests already."""

import pytest


def grid(*values: object, id: str | None = None):
    return pytest.param(*values, id=id, marks=pytest.mark.grid)


def long(*values: object, id: str | None = None):
    return pytest.param(*values, id=id, marks=pytest.mark.long)


# Async in the fast suite: sync is the same with one wait more.
UPDATES = pytest.mark.parametrize("asynchronous", [long(False, id="sync"), pytest.param(True, id="async")])
