"""A pytest plugin that collects at another time and writes what it collected to a file.

tests/test_collection.py sets `COLLECTED`, the file, and `CLOCK_AHEAD`, in seconds.
"""

import datetime
import os
import re
import time
from pathlib import Path

import pytest

AHEAD = float(os.environ["CLOCK_AHEAD"])


class Later(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> "Later":
        return super().now(tz) + datetime.timedelta(seconds=AHEAD)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Sets the clock before any conftest.py or test module is imported."""
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + AHEAD
    time.time_ns = lambda: now_ns() + int(AHEAD * 1e9)
    datetime.datetime = Later


def pytest_collection_finish(session: pytest.Session) -> None:
    lines = []
    for item in session.items:
        assert isinstance(item, pytest.Function)
        lines.append(f"{item.nodeid}\t{spelled(item.callspec.params) if hasattr(item, 'callspec') else ''}\n")
    Path(os.environ["COLLECTED"]).write_text("".join(lines), encoding="ascii")


def spelled(value: object) -> str:
    """`repr`, but without addresses and without the order of sets, which differ between processes."""
    match value:
        case dict():
            return f"{{{', '.join(f'{spelled(key)}: {spelled(item)}' for key, item in value.items())}}}"
        case list() | tuple():
            return f"[{', '.join(map(spelled, value))}]"
        case set() | frozenset():
            return f"{{{', '.join(sorted(map(spelled, value)))}}}"
    return re.sub(r" at 0x[0-9a-f]+", "", ascii(value))
