"""The clock of the tokens per second: pauses do not count."""

import time

import pytest

from rptrain.train.clock import Clock


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
