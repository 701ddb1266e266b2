"""The display of long phases: a bar on a terminal, lines elsewhere."""

import io
import re
import sys
from collections.abc import Mapping
from types import MappingProxyType

import pytest
from rich.console import Console

from rptrain.utils import phase_display, phases
from rptrain.utils.phase_display import PERIOD_KEY, PhaseDisplay
from rptrain.utils.phases import Phase, during, is_sentence, phase


class Shown:
    """A display that looks when the test says so, and what it has printed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.out = 100.0, io.StringIO()
        monkeypatch.setattr(phase_display, "POLL", 1000.0)
        for module in (phases, phase_display):
            monkeypatch.setattr(module, "monotonic", lambda: self.now)

    def open(
        self, *, terminal: bool = False, shown: bool = True, environment: Mapping[str, str] = MappingProxyType({})
    ) -> PhaseDisplay:
        console = Console(file=self.out, force_terminal=terminal, width=100, _environ={})
        self.display = PhaseDisplay(shown=shown, console=console, environment=environment)
        return self.display

    def last(self, one: Phase, seconds: int) -> None:
        """Lets a phase of 100 rows last, with a look every second."""
        for second in range(1, seconds + 1):
            self.now += 1
            one.done = 100 * second // seconds
            self.display.poll()

    @property
    def lines(self) -> list[str]:
        return re.sub(r"\x1b\[[0-9;?]*\w", "", self.out.getvalue()).splitlines()


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    return Shown(monkeypatch)


def test_a_pipe_gets_a_line_after_two_seconds_then_every_ten_seconds_and_one_at_the_end(shown: Shown):
    with shown.open(), phase("copying a.jsonl", 100, "row") as one:
        shown.last(one, 25)
    assert shown.lines == [
        "copying a.jsonl: 8 of 100 rows, 8%, 23 s left",
        "copying a.jsonl: 48 of 100 rows, 48%, 13 s left",
        "copying a.jsonl: 88 of 100 rows, 88%, 3 s left",
        "copying a.jsonl took 25 s (100 rows)",
    ]


@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
def test_nothing_about_a_short_phase_and_nothing_where_it_is_not_shown(shown: Shown, terminal: bool):
    with shown.open(terminal=terminal), phase("copying a.jsonl", 100, "row") as one:
        shown.last(one, 1)
    with shown.open(terminal=terminal, shown=False), phase("copying a.jsonl", 100, "row") as one:
        shown.last(one, 30)
    assert shown.out.getvalue() == ""


def test_parts_of_a_phase_share_its_lines_and_phases_that_follow_have_their_own(shown: Shown):
    with shown.open():
        with phase("reading data", unit=""):
            for name in ("hashing a", "hashing b", "hashing c"):
                with phase(name, 100, "row") as one:
                    shown.last(one, 3)
        with phase("packing sequences", unit="") as one:
            shown.last(one, 3)
    assert [line.partition(":")[0] for line in shown.lines] == ["hashing a", "packing sequences"]


def test_phases_that_repeat_have_lines_only_while_they_last_long(shown: Shown):
    """As steps: those of a few seconds would double the lines of a log."""
    with shown.open():
        for seconds in (9, 25):
            with during(Phase(f"running step {seconds}", 100, "micro-batch", repeats=True)) as one:
                shown.last(one, seconds)
    assert shown.lines == [
        "running step 25: 40 of 100 micro-batches, 40%, 15 s left",
        "running step 25: 80 of 100 micro-batches, 80%, 5 s left",
    ]
    assert all(map(is_sentence, shown.lines))


def test_the_interface_gets_a_line_per_second(shown: Shown):
    with shown.open(environment={PERIOD_KEY: "1"}), phase("copying a.jsonl", 100, "row") as one:
        shown.last(one, 9)
    assert len(shown.lines) == 8 and shown.lines[-1] == "copying a.jsonl: 100 of 100 rows, 100%"


def test_a_terminal_has_a_bar_for_each_phase_that_is_erased_at_its_end(shown: Shown):
    with shown.open(terminal=True) as display:
        with phase("copying a.jsonl", 100, "row") as one:
            shown.last(one, 12)
        display.poll()
        assert shown.out.getvalue().endswith("\x1b[2K"), "the bar is erased"
        with phase("packing sequences", unit="") as one:
            shown.last(one, 3)
    text = "\n".join(shown.lines)
    assert re.search(r"━ copying a.jsonl: \d+ of 100 rows, \d+%, \d+ s left", text) and "packing sequences: 3 s" in text
    assert "copying a.jsonl took 12 s (100 rows)" in text
    assert shown.out.getvalue().endswith("\x1b[2K") and "\x1b[?25h" in shown.out.getvalue(), "the cursor is back"


def test_an_interrupt_ends_the_bar_and_the_thread(shown: Shown):
    with pytest.raises(KeyboardInterrupt), shown.open(terminal=True) as display, phase("reading data", unit="") as one:
        shown.last(one, 13)
        raise KeyboardInterrupt
    assert shown.out.getvalue().endswith("\x1b[2K") and not display._thread.is_alive()
    assert not any("took" in line for line in shown.lines)


def test_results_do_not_move_from_standard_output_to_the_bar(shown: Shown, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdout", results := io.StringIO())
    with shown.open(terminal=True), phase("reading data", unit="") as one:
        shown.last(one, 3)
        print("a result")
    assert results.getvalue() == "a result\n"


def test_no_lines_where_the_period_is_0(shown: Shown):
    with shown.open(environment={PERIOD_KEY: "0"}), phase("reading data", 100, "row") as one:
        shown.last(one, 30)
    assert not shown.lines
