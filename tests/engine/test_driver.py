"""Calls of the CUDA driver: what they pass on, and their errors."""

import ctypes

import pytest

from rptrain.engine.devices import driver
from rptrain.engine.devices.cuda import CudaMark


class Driver:
    """A driver that returns `status` and keeps its calls."""

    def __init__(self, status):
        self.status, self.calls = status, []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, *arguments))
            return self.status

        return call

    def cuEventElapsedTime(self, found, start, end):
        found._obj.value = 1500.0
        return self.status

    def cuGetErrorString(self, status, text):
        ctypes.cast(text, ctypes.POINTER(ctypes.c_char_p))[0] = b"an illegal memory access was encountered"


@pytest.fixture
def made(monkeypatch):
    def make(status):
        made = Driver(status)
        monkeypatch.setattr(driver, "_driver", lambda: made)
        return made

    return make


def test_calls_have_the_order_of_the_driver(made):
    found = made(0)
    driver.record(1, 2)
    driver.wait(2, 1)
    driver.copy(10, 20, 30, 2)
    driver.launch(3, 2)
    assert driver.passed(1) and driver.elapsed(1, 4) == 1.5
    assert found.calls == [
        ("cuEventRecord", 1, 2),
        ("cuStreamWaitEvent", 2, 1, 0),
        ("cuMemcpyAsync", 10, 20, 30, 2),
        ("cuGraphLaunch", 3, 2),
        ("cuEventQuery", 1),
    ]


def test_an_event_that_has_not_passed_is_not_an_error(made):
    made(600)
    assert not driver.passed(1)


def test_a_failed_call_raises_the_drivers_text(made):
    made(700)
    for call in (lambda: driver.record(1, 2), lambda: driver.passed(1), lambda: driver.elapsed(1, 2)):
        with pytest.raises(RuntimeError, match="CUDA error 700: an illegal memory access was encountered"):
            call()


def test_a_mark_whose_event_is_recorded_again_while_it_is_read_keeps_its_time():
    """The worker's thread resolves a mark, and records its event again, while another thread waits for it."""

    class Event:
        cuda_event = 1

    class Device:
        origin, origin_seconds = Event(), 10.0

        def seconds(self, event):
            assert mark.resolve()
            raise RuntimeError("Both events must be completed before calculating elapsed time.")

    unused = []
    mark = CudaMark(Device(), Event(), unused)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_driver", lambda: Driver(0))
        assert mark() == mark() == 11.5
    assert mark.passed() and len(unused) == 1
