"""Plans for real model shapes within a GPU's memory; nothing is loaded."""

import pytest
import torch

from rptrain.errors import UserError
from rptrain.models import registry
from rptrain.plan.validate import validate
from rptrain.planner import LIBRARIES, make_plan

GIB = 2**30


def spec_of(preset):
    return registry.build(registry.read_config(registry.locate(preset)))


def plan_of(preset, limit, *, rows=4, asynchronous=True, round_size=16, devices=1):
    return make_plan(
        spec_of(preset),
        devices=devices,
        rows=rows,
        length=2048,
        micro_batches=16,
        round_size=round_size,
        dtype=torch.bfloat16,
        asynchronous=asynchronous,
        device_limit=limit,
    )


@pytest.mark.parametrize("preset", ["qwen3-1.7b", "llama-3.1-8b"])
@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("limit", [10 * GIB, 24 * GIB, None])
def test_plans_stay_within_the_limit(preset, devices, limit):
    plan = plan_of(preset, limit, devices=devices)
    validate(plan.plan, len(spec_of(preset).stack))
    if limit is not None:
        assert plan.device.total <= limit - LIBRARIES


def test_host_states_are_14_bytes_a_parameter_in_sync_and_16_in_async():
    parameters = spec_of("qwen3-1.7b").num_parameters
    sync, asynchronous = (plan_of("qwen3-1.7b", None, asynchronous=a).store_bytes for a in (False, True))
    assert 14 <= sync / parameters < 14.01
    assert 16 <= asynchronous / parameters < 16.01


def test_rounds_need_less_host_memory_for_activations():
    whole, halves = (plan_of("qwen3-1.7b", 24 * GIB, round_size=size).boundary_bytes for size in (16, 8))
    assert halves == whole / 2


def test_a_limit_too_small_names_the_largest_layer_and_what_it_needs():
    with pytest.raises(UserError, match=r"layer 'head' alone needs \d+\.\d+ GiB with 8192 tokens") as caught:
        plan_of("llama-3.1-8b", 4 * GIB)
    assert "engine.vram_limit leaves 3.50 GiB" in str(caught.value)
    assert "train.micro_batch_size" in str(caught.value)
