"""Work in child processes with limits."""

import operator
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count, repeat

import psutil
import pytest

from rptrain.utils import limited
from rptrain.utils.errors import UserError
from rptrain.utils.limited import Limited, Pool, call, stream
from tests.run_tools import wait_for


def test_items_arrive_in_order_from_a_process_that_is_used_again():
    assert list(stream(range, 3)) == [0, 1, 2]
    child = call(os.getpid)
    assert child != os.getpid()
    assert call(os.getpid) == child


def test_a_function_raises_here_and_its_process_goes_on():
    child = call(os.getpid)
    with pytest.raises(ValueError, match="invalid literal for int"):
        call(int, "x")
    with pytest.raises(TypeError, match="cannot pickle"):
        call(memoryview, b"cannot be sent")
    assert call(os.getpid) == child


@pytest.mark.parametrize(
    ("function", "given", "message"),
    [
        (re.fullmatch, ("(a+)+b", "a" * 40), "takes more than 0.1 s"),
        (list, (repeat(0),), "needs more than 256 MiB of memory"),
        (operator.mul, ("a", 1 << 29), "needs more than 256 MiB of memory"),
        (os.abort, (), "needs more than 256 MiB of memory"),
        (signal.raise_signal, (signal.SIGKILL,), "was killed, probably because the machine ran out of memory"),
        (os._exit, (3,), r"ends the process that handles it \(status 3\)"),
    ],
    ids=["time", "many", "large", "abort", "kill", "exit"],
)
def test_limits(function, given, message):
    with pytest.raises(Limited, match=message):
        call(function, *given, seconds=0.1 if "time" in message or "takes" in message else 10, memory=256 << 20)
    assert call(operator.add, 1, 2) == 3


def test_the_item_that_exceeds_a_limit_is_known():
    """Also if those before it have not arrived."""
    texts = ["b", "aab", "a" * 40, "b"]
    with pytest.raises(Limited, match=r"takes more than 0\.2 s") as caught:
        list(stream(map, re.compile("(a+)+b").findall, texts, seconds=0.2))
    assert caught.value.done == 2


def test_each_item_has_its_own_time():
    numbers = stream(map, pow, [7] * 8, [100_000] * 8, seconds=0.2)
    assert len(list(numbers)) == 8


def test_a_stream_that_nobody_reads_to_its_end():
    numbers = stream(count)
    child = next(psutil.Process(process.pid) for process in psutil.Process().children() if _is_child(process))
    assert next(numbers) == 0
    del numbers
    wait_for(lambda: not child.is_running())


def test_a_process_that_ended_while_it_had_nothing_to_do():
    os.kill(call(os.getpid), signal.SIGKILL)
    assert call(operator.add, 1, 2) == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_all_processes_of_a_group_is_left_to_the_parent(number):
    child = call(os.getpid)
    os.kill(child, number)
    assert call(os.getpid) == child


def test_a_process_has_a_group_of_its_own_before_it_ignores_signals(monkeypatch):
    """Ctrl-C in a terminal goes to all processes of a group."""
    monkeypatch.setattr(limited, "_idle", [])
    assert call(os.getpgrp) == call(os.getpid) != os.getpgrp()


def test_a_system_that_starts_no_more_processes(monkeypatch):
    monkeypatch.setattr(limited, "_idle", [])
    monkeypatch.setattr(limited, "COMMAND", ("/does/not/exist",))
    with pytest.raises(UserError, match="a child process cannot be started: No such file or directory"):
        call(os.getpid)


def test_several_threads():
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda number: call(operator.neg, number), range(40))) == [-n for n in range(40)]


def test_a_pool_that_is_closed_while_a_process_starts(monkeypatch):
    started, closed, ask = threading.Event(), threading.Event(), limited._ask

    def late(request, working):
        started.set()
        assert closed.wait(60)
        return ask(request, working)

    monkeypatch.setattr(limited, "_ask", late)
    with Pool(1) as pool:
        future = pool.submit(range, 3)
        assert started.wait(60)
        monkeypatch.setattr(pool._threads, "shutdown", lambda **given: closed.set())
    assert future.result(60) == []


def test_a_pool_that_is_closed_ends_its_processes():
    with Pool(2) as pool:
        futures = [pool.submit(map, time.sleep, [9999], seconds=60) for _ in range(3)]
        wait_for(lambda: len(pool._working) == 2)
    assert not pool._working
    assert all(future.cancelled() or future.exception() is not None or future.result() == [] for future in futures)


def test_a_forked_process_has_its_own(monkeypatch):
    monkeypatch.setattr(limited, "_idle", limited._idle)
    child = call(os.getpid)
    reading, writing = os.pipe()
    if (forked := os.fork()) == 0:
        os.write(writing, str(call(os.getpid)).encode())
        os._exit(0)
    os.waitpid(forked, 0)
    assert int(os.read(reading, 20)) != child == call(os.getpid)
    os.close(reading)
    os.close(writing)


@pytest.mark.long
@pytest.mark.parametrize("work", ["call(os.getpid)", "stream(re.fullmatch, '(a+)+b', 'a' * 40, seconds=0.5)"])
def test_it_ends_with_its_parent(work):
    program = f"import os, re, time\nfrom rptrain.utils.limited import *\nx = {work}\nprint(flush=True)\ntime.sleep(99)"
    parent = subprocess.Popen([sys.executable, "-P", "-c", program], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout:
        assert parent.stdout.readline()
    (child,) = psutil.Process(parent.pid).children()
    parent.kill()
    parent.wait()
    wait_for(lambda: not child.is_running())


def _is_child(process: psutil.Process) -> bool:
    try:
        return limited.COMMAND[-1] in process.cmdline()
    except (psutil.ZombieProcess, psutil.NoSuchProcess):  # one that just ended
        return False
