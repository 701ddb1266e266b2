"""The clock of the tokens per second, without pauses, and the durations of steps."""

import time

import pytest

from rptrain.train.clock import Clock, StepTimes


def test_pauses_and_the_time_between_two_engines_do_not_count(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = Clock()
    with clock.running():
        now[0] += 1
        with clock.paused():
            now[0] += 10
        now[0] += 2
        assert clock.lap() == 3
        now[0] += 4
    now[0] += 100
    with clock.running():
        now[0] += 5
        assert clock.lap() == 9
        now[0] += 6
        assert clock.lap() == 6


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
