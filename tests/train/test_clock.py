"""The clock of training without pauses, the tokens per second, and the durations of steps."""

import time

import pytest

from rptrain.train.clock import Clock, StepTimes, Throughput


def test_pauses_and_the_time_between_two_engines_do_not_count(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = Clock()
    with clock.running():
        now[0] += 1
        with clock.paused():
            now[0] += 10
        now[0] += 2
        assert clock.seconds == 3
        now[0] += 4
    now[0] += 100
    with clock.running():
        now[0] += 5
        assert clock.seconds == 12


def test_the_speed_is_an_average_of_at_least_four_steps_and_five_seconds(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = Clock()
    throughput = Throughput(clock)

    def finish(seconds: float) -> float:
        now[0] += seconds
        return throughput.finished(30)

    with clock.running():
        assert finish(3) == 10
        assert finish(6) == 60 / 9
        for _ in range(3):
            finish(2)
        assert finish(2) == 15, "of the last four"
        assert throughput.lap() == 180 / 17, "of all since the start"
        finish(2)
        assert throughput.lap() == 15, "of the last four, since the last lap is nearer"
        for _ in range(40):  # pairs of steps that end together
            finish(1 / 64)
            assert finish(15 / 64) <= 240
        assert finish(1 / 64) == 240, "of the last five seconds"
        assert finish(15 / 64) == 240


def test_a_slow_first_step_counts_until_four_others_have_ended(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = Clock()
    throughput = Throughput(clock)
    speeds = []
    with clock.running():
        for seconds in (20, 0.5, 0.5, 0.5, 0.5):
            now[0] += seconds
            speeds.append(throughput.finished(30))
    assert max(speeds[:4]) < 6 and speeds[4] == 60


def test_a_step_lasts_from_the_end_of_the_previous_one_and_interruptions_do_not_count(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    times = StepTimes(3)

    def finish(seconds: float) -> None:
        now[0] += seconds
        times.finished()

    finish(1000)
    assert times.median is None
    finish(3)
    assert times.median == 3
    finish(5)
    assert times.median == 4
    with times.interrupted():  # by a save after the step that runs
        finish(1000)
        now[0] += 1000
    finish(1000)
    assert times.median == 4
    finish(6)
    assert times.median == 5
    finish(7)
    assert times.median == 6, "of the last three"
