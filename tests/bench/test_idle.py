"""The rule of idle time on computations made up by hand: what came last decides, and the gap is divided on its way."""

import random

import pytest

from rptrain.bench.idle import CAUSES, Host, Input, Interval, TimedComputation, gaps, usage

EARLY = -100.0  # everything was there long before
FIRST = TimedComputation("first", 0, 10, EARLY, EARLY)


def of(start, end, *, submitted=EARLY, launched=EARLY, **arrivals):
    return TimedComputation("second", start, end, submitted, launched, **arrivals)


def divided(computation, host=None, window=None):
    """The gap between 10 and the computation's start: seconds by cause, in order."""
    found = gaps([FIRST, computation], host or Host(), window or (0, computation.end))
    return [(gap.cause, gap.end - gap.start) for gap in found]


def test_what_was_launched_late_waited_for_the_host():
    assert divided(of(20, 25, launched=18)) == [("launch", 8), ("other", 2)]


def test_a_thread_that_was_blocked_did_not_launch():
    host = Host(blocked=[Interval("gradients", 1, 2), Interval("producers", 9, 12), Interval("optimizer", 14, 17)])
    assert divided(of(20, 25, launched=18), host) == [
        ("producers", 2), ("launch", 2), ("optimizer", 3), ("launch", 1), ("other", 2),
    ]  # fmt: skip
    assert (host.blocked_for(0, 10), host.blocked_for(10, 16), host.blocked_for(17, 30)) == (2, 4, 0)


def test_nothing_is_launched_before_it_is_submitted():
    host = Host(blocked=[Interval("producers", 11, 13), Interval("producers", 17, 18)])
    assert divided(of(20, 25, submitted=16, launched=20), host) == [
        ("boundary", 6), ("launch", 1), ("producers", 1), ("launch", 2),
    ]  # fmt: skip


def test_a_caller_who_waits_for_an_update_submits_late_because_of_the_optimizer():
    host = Host(caller=[Interval("optimizer", 12, 15), Interval("optimizer", 17, 19)])
    assert divided(of(20, 25, submitted=16, launched=20), host) == [
        ("boundary", 2), ("optimizer", 3), ("boundary", 1), ("launch", 4),
    ]  # fmt: skip


def test_an_input_that_arrived_last_was_computed_late_or_copied_slowly():
    late = of(20, 25, launched=13, inputs=(Input(12, 17, 19),))
    assert divided(late) == [("launch", 2), ("producers", 5), ("activations", 2), ("other", 1)]
    slow = of(20, 25, launched=13, inputs=(Input(3, 4, 20),))
    assert divided(slow) == [("activations", 10)]


def test_an_embedding_without_its_weights_waits_for_the_optimizer():
    host = Host(blocked=[Interval("producers", 11, 15)])
    first = of(30, 35, launched=19, inputs=(Input(17, 20, 24),), embedded=12)
    assert divided(first, host) == [
        ("launch", 1), ("optimizer", 1), ("producers", 3), ("launch", 2), ("producers", 3), ("activations", 4),
        ("other", 6),
    ]  # fmt: skip
    later = of(30, 35, launched=19, inputs=(Input(17, 20, 24),), embedded=21)
    assert divided(later, host) == [
        ("launch", 1), ("optimizer", 4), ("launch", 2), ("optimizer", 3), ("activations", 4), ("other", 6),
    ]  # fmt: skip


def test_two_inputs_are_gone_through_in_order():
    both = of(30, 35, launched=13, inputs=(Input(11, 14, 16), Input(20, 21, 28)))
    assert divided(both) == [
        ("launch", 1), ("producers", 3), ("activations", 2), ("launch", 4), ("producers", 1), ("activations", 7),
        ("other", 2),
    ]  # fmt: skip


def test_parameters_that_arrived_last_were_updated_late_or_copied_slowly():
    assert divided(of(20, 25, parameters=(13, 19))) == [("optimizer", 3), ("parameters", 6), ("other", 1)]
    assert divided(of(20, 25, parameters=(3, 19))) == [("parameters", 9), ("other", 1)]
    assert divided(of(20, 25, launched=19.5, parameters=(13, 19))) == [("launch", 9.5), ("other", 0.5)]


def test_outputs_wait_for_the_copies_of_earlier_ones():
    assert divided(of(20, 25, launched=12, inputs=(Input(1, 2, 15),), freed=16)) == [("activations", 6), ("other", 4)]


def test_the_rest_is_what_the_computation_says():
    assert divided(of(20, 25, launched=12, rest="gradients")) == [("launch", 2), ("gradients", 8)]


def test_the_latest_decides_even_where_others_are_late_too():
    everything = {"launched": 18, "inputs": (Input(11, 12, 19),), "parameters": (14, 16)}
    assert divided(of(20, 25, **everything)) == [("launch", 1), ("producers", 1), ("activations", 7), ("other", 1)]
    assert divided(of(20, 25, **everything | {"parameters": (14, 19.5)})) == [
        ("optimizer", 4), ("parameters", 5.5), ("other", 0.5),
    ]  # fmt: skip


def test_only_the_window_counts():
    late = of(20, 25, launched=18)
    assert divided(late, window=(15, 25)) == [("launch", 3), ("other", 2)]
    assert divided(late, window=(5, 17)) == [("launch", 7)]
    assert divided(late, window=(11, 12)) == [("launch", 1)]
    assert divided(late, window=(21, 24)) == divided(late, window=(2, 9)) == []


def test_what_nothing_comes_after_is_the_boundary():
    assert divided(of(20, 25, launched=18), window=(15, 32)) == [("launch", 3), ("other", 2), ("boundary", 7)]
    assert usage([], Host(), (3, 5)).idle["boundary"] == 2


def test_a_devices_time_by_hand():
    late = of(20, 25, launched=18)
    used = usage([FIRST, late, of(25, 30), of(32, 40, parameters=(3, 31))], Host(), (5, 36))
    assert used.total == 31
    assert used.busy == 5 + 5 + 5 + 4
    assert {cause: seconds for cause, seconds in used.idle.items() if seconds} == {
        "launch": 8, "other": 3, "parameters": 1,
    }  # fmt: skip
    assert tuple(used.idle) == CAUSES


@pytest.mark.parametrize("seed", range(20))
def test_all_of_the_time_is_busy_or_has_a_cause(seed):
    rng = random.Random(seed)

    def apart(count, causes):
        ends = sorted(rng.sample(range(-50, 400), 2 * count))
        return [Interval(rng.choice(causes), a, b) for a, b in zip(ends[::2], ends[1::2], strict=True)]

    computations, at = [], 0
    for _ in range(20):
        start = at + rng.choice([0, 0, rng.randint(1, 20)])
        times = sorted(rng.sample(range(at - 30, start + 1), 3)) + sorted(rng.sample(range(at - 30, start + 1), 3))
        at = start + rng.randint(1, 10)
        computations.append(
            TimedComputation(
                "",
                start,
                at,
                submitted=rng.randint(start - 40, start),
                launched=rng.randint(start - 40, start),
                inputs=tuple(Input(*times[i : i + 3]) for i in (0, 3)[: rng.randint(0, 2)]),
                parameters=rng.choice([None, tuple(times[1:3])]),
                freed=rng.choice([None, times[0]]),
                embedded=rng.randint(start - 40, start),
                rest=rng.choice(CAUSES),
            )
        )
    host = Host(apart(30, CAUSES), apart(10, CAUSES))
    window = (rng.randint(-10, 40), rng.randint(60, 200))
    found = gaps(computations, host, window)
    used = usage(computations, host, window)
    seconds = {second for gap in found for second in range(int(gap.start), int(gap.end))}
    computed = {second for c in computations for second in range(c.start, c.end) if window[0] <= second < window[1]}
    assert seconds | computed == set(range(*window)) and not seconds & computed
    assert sum(gap.end - gap.start for gap in found) == len(seconds), "no gap is counted twice"
    assert used.busy == len(computed) and used.busy + sum(used.idle.values()) == used.total
