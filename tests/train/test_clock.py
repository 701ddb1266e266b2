"""The clock of training without pauses, the tokens per second, and the durations of steps."""

import time

import pytest

from rptrain.train.group import ShareTimes
from rptrain.train.steps import Clock, StepTimes, Throughput

from .. import run_tools as tools


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


class Steps:
    """Steps of 30 tokens, by a clock that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, asynchronous: bool = False) -> None:
        self._now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self._now)
        self.clock = Clock()
        self.throughput = Throughput(self.clock, asynchronous=asynchronous)

    def finish(self, seconds: float, *, warm_up: bool = False) -> float | None:
        self._now += seconds
        return self.throughput.finished(30, warm_up=warm_up)


def test_the_speed_is_an_average_of_at_least_four_steps_and_five_seconds(monkeypatch: pytest.MonkeyPatch):
    steps = Steps(monkeypatch, asynchronous=True)
    finish, throughput = steps.finish, steps.throughput
    with steps.clock.running():
        assert finish(3) is None
        assert finish(6) == 60 / 9
        for _ in range(3):
            finish(2)
        assert finish(2) == 15, "of the last four"
        assert throughput.lap() == 180 / 17, "of all since the start"
        finish(2)
        assert throughput.lap() == 15, "of the last four, since the last lap is nearer"
        for _ in range(40):  # pairs of steps that end together
            finish(1 / 64)
            assert (finish(15 / 64) or 0) <= 240
        assert finish(1 / 64) == 240, "of the last five seconds"
        assert finish(15 / 64) == 240


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_steps_in_which_the_run_warms_up_do_not_count(monkeypatch: pytest.MonkeyPatch, asynchronous: bool):
    steps = Steps(monkeypatch, asynchronous=asynchronous)
    with steps.clock.running():
        assert steps.finish(20, warm_up=True) is None and steps.throughput.lap() is None
        first = steps.finish(0.5)
        assert first == (None if asynchronous else 60)
        assert [steps.finish(0.5) for _ in range(4)] == [60] * 4
        assert steps.throughput.lap() == 60
        assert steps.finish(10, warm_up=True) == 60, "another kernel was compiled"
        assert steps.finish(0.5) == 60 == steps.throughput.lap()
        assert steps.throughput.average() == 240 / 33


def test_pairs_of_steps_that_end_together_do_not_look_fast_at_first(monkeypatch: pytest.MonkeyPatch):
    steps = Steps(monkeypatch, asynchronous=True)
    with steps.clock.running():
        steps.finish(20, warm_up=True)
        found = [steps.finish(seconds) for seconds in (0.0, 1.0, 0.0, 1.0, 0.0, 1.0)]
    assert found[0] is None and all(speed is not None and speed <= 75 for speed in found[1:])


def test_a_run_of_one_or_two_steps_has_the_speed_of_all_of_them(monkeypatch: pytest.MonkeyPatch):
    steps = Steps(monkeypatch, asynchronous=True)
    with steps.clock.running():
        steps.finish(20, warm_up=True)
        assert steps.throughput.average() == 1.5
        assert steps.finish(10) is None and steps.throughput.lap() is None
        assert steps.throughput.average() == 2


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
    now[0] += 1000
    assert times.finished(counts=False) == 1000 and times.median == 6


@pytest.mark.parametrize(
    ("size", "counted", "compared"), [(64, [True, True, True, False, True, True], 3), (1024, [True] * 6, 0)]
)
def test_short_steps_are_compared_neither_between_plans_nor_between_processes(
    tmp_path, monkeypatch, size, counted, compared
):
    """Of 205 sequences, each fourth step has the last 13, or every step has all."""
    tools.write_model(tmp_path / "model")
    found, shares, finished = list[bool](), list[float](), StepTimes.finished

    def finish(times: StepTimes, *, counts: bool) -> float | None:
        found.append(counts)
        return finished(times, counts=counts)

    monkeypatch.setattr(StepTimes, "finished", finish)
    monkeypatch.setattr(ShareTimes, "add", lambda times, seconds: shares.append(seconds))
    tools.train_here(tmp_path, "data.val_size=0.2", f"train.global_batch_size={size}", "engine.replan=false")
    assert found == counted and len(shares) == compared, "the first step and the last one have no duration"
