"""The width of what commands print."""

import pytest

from rptrain.utils import console
from rptrain.utils.console import ENDLESS


@pytest.mark.parametrize("columns", ["0", "-5", "", "wide", "²", "8.5"])
def test_columns_that_are_not_a_positive_integer_count_as_unset(columns: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    usual = console.console().width
    monkeypatch.setenv("COLUMNS", columns)
    assert console.output().width == ENDLESS, "a pipe gets whole lines"
    assert console.console().width == console.console(stderr=True).width == usual > 0


def test_columns_set_the_width(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "57")
    assert console.output().width == console.console(stderr=True).width == 57
