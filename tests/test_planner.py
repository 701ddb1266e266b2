"""Plans for real model shapes within a GPU's memory; nothing is loaded."""

import re

import pytest
import torch

from rptrain.errors import UserError
from rptrain.models import registry
from rptrain.plan.lower import outputs
from rptrain.plan.machine import CARDS, Machine
from rptrain.plan.validate import validate
from rptrain.planner import LIBRARIES, Workload, layer_costs, make_plan

GIB = 2**30


def spec_of(preset):
    return registry.build(registry.read_config(registry.locate(preset)))


def plan_of(preset, limit, *, rows=4, asynchronous=True, round_size=16, devices=1):
    workload = Workload(rows, 2048, 16, round_size, torch.bfloat16, asynchronous)
    return make_plan(spec_of(preset), Machine(CARDS["rtx4090"], devices), workload, device_limit=limit)


@pytest.mark.parametrize("preset", ["qwen3-1.7b", "llama-3.1-8b"])
def test_every_limit_from_the_least_on_has_a_plan(preset):
    """Just below what the message says is needed nothing fits; from there on everything does, and more is no worse."""
    with pytest.raises(UserError) as caught:
        plan_of(preset, GIB)
    least = float(re.search(r"needs ([\d.]+) GiB", str(caught.value))[1]) * GIB + LIBRARIES
    with pytest.raises(UserError, match="the largest"):
        plan_of(preset, int(least - 0.02 * GIB))
    stages = []
    for limit in (0.02, 0.3, 1.0, 1.5, 3.0, 8.0, 30.0):
        plan = plan_of(preset, int(least + limit * GIB))
        validate(plan.plan, len(spec_of(preset).stack))
        assert plan.device.total <= least + limit * GIB - LIBRARIES
        stages.append(len(plan.plan.stages))
    assert stages == sorted(stages, reverse=True)


def test_a_deep_model_does_not_fall_to_a_layer_a_stage():
    config = registry.read_config(registry.locate("llama-3.1-8b")) | {"num_hidden_layers": 64, "hidden_size": 8192}
    spec = registry.build(config)
    workload = Workload(1, 2048, 16, 16, torch.bfloat16, True)
    plan = make_plan(spec, Machine(CARDS["rtx4090"], 8), workload, device_limit=21 * GIB)
    assert len(plan.plan.stages) < len(spec.stack) * 1.6


def test_host_states_are_14_bytes_a_parameter_in_sync_and_16_in_async():
    parameters = spec_of("qwen3-1.7b").num_parameters
    sync, asynchronous = (plan_of("qwen3-1.7b", None, asynchronous=a).store_bytes for a in (False, True))
    assert 14 <= sync / parameters < 14.01
    assert 16 <= asynchronous / parameters < 16.01


@pytest.mark.parametrize(("moments", "moved"), [("fp32", 28), ("bf16", 20), ("int8", 16.125)])
def test_small_moments_make_updates_shorter(moments, moved):
    spec, machine = spec_of("qwen3-1.7b"), Machine(CARDS["rtx4090"], 1)
    workload = Workload(4, 2048, 16, 16, torch.bfloat16, False, moments)
    costs = layer_costs(spec, workload, machine, None)
    numel = sum(unit.numel for unit in spec.units)
    assert sum(cost.update for cost in costs) == pytest.approx(moved * numel / machine.host_bandwidth)


def test_rounds_need_less_host_memory_for_activations():
    whole, halves = (plan_of("qwen3-1.7b", 24 * GIB, round_size=size) for size in (16, 8))
    each = [plan.boundary_bytes / (outputs(plan.plan.stages)[1] + 1) for plan in (whole, halves)]  # 0 has two sets
    assert each[1] == each[0] / 2


def test_a_limit_too_small_names_the_largest_layer_and_what_it_needs():
    with pytest.raises(UserError, match=r"layer 'head', the largest, needs \d+\.\d+ GiB .* with 8192 tokens") as caught:
        plan_of("llama-3.1-8b", 4 * GIB)
    assert "the limit leaves 3.50 GiB" in str(caught.value)
    assert "train.micro_batch_size" in str(caught.value)
