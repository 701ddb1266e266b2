"""What the processes of a run decide together."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rptrain.checkpoint.processes import Processes
from rptrain.engine.distributed.shared import Shared
from rptrain.runs.folder.control import Commands
from rptrain.runs.records.events import Event, ProcessSlow
from rptrain.train.group import SLOW, STEPS, Group, ShareTimes
from rptrain.utils.errors import UserError

NOTHING = [False, False, False]


def group(*others: Any, rank: int = 0) -> Group:
    """A group in which the others say this, whenever they are asked. They come after this process, or before it."""
    values = (lambda own: [own, *others]) if rank == 0 else (lambda own: [*others, own])
    return Group(SimpleNamespace(world=1 + len(others)), Processes(rank, values, "process {} on there".format))  # pyright: ignore[reportArgumentType]


def test_a_process_alone_decides_for_itself():
    alone = Group()
    assert alone.first and alone.size == 1 and alone.shared(None) is None  # pyright: ignore[reportArgumentType]
    for own in (Commands(True, False, True), Commands(False, True, False)):
        assert alone.agreed(own) == own
    alone.check_equal({"data": "a"})


@pytest.mark.parametrize(
    ("own", "other", "agreed"),
    [
        (NOTHING, NOTHING, NOTHING),
        (NOTHING, [False, True, True], [False, True, True]),
        ([False, False, True], [False, True, False], [False, True, True]),
        ([False, True, False], [True, False, False], [True, False, False]),  # nobody pauses when one stops
    ],
)
def test_what_one_is_asked_to_do_all_do(own, other, agreed):
    for rank in (0, 1):
        assert group(other, rank=rank).agreed(Commands(*own)) == Commands(*agreed)


def test_all_wait_for_each_other_before_they_open_channels_in_a_limited_time(monkeypatch):
    done: list[str] = []
    config: Any = SimpleNamespace(replicas=2, engine=SimpleNamespace(reduce_dtype="float32"))
    monkeypatch.setattr(Shared, "open", lambda *arguments: done.append("open"))
    processes = Processes(0, lambda own: done.append("ready") or [own, own])
    Group(SimpleNamespace(world=2), processes).shared(config)  # pyright: ignore[reportArgumentType]
    assert done == ["ready", "open"]


def test_what_differs_is_named_by_all():
    told: list[dict[str, str]] = []
    Group(main=Processes(0, lambda own: told.append(own) or [own])).check_equal({"data": "a", "model": 1})
    Group(main=Processes(0, lambda own: told.append(own) or [own])).check_equal({"data": "b", "model": 2})
    same, other = told
    group(same).check_equal({"data": "a", "model": 1})
    with pytest.raises(
        UserError, match="the data and the model of process 2 on there and of process 0 on there differ"
    ):
        group(same, other).check_equal({"data": "a", "model": 1})


def test_devices_of_other_kinds_are_named_by_all():
    same, other = ["NVIDIA GeForce RTX 4090"], ["NVIDIA GeForce RTX 3090"]
    Group().check_devices(same)
    group(same, same, rank=1).check_devices(same)
    reason = "the processes have NVIDIA GeForce RTX 4090 in process 0 on there and process 2 on there, NVIDIA GeForce "
    with pytest.raises(UserError, match=f"{reason}RTX 3090 in process 1 on there. All machines need devices of one k"):
        group(other, same).check_devices(same)


def slow(group: Group, seconds: float, compared: int = 1) -> list[Event]:
    """The events after a number of comparisons, if each step of this process takes that number of seconds."""
    found: list[Event] = []
    times = ShareTimes(group, found.append)
    for step in range(1, compared * STEPS + 1):
        times.add(seconds)
        times.compare(step)
    return found


def test_a_slow_process_is_told_once_by_the_first_one():
    (told,) = slow(group(1.0, SLOW + 0.1, SLOW - 0.1, 1.0), 1.0, compared=3)
    assert told == replace(ProcessSlow(STEPS, "process 2 on there", SLOW + 0.1, 1.0), time=told.time)
    assert slow(group(1.0, 1.0, 1.0), SLOW + 0.1)[0].sentence() == (
        "step 20: process 0 on there takes 1.3 times as long for its share as the others"
    )
    assert slow(group(1.0, 2.0, rank=2), 1.0) == slow(group(1.0, None), 1.0) == slow(Group(), 1.0) == []


def test_a_process_that_was_fast_again_is_told_again():
    said = iter([2.0, 1.0, 2.0])
    values = Processes(0, lambda own: [own, own, next(said)], str)
    found = slow(Group(SimpleNamespace(world=3), values), 1.0, compared=3)  # pyright: ignore[reportArgumentType]
    assert [event.step for event in found if isinstance(event, ProcessSlow)] == [STEPS, 3 * STEPS]


PROGRAM = """
import atexit, sys, typer
from rptrain.train.watchdog import Watchdog
atexit.register(print, "finalized")
with Watchdog(ends_process=True) as watchdog:
    if sys.argv[1] == "abandon":
        watchdog.abandon_threads()
    print("there")
    raise typer.Exit(7) if sys.argv[2] == "exit" else RuntimeError("broken")
"""


@pytest.mark.parametrize(
    ("how", "error", "shown", "code"),
    [("abandon", "exit", "there\n", 7), ("abandon", "bug", "there\n", 1), ("close", "bug", "there\nfinalized\n", 1)],
)
def test_a_process_that_abandons_threads_does_not_finalize_python(how, error, shown, code):
    """Threads that come back from native code then would abort it. An error that nothing else tells is shown."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM, how, error], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (code, shown)
    assert ended.stderr.endswith("RuntimeError: broken\n") == (error == "bug")
