"""Plans as values: text forms, dispatch, validation."""

import pytest

from rptrain.schedule.plan import Plan, Stage
from rptrain.schedule.validate import PlanError, validate

PLAN = "F0-2 F3-5 FB6-7 B4-5 B2-3 B0-1 | N=3 M=4 MR=4"


def test_a_plan_prints_and_parses_back():
    assert str(Plan.parse(PLAN)) == PLAN
    with pytest.raises(ValueError, match="not a stage"):
        Plan.parse("F0-2 X3 | N=1 M=1 MR=1")


def test_slot_i_runs_on_device_g0_plus_i_modulo_n():
    plan = Plan.parse(PLAN)
    assert [str(slot) for slot in plan.slots(0)] == [
        "0:F0-2@0r0m0-3",
        "1:F3-5@1r0m0-3",
        "2:FB6-7@2r0m0-3",
        "3:B4-5@0r0m0-3",
        "4:B2-3@1r0m0-3",
        "5:B0-1@2r0m0-3",
    ]


@pytest.mark.parametrize("text", ["F0-0 FB1-2 B0-0 | N=2 M=4 MR=2", "F0-1 FB2-2 B1-1 B0-0 | N=3 M=6 MR=3"])
def test_dispatch_goes_on_where_it_left_off(text):
    plan = Plan.parse(text)
    devices = [slot.device for iteration in range(5) for slot in plan.slots(iteration)]
    assert devices == [i % plan.devices for i in range(len(devices))]
    micro_batches = [m for slot in plan.slots(3) if slot.stage_index == 0 for m in slot.micro_batches]
    assert micro_batches == list(range(plan.micro_batches))


def test_grid_is_a_line_a_device():
    assert (
        Plan.parse("F0-0 FB1-1 B0-0 | N=2 M=2 MR=2").grid(2) == "device 0: F0-0 B0-0 FB1-1\ndevice 1: FB1-1 F0-0 B0-0"
    )


@pytest.mark.parametrize(
    "stages",
    [
        "FB0-7",
        "F0-5 FB6-7 B0-5",
        "F0-2 F3-5 FB6-7 B4-5 B0-3",
        "F0-6 FB7-7 B6-6 B5-5 B4-4 B3-3 B2-2 B1-1 B0-0",
    ],
)
def test_valid_plans(stages):
    validate(Plan.parse(f"{stages} | N=3 M=4 MR=4"), 8)


@pytest.mark.parametrize(
    ("stages", "message", "mark"),
    [
        ("F0-2 F4-5 FB6-7 B0-5", "F4-5 should start at layer 3", "F4-5"),
        ("F0-5 FB6-7 B3-5 B0-3", "B0-3 should end before layer 3", "B0-3"),
        ("F0-5 FB6-7 B1-5", "do not reach layer 0", "B1-5"),
        ("F0-4 FB6-7 B0-5", "does not start where the forward stages end", "FB6-7"),
        ("F0-5 FB6-6 B0-5", "FB6-6 should end before layer 8", "FB6-6"),
        ("F0-5 B6-7 B0-5", "exactly one fused stage", None),
        ("FB6-7 F0-5 B0-5", "F0-5 stands where a stage of kind B belongs", "F0-5"),
    ],
)
def test_invalid_plans_are_shown_with_the_place_marked(stages, message, mark):
    with pytest.raises(PlanError, match=message) as caught:
        validate(Plan.parse(f"{stages} | N=2 M=4 MR=4"), 8)
    _, grid, caret = str(caught.value).split("\n")
    if mark:
        assert grid[caret.index("^") :].startswith(mark)
        assert caret.count("^") == len(mark)


def test_micro_batches_make_whole_rounds():
    with pytest.raises(PlanError, match="whole rounds"):
        validate(Plan((Stage("FB", 0, 1),), 1, 5, 2), 1)


@pytest.mark.parametrize(
    ("plan", "steps"),
    [
        ("FB0-4 | N=1 M=4 MR=4", 3),  # one slot a step: the other place in the second
        ("F0-3 FB4-4 B0-3 | N=1 M=4 MR=4", 3),
        ("F0-3 FB4-4 | N=1 M=4 MR=4", 3),
        ("F0-3 FB4-4 B0-3 | N=2 M=4 MR=4", 5),
    ],
)
def test_warm_up_lasts_until_every_stage_was_everywhere(plan, steps):
    assert Plan.parse(plan).warm_up == steps
