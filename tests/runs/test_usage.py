"""Curves over time, from records of minutes and the newest snapshots."""

import json
from math import isnan, nan

import pytest

from rptrain.runs.records.events import to_line
from rptrain.runs.records.lanes import FILE, LaneRecord, Snapshot, StepNumbers
from rptrain.runs.view.run_view import RunView
from rptrain.runs.view.usage import COLUMNS, Usage, progress_of, warming_up

from .test_view import START, process, step, write


def shot(
    time: float, *busy: float, memory: int | None = None, power: float | None = None, speed: float = 0.0
) -> Snapshot:
    lanes = tuple(
        LaneRecord(f"cuda:{n}", "computing", busy={"F": share / 2}, memory=memory and memory * (n + 1), power=power)
        for n, share in enumerate(busy)
    )
    last = StepNumbers(int(time), 2.0, 1e-3, 1.0, speed, 0.5) if speed else None
    return Snapshot(time, 0.5, "training", int(time), 100, lanes, None, last)


def test_a_record_of_a_minute():
    progress = progress_of([shot(1.0), shot(1.5, 0.5, 1.0, speed=100.0), shot(2.0, 1.0, 0.0, speed=300.0)], 9)
    assert (progress.step, progress.phase, progress.seconds, progress.time) == (9, "training", 1.5, 2.0)
    assert progress.busy == (0.75, 0.5) and progress.tokens_per_second == 200.0
    assert (progress.process, progress.free, progress.memory, progress.power) == (2, 100, (), ())
    progress = progress_of([shot(1.0, 1.0, 1.0, memory=5, power=100.0), shot(1.5, 1.0, 1.0, memory=4, power=200.0)], 9)
    assert progress.memory == (5, 10) and progress.power == (150.0, 150.0) and progress.tokens_per_second is None
    assert progress_of([shot(1.0)], 0).busy == ()


def test_curves_go_from_the_first_record_to_the_newest_snapshot():
    usage = Usage()
    for minute in (60.0, 120.0, 90.0):  # the last one by a clock that was set back
        usage.append(progress_of([shot(minute, 1.0, 0.5, memory=7, power=50.0, speed=minute)], 1))
    recent = [shot(115.0 + n / 2, 0.5) for n in range(40)]
    curves = {name: usage.curve(name, recent) for name in COLUMNS}
    xs, busy = curves["busy"]
    assert xs == [59.5, 60.0, 120.0, 125.0, 130.0] and busy == [0.75, 0.75, 0.75, 0.5, 0.5]
    assert curves["vram"][1][:3] == [14.0] * 3 and curves["power"][1][:3] == [100.0] * 3
    assert curves["host"][1] == [60.0, 60.0, 120.0, 125.0, 130.0]
    assert curves["tokens_per_second"][1][:3] == [60.0, 60.0, 120.0]
    assert all(isnan(value) for name in ("vram", "power", "tokens_per_second") for value in curves[name][1][3:])


def test_the_last_two_minutes_keep_their_detail():
    usage = Usage()
    for minute in (60.0, 120.0, 180.0):
        usage.append(progress_of([shot(minute, 1.0)], 1))
    xs, _ = usage.curve("busy", [shot(75.0 + n / 2, 0.5) for n in range(240)])
    assert xs[:5] == [59.5, 60.0, 120.0, 125.0, 130.0] and xs[-1] == 190.0, "the record at 120 covers 60 to 120"


def test_a_sample_of_snapshots_hides_no_record():
    """Of a long run, some snapshots of its beginning and middle are read, too."""
    usage = Usage()
    for minute in range(1, 61):
        usage.append(progress_of([shot(60.0 * minute, 1.0)], 1))
    sampled = [shot(2.0 + n / 2, 0.5) for n in range(8)] + [shot(1800.0 + n / 2, 0.5) for n in range(8)]
    xs, _ = usage.curve("busy", [*sampled, *(shot(3595.0 + n / 2, 0.5) for n in range(20))])
    assert xs == [59.5, *(60.0 * minute for minute in range(1, 61)), 3604.5]


def test_curves_of_a_run_that_is_read_in_part(tmp_path):
    """Of three processes of 20 minutes with an hour between them: time is that of training, and never runs back."""
    for number in range(3):
        began = 1000.0 + 4800.0 * number
        write(tmp_path, START | {"time": began, "trained": 1200.0 * number}, process(time=began + 0.5))
        steps = [step(1200 * number + n) | {"time": began + n} for n in range(1, 1201)]
        for minute in range(20):
            used = progress_of([shot(began + 60.0 * (minute + 1), 0.25 * (number + 1))], 1200 * number + 60 * minute)
            write(tmp_path, *steps[60 * minute : 60 * minute + 60], json.loads(to_line(used)))
    newest = [shot(began + 1080 + n / 4, 0.25) for n in range(480)]
    (tmp_path / FILE).write_text("".join(one.to_line() + "\n" for one in [*newest[:1] * 9000, *newest]))
    view = RunView(tmp_path, large=1 << 18)
    assert not view.whole and len(view.recent) == 480 and len(view.steps) < 3000
    assert view.trained == 3600.0 and view.seconds(1000.0 + 9600.0 + 1200.0) == 3600.0
    xs, _ = view.usage.curve("busy", view.recent)
    times = [view.training_time.at(time) for time in xs]
    assert times == sorted(times) and times[0] <= 60.0 and 3590.0 < times[-1] <= 3600.0


def test_the_first_minute_with_values_of_each_process():
    times, values = [70.0, 95.0, 100.0, 154.0, 155.0, 1010.0, 1100.0], [nan, 5.0, nan, 6.0, 50.0, 5.0, 50.0]
    assert warming_up([60.0, 1000.0], times, values) == {1, 3, 5}


@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_run_that_has_just_begun(count: int):
    xs, ys = Usage().curve("busy", [shot(1.0 + n / 2, 0.5) for n in range(count)])
    assert (xs, ys) == ([(1.0 + (count - 1) / 2)], [0.5]) if count else ([], [])


def test_curves_cover_the_first_minute_and_the_end_of_each_process(tmp_path):
    """The records of both are 60 seconds apart, and the first process was killed 20 seconds after the last one."""
    minute = [shot(100.0 + n / 2, 0.5, speed=10.0) for n in range(1, 121)]
    write(tmp_path, START, process(), json.loads(to_line(progress_of(minute, 1))))
    (tmp_path / FILE).write_text("".join(shot(160.0 + n / 2, 0.25).to_line() + "\n" for n in range(1, 41)))
    view = RunView(tmp_path)
    write(tmp_path, START | {"time": 500.0, "trained": 80.0}, process(time=500.5))
    later = [shot(500.0 + n / 2, 0.5) for n in range(1, 121)]
    write(tmp_path, json.loads(to_line(progress_of(later, 1))))
    view.refresh()
    xs, busy = view.usage.curve("busy", view.recent)
    assert xs == [100.0, 160.0, 165.0, 170.0, 175.0, 500.0, 560.0]
    assert busy == [0.5, 0.5, 0.25, 0.25, 0.25, 0.5, 0.5]
