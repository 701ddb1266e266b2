"""The display of training's progress, on a terminal and elsewhere."""

import io
import json
import re
import sys
from dataclasses import replace
from math import inf

import pytest
from rich.console import Console

from rptrain.runs.records.events import Step
from rptrain.runs.view.pace import REPORTS
from rptrain.train.progress import ProgressDisplay, closing_lines
from rptrain.utils import phases
from rptrain.utils.units import format_duration

from ..tui.recorded import make_run

STEPS = [
    Step(n, 4.0 / n, 2e-5, norm, 8, 8, 1234.5, skipped=n == 3, epoch=epoch, skips=skips, time=10.0 * n)
    for n, norm, epoch, skips in ((1, 1.25, None, 0), (2, 1.25, 2 / 3, 2), (3, inf, 1.0, 1))
]

RUNNING = phases.Phase("running step 3", 128, "micro-batch", done=37, share=0.29, left=130.0, repeats=True)


def progress_on_terminal() -> ProgressDisplay:
    return ProgressDisplay(60, console=Console(file=io.StringIO(), force_terminal=True, width=120, _environ={}))


def progress(total: int, *, terminal: bool = False, quiet: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=40, _environ={})
    with ProgressDisplay(total, quiet=quiet, console=console) as shown:
        shown.note("[[data.train]] a note that is longer than the console is wide")
        for step in STEPS:
            shown.update(step)
    return out.getvalue()


def test_plain_lines_where_there_is_no_terminal():
    assert progress(363).splitlines() == [
        "[[data.train]] a note that is longer than the console is wide",
        "step 1/363  loss 4.0000  lr 2e-5  grad norm 1.25  1,234 tokens/s",
        "step 2/363  loss 2.0000  lr 2e-5  grad norm 1.25  epoch 0.67  2 steps skipped  1,234 tokens/s  ETA 1 h 00 m",
        "step 3/363  skipped: the gradients were not finite  lr 2e-5  epoch 1.00  1,234 tokens/s  ETA 1 h 00 m",
    ]


def test_the_remaining_time_is_that_of_the_latest_pace():
    """The same as in the interface: of the last reports, and none while they took no time."""
    first = [replace(STEPS[0], step=n, time=n / 1000) for n in range(1, 5)]
    later = [replace(STEPS[0], step=n, time=10.0 * n) for n in range(5, 5 + REPORTS)]
    out = io.StringIO()
    with ProgressDisplay(100, console=Console(file=out, width=80, _environ={})) as shown:
        for step in (*first, *later):
            shown.update(step)
    lines = out.getvalue().splitlines()
    assert not any("ETA" in line for line in lines[:4])
    assert lines[-1].endswith(f"ETA {format_duration(10 * (100 - later[-1].step))}")


def test_a_step_that_takes_long_has_its_progress_in_the_place_of_the_speed(monkeypatch):
    monkeypatch.setattr(phases, "REPEATED", 0.0)
    with progress_on_terminal() as shown, phases.during(RUNNING):
        shown.update(STEPS[1])
        shown.poll()
        assert bar(shown) == (2, "step 2/60  loss 2.0000  37/128 micro-batches, 2 m 10 s left")
    shown.poll()
    assert bar(shown) == (2, "step 2/60  loss 2.0000  1,234 tokens/s")


def test_control_characters_of_names():
    out = io.StringIO()
    with ProgressDisplay(1, console=Console(file=out, width=40, _environ={})) as shown:
        shown.note("model: runs/\x1b[31mred/model")
    assert out.getvalue() == "model: runs/␛[31mred/model\n"


def test_a_remaining_time_of_millions_of_years():
    assert progress(10**13).splitlines()[2].endswith("ETA 1157407407 d 09 h")


def test_a_bar_on_a_terminal():
    text = progress(3, terminal=True)
    assert "\x1b[" in text and "step 3/3" in text and "━" in text


@pytest.mark.parametrize(("width", "columns"), [(60, 6), (80, 24), (120, 24)])
def test_a_narrow_terminal_has_less_of_the_bar_and_the_whole_text(width, columns):
    out = io.StringIO()
    with ProgressDisplay(363, console=Console(file=out, force_terminal=True, width=width, _environ={})) as shown:
        shown.update(STEPS[0])
        shown.update(STEPS[1])
    *_, last = lines(out)
    assert last == f"{'━' * columns} step 2/363  loss 2.0000  1,234 tokens/s  ETA 1 h 00 m"


def test_the_bar_counts_every_step_and_names_what_is_done_besides_steps():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, _environ={})
    with ProgressDisplay(60, console=console) as shown:
        with shown.doing("loading"):
            assert bar(shown) == (0, "step 0/60  loading")
        shown.advance(1)
        assert bar(shown) == (1, "step 1/60")
        shown.update(STEPS[1])
        shown.update(replace(STEPS[1], step=4, time=40.0))
        shown.advance(5)
        with shown.doing("training"):
            assert bar(shown) == (5, "step 5/60  loss 2.0000  1,234 tokens/s  ETA 9 m 10 s")


def test_a_pause_between_two_reports_does_not_count_in_the_pace(monkeypatch):
    """The steps from the last report to the pause took their time before it."""
    monkeypatch.setattr("rptrain.train.progress.time.time", lambda: 5000.0)
    out = io.StringIO()
    with ProgressDisplay(100, console=Console(file=out, width=100, _environ={})) as shown:
        shown.update(replace(STEPS[1], step=20, time=200.0))
        shown.update(replace(STEPS[1], step=40, time=400.0))
        shown.advance(55)
        with shown.doing("paused"):
            pass
        shown.update(replace(STEPS[1], step=60, time=5050.0))
    assert out.getvalue().splitlines()[-1].endswith(f"ETA {format_duration(10 * 40)}")


def lines(out: io.StringIO) -> list[str]:
    """What was printed, without colors and empty lines."""
    plain = re.sub(r"\x1b\[[0-9;?]*\w", "", out.getvalue())
    return [line.rstrip() for line in plain.splitlines() if line.rstrip()]


def bar(shown: ProgressDisplay) -> tuple[float, str]:
    assert shown._bar is not None
    (task,) = shown._bar.tasks
    return task.completed, task.description


def test_what_others_print_appears_above_the_bar(monkeypatch):
    """The bar is drawn again after a warning, so that the last line is the bar's."""
    out = io.StringIO()
    monkeypatch.setattr("sys.stderr", out)
    with ProgressDisplay(3, console=Console(file=out, force_terminal=True, width=100, _environ={})) as shown:
        shown.advance(1)
        print("a warning", file=sys.stderr)
        shown.advance(2)
    shown_lines = lines(out)
    after = shown_lines[shown_lines.index("a warning") + 1 :]
    assert after and all(line.startswith("━") for line in after) and after[-1].endswith("step 2/3")


def test_the_end_says_how_the_loss_changed_and_what_to_try(tmp_path):
    run = make_run(tmp_path, steps=60, end="finished")
    records = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    flat = [record | {"loss": 4.0} if record["event"] == "step" else record for record in records]
    (run / "events.jsonl").write_text("".join(json.dumps(record) + "\n" for record in flat))
    finished, hint = closing_lines(run)
    assert finished == "finished after 60 steps: median loss 4.0000 -> 4.0000 (+0.0%)" and "learning rate" in hint
    assert [*closing_lines(tmp_path)] == []


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("quiet", [True, False])
def test_all_lines_are_copied_whatever_is_shown(terminal, quiet):
    copied = list[str]()
    console = Console(file=io.StringIO(), force_terminal=terminal, width=40, _environ={})
    with ProgressDisplay(363, quiet=quiet, console=console, copy=copied.append) as shown:
        shown.note("a note")
        for step in STEPS:
            shown.update(step)
    assert copied == ["a note", *progress(363).splitlines()[1:]]


def test_nothing_when_quiet():
    assert progress(3, quiet=True) == "" == progress(3, quiet=True, terminal=True)
