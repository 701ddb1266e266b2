"""The display of training's progress, on a terminal and elsewhere."""

import io

from rich.console import Console

from rptrain.runs.events import Step
from rptrain.train.progress import Progress

STEPS = [Step(n, 4.0 / n, 1e-3, 1.0, 8, 8, 1234.5, skipped=n == 3, time=10.0 * n) for n in (1, 2, 3)]


def progress(total: int, *, terminal: bool = False, quiet: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=40, _environ={})
    with Progress(total, quiet=quiet, console=console) as shown:
        shown.note("[[data.train]] a note that is longer than the console is wide")
        for step in STEPS:
            shown.update(step)
    return out.getvalue()


def test_plain_lines_where_there_is_no_terminal():
    assert progress(363).splitlines() == [
        "[[data.train]] a note that is longer than the console is wide",
        "step 1/363  loss 4.0000  1,234 tokens/s",
        "step 2/363  loss 2.0000  1,234 tokens/s  ETA 1 h 00 m",
        "step 3/363  skipped: the gradients were not finite  1,234 tokens/s  ETA 1 h 00 m",
    ]


def test_control_characters_of_names():
    out = io.StringIO()
    with Progress(1, console=Console(file=out, width=40, _environ={})) as shown:
        shown.note("model: runs/\x1b[31mred/model")
    assert out.getvalue() == "model: runs/␛[31mred/model\n"


def test_a_remaining_time_of_millions_of_years():
    assert progress(10**13).splitlines()[2].endswith("ETA 1157407407 d 09 h")


def test_a_bar_on_a_terminal():
    text = progress(3, terminal=True)
    assert "\x1b[" in text and "step 3/3" in text and "━" in text


def test_nothing_when_quiet():
    assert progress(3, quiet=True) == "" == progress(3, quiet=True, terminal=True)
