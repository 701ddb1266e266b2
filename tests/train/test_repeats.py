"""Steps that are trained again after a resume, compared with their earlier records."""

from collections.abc import Mapping
from math import inf, nan

import pytest

from rptrain.runs.records.events import Event, LossDiffers, LossesRepeated
from rptrain.runs.view.series import Steps
from rptrain.train.steps import RepeatedSteps

EXPECTED = "This is expected if a setting or the kind of GPU was changed"


def recorded(losses: Mapping[int, float | None]) -> Steps:
    steps = Steps()
    for step, loss in losses.items():
        numbers = {"learning_rate": 1e-3, "grad_norm": 1.0, "tokens": 8, "tokens_per_second": 9.0}
        steps.append({"step": step, "time": float(step), "loss": loss, **numbers})
    return steps


def emitted(earlier: Mapping[int, float | None], done: int, again: Mapping[int, float]) -> list[str | None]:
    events: list[Event] = []
    repeats = RepeatedSteps(recorded(earlier), done, events.append)
    for step, loss in again.items():
        repeats.add(step, loss)
    assert all(isinstance(event, LossesRepeated | LossDiffers) for event in events)
    return [event.sentence() for event in events]


EARLIER = {5: 9.0, 10: 8.0, 15: None, 20: 6.5}


@pytest.mark.parametrize(
    ("again", "sentence"),
    [
        ({10: 8.0, 15: nan, 20: 6.5, 25: 1.0}, "steps 10-20 repeat the losses recorded before (3 of 3 equal)"),
        ({12: 1.0, 15: inf, 18: 1.0, 24: 1.0}, "step 15 repeats the loss recorded before"),
        ({10: 8.0, 15: nan}, None),
        ({24: 1.0}, None),
        (
            {10: 8.0, 15: 7.0, 20: 1.0},
            "step 15: the loss is 7.0; before the run was resumed it was not finite. " + EXPECTED,
        ),
        (
            {10: 8.000000001, 20: 1.0},
            "step 10: the loss is 8.000000001; before the run was resumed it was 8.0. " + EXPECTED,
        ),
    ],
)
def test_only_losses_of_equal_steps_are_compared(again, sentence):
    assert emitted(EARLIER, 7, again) == ([] if sentence is None else [sentence])


def test_nothing_is_said_where_nothing_is_repeated():
    assert emitted(EARLIER, 20, {25: 1.0}) == [] == emitted({}, 0, {5: 1.0})
