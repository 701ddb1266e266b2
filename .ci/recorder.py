"""A pytest plugin that writes what passed and what failed, for judge.py.

It takes itself out of the environment when pytest starts, with PYTEST_PLUGINS and PYTHONPATH: xdist's workers and the
tests do not see it.
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Matches the errors of pytest-timeout, of tests that wait for a state, and of subprocesses.
TIMEOUT = re.compile(
    r"Timeout \(>\S+ from pytest-timeout|^E .*(not within \d+ seconds: |subprocess\.TimeoutExpired: )", re.M
)


def pytest_configure(config: pytest.Config) -> None:
    del os.environ["PYTEST_PLUGINS"]
    sys.path.remove(os.environ.pop("PYTHONPATH"))
    config.pluginmanager.register(Recorder(Path(os.environ.pop("OUTCOMES"))))


class Recorder:
    def __init__(self, file: Path) -> None:
        self.file = file
        self.passed: set[str] = set()
        self.failures: list[tuple[str, str, str]] = []  # node id, kind, text
        self.begun = 0
        self.finished = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.begun += report.when == "setup"
        if report.failed:
            text = report.longreprtext
            crashed = report.when == "???"  # xdist's report of a test whose worker died
            kind = "crashed" if crashed else "timed out" if TIMEOUT.search(text) else "failed"
            self.failures.append((report.nodeid, kind, text))
        elif report.when == "call" and report.passed:
            self.passed.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failures.append((report.nodeid, "collection error", report.longreprtext))

    def pytest_internalerror(self, excrepr: object) -> None:
        self.failures.append(("pytest", "internal error", str(excrepr)))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error: object | None) -> None:
        if error:
            self.failures.append((f"worker {node.gateway.id}", "crashed", str(error)))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        yield
        left = session.testscollected - self.begun
        if left and all(kind == "failed" for _, kind, _ in self.failures):
            self.failures.append(("pytest", "cut short", f"{left} tests did not run"))
        self.finished = True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_unconfigure(self) -> Iterator[None]:
        """Write the file, unless a plugin failed at the end: judge.py takes a missing file for a failure."""
        yield
        passed = self.passed - {test for test, _, _ in self.failures}  # a test can pass and its teardown fail
        if self.finished:
            self.file.write_text(json.dumps({"passed": sorted(passed), "failures": self.failures}))
