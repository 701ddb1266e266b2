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


REPLICAS = [
    "F0-0 FB1-2 B0-0 | N=6 M=12 MR=2 R=2",  # more devices than groups
    "F0-0 FB1-2 B0-0 | N=4 M=8 MR=1 R=2",
    "FB0-2 | N=4 M=8 MR=1 R=4",  # as many
    "F0-0 FB1-2 B0-0 | N=2 M=8 MR=1 R=4",  # fewer
    "F0-0 FB1-2 B0-0 | N=3 M=8 MR=1 R=4",  # fewer, which do not divide them
    "F0-0 FB1-2 B0-0 | N=1 M=6 MR=2 R=3",
]


def test_a_plan_with_replicas_prints_and_parses_back():
    text = f"{PLAN} R=2".replace("N=3 M=4 MR=4", "N=4 M=8 MR=2")
    assert str(Plan.parse(text)) == text and Plan.parse(text).replicas == 2
    assert Plan.parse(PLAN).replicas == 1 and Plan.parse(f"{PLAN} R=1") == Plan.parse(PLAN)
    for wrong in ("R=", "R=-1", "R=2 R=2", "R=x"):
        with pytest.raises(ValueError, match="not a plan"):
            Plan.parse(f"{PLAN} {wrong}")


@pytest.mark.parametrize("text", REPLICAS)
def test_rounds_are_dealt_to_groups_in_turn(text):
    plan = Plan.parse(text)
    validate(plan, 3)
    for iteration in range(4):
        slots = plan.slots(iteration)
        assert [slot.index for slot in slots] == [*range(plan.rounds * len(plan.stages))]
        for slot in slots:
            assert (slot.group, slot.turn) == (slot.round % plan.replicas, slot.round // plan.replicas)
            passes = {plan.group_pass(iteration, m) for m in slot.micro_batches}
            assert passes == {(slot.group, iteration * plan.turns + slot.turn)}
    assert plan.turns * plan.replicas == plan.rounds


@pytest.mark.parametrize("text", [text for text in REPLICAS if Plan.parse(text).width > 1])
def test_a_group_is_a_pipeline_of_its_own(text):
    """On its own devices it is what a plan without replicas is on all, from iteration to iteration."""
    plan = Plan.parse(text)
    width, size = plan.devices // plan.replicas, plan.round_size
    assert plan.width == width and plan.concurrent == plan.replicas
    alone = Plan(plan.stages, width, plan.micro_batches // plan.replicas, size)
    for iteration in range(5):
        slots = plan.slots(iteration)
        for group in range(plan.replicas):
            own = [slot for slot in slots if slot.group == group]
            expected = alone.slots(iteration)
            assert [slot.device - group * width for slot in own] == [slot.device for slot in expected]
            assert [(slot.stage, slot.turn) for slot in own] == [(slot.stage, slot.round) for slot in expected]


@pytest.mark.parametrize("text", [text for text in REPLICAS if Plan.parse(text).width == 1])
def test_a_device_computes_whole_rounds_where_groups_have_one_or_share_it(text):
    """Rounds take the devices in turn over all iterations, so each of them computes as many, but for one."""
    plan = Plan.parse(text)
    assert plan.concurrent == min(plan.devices, plan.replicas)
    found = []
    for iteration in range(6):
        slots = plan.slots(iteration)
        of_round = [{slot.device for slot in slots if slot.round == r} for r in range(plan.rounds)]
        assert all(len(devices) == 1 for devices in of_round)
        found += [device for (device,) in of_round]
    assert found == [r % plan.devices for r in range(6 * plan.rounds)]


def test_micro_batches_arrive_from_all_groups_at_once():
    plan = Plan.parse("FB0-2 | N=2 M=12 MR=2 R=2")
    assert [*plan.arrivals(2)] == [0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11]
    assert [*plan.arrivals(1)] == [*range(12)]
    assert [*plan.arrivals(4)] == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 9, 11]  # the last two rounds are all that is left
    assert [*Plan.parse("FB0-2 | N=2 M=6 MR=2 R=3").arrivals(2)] == [0, 2, 1, 3, 4, 5]


@pytest.mark.parametrize("text", REPLICAS)
def test_every_micro_batch_arrives_once_and_in_the_order_of_its_group(text):
    plan = Plan.parse(text)
    for groups in range(1, plan.rounds + 1):
        order = [*plan.arrivals(groups)]
        assert sorted(order) == [*range(plan.micro_batches)]
        turns = [(m // plan.round_size // groups, m % plan.round_size) for m in order]
        assert turns == sorted(turns)
    for group in range(plan.replicas):
        own = [m for m in plan.arrivals(plan.replicas) if plan.group_pass(0, m)[0] == group]
        assert own == sorted(own)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ("N=4 M=8 MR=4 R=4", "2 rounds cannot be divided among 4 replicas"),
        ("N=2 M=6 MR=2 R=2", "3 rounds cannot be divided among 2 replicas"),
        ("N=2 M=4 MR=2 R=0", "2 rounds cannot be divided among 0 replicas"),
        ("N=3 M=4 MR=2 R=2", "3 devices cannot be divided among 2 replicas"),
        ("N=6 M=8 MR=2 R=4", "6 devices cannot be divided among 4 replicas"),
    ],
)
def test_replicas_divide_rounds_and_devices(numbers, message):
    with pytest.raises(PlanError, match=message):
        validate(Plan.parse(f"FB0-2 | {numbers}"), 3)


@pytest.mark.parametrize(
    ("plan", "steps"),
    [
        ("FB0-4 | N=1 M=4 MR=4", 3),  # one slot a step: the other place in the second
        ("F0-3 FB4-4 B0-3 | N=1 M=4 MR=4", 3),
        ("F0-3 FB4-4 | N=1 M=4 MR=4", 3),
        ("F0-3 FB4-4 B0-3 | N=2 M=4 MR=4", 5),
        ("F0-3 FB4-4 B0-3 | N=2 M=4 MR=2 R=2", 3),  # as on one device
        ("F0-3 FB4-4 B0-3 | N=4 M=4 MR=2 R=2", 5),  # as on two
    ],
)
def test_warm_up_lasts_until_every_stage_was_everywhere(plan, steps):
    assert Plan.parse(plan).warm_up == steps
