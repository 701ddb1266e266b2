"""How the loss changed, in words, and the hint where it hardly did."""

from math import exp, nan

import pytest

from rptrain.runs.records.loss_change import loss_change


def test_a_spike_is_neither_the_first_nor_the_last_loss():
    losses = [10.0 * exp(-n / 100) + 2 for n in range(200)]
    losses[0], losses[3], losses[-1], losses[50] = 99.0, nan, 77.0, nan
    change = loss_change(losses)
    assert change is not None and change.reports == 198
    assert 11.5 < change.first < 12.0 and 3.3 < change.last < 3.7
    assert str(change) == "median loss 11.802 -> 3.5183 (-70%)" and change.hint(200) is None


@pytest.mark.parametrize(
    ("losses", "text"),
    [
        ([10.4, 9.92], "loss 10.400 -> 9.9200 (-4.6%)"),
        ([2.0, 5.0], "loss 2.0000 -> 5.0000 (+150%)"),
        ([0, 0], None),
        ([12.6, 0.127], "loss 12.600 -> 0.1270 (-99%)"),
        ([12.6, 0.009], "loss 12.600 -> 0.0090"),
    ],
)
def test_few_losses(losses: list[float], text: str | None):
    change = loss_change(losses)
    assert str(change) == (text or "loss 0.0000 -> 0.0000") and change is not None and change.hint(1000) is None
    assert loss_change(losses[:1]) is None and loss_change([nan, *losses[:1]]) is None


@pytest.mark.parametrize(
    ("last", "steps", "words"),
    [
        (9.6, 300, "fell by less than 5%: the learning rate (optim.learning_rate) may be too low"),
        (10.5, 300, "did not fall"),
        (9.3, 300, None),
        (9.6, 49, None),
    ],
)
def test_the_hint(last: float, steps: int, words: str | None):
    change = loss_change([10.0 + (last - 10.0) * n / 29 for n in range(30)] + [last] * 20)
    assert change is not None
    hint = change.hint(steps)
    assert hint is None if words is None else hint is not None and words in hint
