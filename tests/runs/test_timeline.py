"""Windows of a step, from what devices computed."""

from itertools import pairwise

import pytest

from rptrain.runs.records.timeline import CELLS, Schedule, SlotSpan, StepTimeline, window
from rptrain.schedule.plan import Computation


def computed(*times: tuple[int, int, float, float]) -> list[Computation]:
    return [Computation(*one) for one in times]


def test_a_window_lasts_from_the_end_of_one_step_to_the_end_of_the_next():
    """Parts of the steps before and after are in it; what lies outside is cut off."""
    first = computed((0, 0, 10, 14), (1, 0, 14, 18), (1, 3, 18, 21), (2, 0, 21, 25))
    second = computed((0, 1, 12, 15), (1, 1, 15.5, 19), (1, 2, 20, 23), (2, 1, 25, 26))
    step = window((first, second), 1, step=42)
    assert step == StepTimeline(
        iteration=1,
        seconds=8,
        busy=(1.0, 0.8125),
        devices=(
            (SlotSpan(0, 0, 3), SlotSpan(3, 3, 6), SlotSpan(0, 6, 8)),
            (SlotSpan(1, 0.5, 4), SlotSpan(2, 5, 8)),
        ),
        step=42,
    )
    assert step.busy_share == 0.90625 and step.seconds_per_step == 8


def test_the_first_step_begins_with_its_first_computation():
    step = window((computed((0, 0, 10, 14)), computed((0, 1, 14, 20))), 0)
    assert step is not None and step.seconds == 10 and step.devices == ((SlotSpan(0, 0, 4),), (SlotSpan(1, 4, 10),))


def test_micro_batches_of_a_slot_are_one_block_unless_the_device_waits_between_them():
    lane = computed((0, 0, 0, 100), (1, 0, 100, 110), (1, 0, 110.1, 120), (1, 0, 140, 160), (1, 1, 160, 200))
    step = window((lane,), 1)
    assert step is not None
    assert step.devices == ((SlotSpan(0, 0, 20), SlotSpan(0, 40, 60), SlotSpan(1, 60, 100)),)
    assert step.busy == (0.799,), "short gaps count as well"


def test_of_very_many_slots_those_that_take_longest_are_kept():
    """The length of a record is limited. Here the device is idle before the last slot, which is too short to show."""
    lane = computed(
        (0, 0, 0, 1), *((1, n, n + 1, n + 1.9) for n in range(800)), (1, 900, 1000, 1001), (2, 0, 1001, 1002)
    )
    step = window((lane,), 1)
    assert step is not None and 150 < len(step.devices[0]) <= CELLS
    assert all(one.end <= next.start + 1e-6 for one, next in pairwise(step.devices[0]))
    in_order = [span.slot for span in step.devices[0]]
    assert in_order == sorted(in_order) and 790 < in_order[-1] < 800 and step.devices[0][-1].end == 800
    assert step.busy == (pytest.approx(0.721),), "short gaps count as well"


def test_steps_that_end_in_pairs_share_a_window():
    ends = (10, 11, 20, 21, 30, 31)
    lane = computed(*((n, 0, start, end) for n, (start, end) in enumerate(pairwise(ends))))
    step = window((lane,), 4)
    assert step is not None and (step.seconds, step.steps, step.seconds_per_step) == (10, 2, 5)
    assert [block.slot for block in step.devices[0]] == [0, 0]


def test_a_step_after_an_interrupted_one_is_no_pair():
    lane = computed(*((n, 0, start, start + 1) for n, start in enumerate((0, 1, 2, 50, 51))))
    step = window((lane,), 4)
    assert step is not None and (step.seconds, step.steps) == (1, 1)


def test_without_the_computations_of_a_step_there_is_no_window():
    assert window((computed((0, 0, 0, 10)), []), 1) is None
    assert window((computed((2, 0, 0, 10)),), 2) is None, "when it began is not known"
    assert window((), 0) is None


@pytest.mark.parametrize(
    ("width", "shift", "iteration", "order"),
    [
        (4, 3, 7, "abcd"),  # that of the plan
        (4, 3, 8, "bcda"),  # three devices further
        (2, 1, 8, "badc"),  # in groups
        (3, 1, 8, "abcd"),  # which another program wrote
    ],
)
def test_the_devices_of_a_plan_turn_from_step_to_step(width: int, shift: int, iteration: int, order: str):
    lanes = {letter: (SlotSpan(number, 0, 1),) for number, letter in enumerate("abcd")}
    planned = StepTimeline(7, 2, (0.1, 0.2, 0.3, 0.4), tuple(lanes[letter] for letter in "abcd"))
    turned = Schedule(("F0-1", "FB2-2", "B0-1"), width, shift, planned).at(iteration)
    assert turned.devices == tuple(lanes[letter] for letter in order)
    assert turned.busy == tuple((lanes[letter][0].slot + 1) / 10 for letter in order)
