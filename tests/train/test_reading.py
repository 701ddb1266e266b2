"""The display of reading data: a bar on a terminal, lines elsewhere."""

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from rptrain.data.progress import ReadProgress
from rptrain.train.reading import PERIOD_KEY, ReadingDisplay

READING = ReadProgress("a.jsonl", 1, 1, 0, 0, 2500.0, None, None)


def shown(
    seconds: float, *, terminal: bool = False, quiet: bool = False, step: float = 0.25, **environment: str
) -> str:
    """What is printed while a file is read in so many seconds."""
    out, now, reading = io.StringIO(), 100.0, READING
    console = Console(file=out, force_terminal=terminal, width=100, _environ={})
    with ReadingDisplay(quiet=quiet, console=console, clock=lambda: now, environment=environment) as display:
        for count in range(round(seconds / step)):
            took = count * step
            now = 100 + took
            reading = replace(READING, rows=int(2500 * took), seconds=took, share=took / seconds, left=seconds - took)
            display.report(reading)
        now = 100 + seconds
        display.report(replace(reading, rows=int(2500 * seconds), seconds=seconds, share=1.0, left=None, done=True))
    return out.getvalue()


def test_a_pipe_gets_a_line_every_ten_seconds_and_one_at_the_end():
    assert shown(24.0).splitlines() == [
        "reading a.jsonl: 25,000 rows, 2,500 rows/s, 41%, 14 s left",
        "reading a.jsonl: 50,000 rows, 2,500 rows/s, 83%, 4 s left",
        "read 60,000 rows of a.jsonl in 24 s (2,500 rows/s)",
    ]


def test_slow_reports_do_not_make_up_for_lines():
    assert len(shown(100.0, step=25.0).splitlines()) == 4


@pytest.mark.parametrize("seconds", [0.5, 9.0])
def test_a_pipe_gets_nothing_about_a_short_reading(seconds):
    assert shown(seconds) == ""


def test_the_interface_gets_a_line_per_second():
    lines = shown(9.0, **{PERIOD_KEY: "1"}).splitlines()
    assert len(lines) == 9 and lines[-1] == "reading a.jsonl: 22,500 rows, 2,500 rows/s, 100%"


def test_a_terminal_has_a_bar_that_is_erased_at_the_end():
    text = shown(24.0, terminal=True)
    assert "read 60,000 rows of a.jsonl in 24 s (2,500 rows/s)" in plain(text)
    assert re.search(r"━ reading a.jsonl: [\d,]+ rows, 2,500 rows/s, \d+%", plain(text))
    assert text.endswith("\x1b[2K"), "the bar is erased"


def test_a_terminal_shows_nothing_about_a_reading_of_less_than_a_second():
    assert shown(0.9, terminal=True) == ""


def test_many_short_files_show_themselves():
    out, now = io.StringIO(), 0.0
    console = Console(file=out, force_terminal=True, width=100, _environ={})
    with ReadingDisplay(console=console, clock=lambda: now) as display:
        for number in range(1, 5):
            now = number / 2
            display.report(replace(READING, number=number, files=4, rows=9, seconds=0.5, done=True))
    assert "reading a.jsonl (4 of 4): 9 rows" in plain(out.getvalue()) and "(1 of 4)" not in plain(out.getvalue())


def test_nothing_when_quiet():
    assert shown(24.0, quiet=True) == "" == shown(24.0, quiet=True, terminal=True)


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*\w", "", text)
