from typing import get_args

import pytest
import torch

from rptrain.train.lr import ScheduleKind, learning_rate, warmup_length


@pytest.mark.parametrize("kind", get_args(ScheduleKind))
@pytest.mark.parametrize("warmup_steps", [0, 1, 5, 20])
def test_equals_transformers(kind, warmup_steps):
    from transformers import get_scheduler

    total, base = 20, 3e-4
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=base)
    scheduler = get_scheduler(kind, optimizer, num_warmup_steps=warmup_steps, num_training_steps=total)
    for step in range(total):
        ours = learning_rate(step, base=base, kind=kind, warmup_steps=warmup_steps, total_steps=total)
        assert ours == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12, abs=1e-18), step
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize(("given", "steps"), [(0, 0), (0.03, 4), (0.5, 50), (0.999, 100), (1, 1), (7, 7)])
def test_a_warmup_below_one_is_a_share_rounded_up(given, steps):
    assert warmup_length(given, 101 if given == 0.03 else 100) == steps


def test_ends_of_the_schedules():
    def rate(step, kind):
        return learning_rate(step, base=2.0, kind=kind, warmup_steps=0.1, total_steps=100)

    assert rate(0, "cosine") == rate(0, "linear") == rate(0, "constant_with_warmup") == 0
    assert rate(0, "constant") == 2.0
    assert rate(10, "cosine") == rate(10, "linear") == rate(10, "constant_with_warmup") == 2.0
    assert rate(55, "cosine") == pytest.approx(1.0)
    assert rate(55, "linear") == pytest.approx(1.0)
    assert rate(100, "cosine") == rate(100, "linear") == rate(250, "cosine") == rate(250, "linear") == 0
