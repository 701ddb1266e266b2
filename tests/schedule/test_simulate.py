"""The event simulation: order, waiting, and what a timeline says of it."""

import re

import pytest

from rptrain.schedule.simulate import HOST, Deadlock, Hold, Program, Task, simulate


def task(seconds, *after, device=0, lane="compute", priority=0, iteration=0, kind="F", micro_batch=0):
    return Task(
        lane, device, seconds, after, kind, range(1), iteration=iteration, priority=priority, micro_batch=micro_batch
    )


def spans(*tasks, devices=1):
    timeline = simulate(Program(devices, tasks, ()))
    return list(zip(timeline.starts, timeline.ends, strict=True))


def test_a_task_waits_for_all_that_it_names_wherever_they_stand_in_the_list():
    assert spans(task(1, 1, 2), task(3, device=1), task(5, device=2), devices=3) == [(5, 6), (0, 3), (0, 5)]


def test_a_resource_does_one_task_at_a_time_and_lanes_are_resources_of_their_own():
    assert spans(task(2), task(3), task(4, lane="up")) == [(0, 2), (2, 5), (0, 4)]


def test_the_lowest_priority_number_goes_first_then_the_first_in_the_list():
    blocker = task(1)
    late, first, second = task(2, 0, priority=1), task(3, 0), task(4, 0)
    assert spans(blocker, late, first, second) == [(0, 1), (8, 10), (1, 4), (4, 8)]


def test_a_task_that_has_started_is_not_interrupted():
    urgent_later = task(1, 1, priority=-1)
    assert spans(task(5, priority=9), task(2, device=1), urgent_later, devices=2) == [(0, 5), (0, 2), (5, 6)]


def test_all_that_ends_at_one_time_is_counted_before_the_next_task_is_chosen():
    # Device 0 is free at 4, and so is what the urgent task waits for: it must not lose to the one that waited.
    waiting, urgent = task(1, priority=1), task(1, 1, priority=0)
    assert spans(task(4, priority=-1), task(4, device=1), waiting, urgent, devices=2)[2:] == [(5, 6), (4, 5)]


def test_tasks_that_take_no_time_pass_on_at_once():
    assert spans(task(2), task(0, 0, lane="optimizer"), task(0, 1, lane="optimizer"), task(1, 2)) == [
        (0, 2),
        (2, 2),
        (2, 2),
        (2, 3),
    ]


def test_a_deadlock_names_the_tasks_and_what_they_wait_for():
    loop = (task(1), task(1, 0, 2, kind="FB", micro_batch=7), task(1, 1, kind="B", micro_batch=8))
    expected = (
        "2 tasks wait for one another:\n"
        "  FB0-0.7 of iteration 0 on compute 0 waits for B0-0.8 of iteration 0 on compute 0\n"
        "  B0-0.8 of iteration 0 on compute 0 waits for FB0-0.7 of iteration 0 on compute 0"
    )
    with pytest.raises(Deadlock, match=re.escape(expected)):
        simulate(Program(1, loop, ()))


def test_bubbles_are_idle_shares_of_the_time_to_the_last_computation():
    timeline = simulate(Program(2, (task(6), task(2, 0, device=1), task(50, 1, lane="down", device=1)), ()))
    assert timeline.makespan == 8
    assert (timeline.busy(0), timeline.busy(1), timeline.busy(1, "down")) == (6, 2, 50)
    assert (timeline.bubble(0), timeline.bubble(1), timeline.bubble()) == (1 / 4, 3 / 4, 1 / 2)


def test_period_and_steady_bubble_leave_fill_and_drain_out():
    tasks = [task(5, iteration=0)]  # a slow first step; then 3 seconds of work every 4 seconds on one of two devices
    for iteration in range(1, 5):
        before = len(tasks) - 1
        tasks += [task(1, before, device=1, iteration=iteration), task(3, len(tasks), iteration=iteration)]
    timeline = simulate(Program(2, tuple(tasks), ()))
    assert [timeline.end_of(iteration) for iteration in range(5)] == [5, 9, 13, 17, 21]
    assert timeline.period(1, 4) == 4
    assert timeline.steady_bubble(1, 4) == 1 - 4 / 8


def test_peak_is_the_most_that_is_held_at_once_in_a_place():
    chain = (task(1), task(1, 0), task(1, 1), task(1, 2))
    holds = (
        Hold(0, 10, 0, 1),  # 0 to 2
        Hold(0, 5, 1, 1),  # 1 to 2
        Hold(0, 12, 2, 3),  # 2 to 4: what ends at 2 has gone
        Hold(1, 100, 0, 3),
        Hold(HOST, 7, 0, 0),
    )
    timeline = simulate(Program(2, chain, holds))
    assert (timeline.peak(0), timeline.peak(1), timeline.peak(HOST)) == (15, 100, 7)
