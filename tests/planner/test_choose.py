"""Plans for real model shapes within a GPU's memory; nothing is loaded."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from rptrain.engine.footprint import stage_bytes, stage_memory
from rptrain.engine.memory.step_layout import StepLayout
from rptrain.engine.meter import Measured
from rptrain.models.families import registry
from rptrain.models.locate import locate, read_config
from rptrain.models.transforms.fp8 import with_fp8
from rptrain.models.transforms.freeze import freeze
from rptrain.models.transforms.half_sums import with_half_sums
from rptrain.models.transforms.lora import LoRA, with_lora
from rptrain.models.transforms.quantize import with_base
from rptrain.planner.choose import LIBRARIES, Limits, layer_costs, layer_work, least_period, make_plan
from rptrain.schedule.costs import Work
from rptrain.schedule.lower import outputs
from rptrain.schedule.machine import CARDS, MATMUL, TRAFFIC, Machine, MeasuredRates, Rates
from rptrain.schedule.plan import Stage
from rptrain.schedule.validate import validate
from rptrain.utils.errors import UserError

GIB = 2**30


def spec_of(preset):
    return registry.build(read_config(locate(preset)))


def plan_of(preset, limit, *, asynchronous=True, round_size=16):
    layout = StepLayout(4, 2048, 16, round_size, torch.bfloat16, asynchronous)
    return make_plan(spec_of(preset), Machine(CARDS["rtx4090"], 1), layout, Limits(limit))


@pytest.mark.parametrize("preset", ["qwen3-1.7b", "llama-3.1-8b"])
def test_every_limit_from_the_least_on_has_a_plan(preset):
    """Just below what the message says is needed nothing fits; from there on everything does, and more is no worse."""
    with pytest.raises(UserError) as caught:
        plan_of(preset, GIB)
    least = float(re.search(r"needs ([\d.]+) GiB", str(caught.value))[1]) * GIB + LIBRARIES
    with pytest.raises(UserError, match="the largest"):
        plan_of(preset, int(least - 0.02 * GIB))
    periods = []
    for limit in (0.02, 0.3, 1.0, 1.5, 3.0, 8.0, 30.0):
        plan = plan_of(preset, int(least + limit * GIB))
        validate(plan.plan, len(spec_of(preset).stack))
        assert plan.device.total <= least + limit * GIB - LIBRARIES
        periods.append(plan.estimate.period)
    assert all(later <= earlier * 1.001 for earlier, later in pairwise(periods))


@pytest.mark.parametrize("preset", ["qwen3-1.7b", "gpt-oss-20b"])
@pytest.mark.parametrize("devices", [1, 4])
def test_no_step_is_shorter_than_the_least_period(preset, devices):
    """It is close to the steps of plans where transfers hide, also if little memory allows a short fused stage only."""
    spec, machine = spec_of(preset), Machine(CARDS["rtx4090"], devices)
    layout = StepLayout(4, 2048, 16, 16, torch.bfloat16, True)
    times = [cost.backward for cost in layer_costs(spec, layout, machine, None)]
    for limit in (13, 14, 16, 40):
        plan = make_plan(spec, machine, layout, Limits(limit * GIB))
        least = least_period(spec, machine, layout, device_limit=limit * GIB, measured=None)
        assert 16 * sum(times) / devices <= least <= plan.estimate.period * 1.000_001
        assert devices > 1 or plan.estimate.period < 1.02 * least


def test_a_deep_model_does_not_fall_to_a_layer_a_stage():
    config = read_config(locate("llama-3.1-8b")) | {"num_hidden_layers": 64, "hidden_size": 8192}
    spec = registry.build(config)
    layout = StepLayout(1, 2048, 16, 16, torch.bfloat16, True)
    plan = make_plan(spec, Machine(CARDS["rtx4090"], 8), layout, Limits(21 * GIB))
    assert len(plan.plan.stages) < len(spec.stack) * 1.6


def test_host_states_are_14_bytes_a_parameter_in_sync_and_16_in_async():
    parameters = spec_of("qwen3-1.7b").num_parameters
    sync, asynchronous = (plan_of("qwen3-1.7b", None, asynchronous=a).store_bytes for a in (False, True))
    assert 14 <= sync / parameters < 14.01
    assert 16 <= asynchronous / parameters < 16.01


@pytest.mark.parametrize(("moments", "moved"), [("fp32", 26), ("bf16", 18), ("int8", 14.125)])
def test_small_moments_make_updates_shorter(moments, moved):
    spec, machine = spec_of("qwen3-1.7b"), Machine(CARDS["rtx4090"], 1)
    layout = StepLayout(4, 2048, 16, 16, torch.bfloat16, False, moments)
    costs = layer_costs(spec, layout, machine, None)
    numel = sum(unit.numel for unit in spec.units)
    assert sum(cost.update for cost in costs) == pytest.approx(moved * numel / machine.host_bandwidth)


def test_what_is_frozen_costs_an_upload_and_its_part_of_the_arithmetic():
    """No gradient to compute, to keep or to bring down, no update."""
    machine, whole = Machine(CARDS["rtx4090"], 1), spec_of("qwen3-1.7b")
    layout = StepLayout(4, 2048, 16, 16, torch.bfloat16, False)
    spec = freeze(whole, ["model.embed_tokens.weight", "model.layers.0.*", "model.layers.1.mlp.*"])
    before, after = (layer_costs(s, layout, machine, None) for s in (whole, spec))
    assert [cost.forward for cost in after] == [cost.forward for cost in before]
    assert [(cost.params, cost.kept) for cost in after] == [(cost.params, cost.kept) for cost in before]
    assert after[2:-1] == before[2:-1]
    assert (after[0].grads, after[0].sums, after[0].update) == (0, 0, 0)
    mlp = 3 * 2048 * 6144
    assert after[1].grads == before[1].grads - 2 * mlp and after[1].sums == before[1].sums - 4 * mlp
    assert after[1].update == pytest.approx(before[1].update - machine.update_seconds(mlp, 26))
    table = 151936 * 2048
    for index, numel in ((1, mlp), (28, table)):  # with the gradient accumulators, which are read and written
        spared = Work(matmul=2 * 8192 * numel, elementwise={"gradient accumulators": 2 * 4 * numel})
        seconds = machine.card.seconds(spared)
        assert before[index].backward - after[index].backward == pytest.approx(seconds)
    assert before[0].backward - after[0].backward > before[1].backward - after[1].backward
    measured = Measured((1.0,) * 28 + (0.0,), (2.0,) * 29, None, None, update=3.0, steps=2)
    assert sum(cost.update for cost in layer_costs(spec, layout, machine, measured)) == pytest.approx(3.0)


def test_a_frozen_model_needs_less_of_the_host_and_of_the_gpu():
    whole = spec_of("qwen3-1.7b")
    frozen = freeze(whole, ["model.embed_tokens.weight", "*.mlp.*"])
    layout = StepLayout(4, 2048, 16, 16, torch.bfloat16, False)
    numel = 151936 * 2048 + 28 * 3 * 2048 * 6144
    store = [make_plan(s, Machine(CARDS["rtx4090"], 1), layout).store_bytes for s in (whole, frozen)]
    assert store[0] - store[1] == pytest.approx(12 * numel, abs=28 * 6 * 4096)  # 14 bytes each to 2, in whole pages
    for stage in (Stage("FB", 0, 29), Stage("F", 0, 29)):
        before, after = (stage_memory(s, stage, layout) for s in (whole, frozen))
        params, prepared, sums, work = (b - a for b, a in zip(before, after, strict=True))
        assert (params, prepared, work) == (0, 0, 0)
        assert sums == (4 * numel if stage.backward else 0)


def test_a_quantized_base_moves_less_and_its_device_holds_what_is_dequantized():
    """By hand, of Qwen3-1.7B: the host holds and the link moves codes, the devices beside them 16 bits of a stage."""
    layout = StepLayout(4, 2048, 16, 16, torch.bfloat16, False)
    matrices = 2048 * (2 * 2048 + 2 * 1024 + 3 * 6144)  # of a layer
    plans = {}
    for base in ("bf16", "nf4"):
        spec = with_base(with_lora(spec_of("qwen3-1.7b"), LoRA(r=8)), base)
        plans[base] = make_plan(spec, Machine(CARDS["rtx4090"], 1), layout, Limits(12 * GIB))
    wide, narrow = plans["bf16"], plans["nf4"]
    assert wide.store_bytes - narrow.store_bytes == pytest.approx(28 * (2 - 0.5625) * matrices, abs=28 * 4096)
    assert wide.costs[0].params - narrow.costs[0].params == (2 - 0.5625) * matrices
    assert (wide.costs[0].prepared, narrow.costs[0].prepared) == (0, 2 * matrices)
    assert narrow.costs[-1] == wide.costs[-1]
    layers = max(sum(layer < 28 for layer in stage.layers) for stage in narrow.plan.stages)
    assert narrow.device.prepared == layers * 2 * matrices and wide.device.prepared == 0
    assert narrow.device.total <= 12 * GIB - LIBRARIES


def test_products_in_fp8_are_planned_at_their_rate():
    """By hand, of Llama-3.1-8B: twice the rate for the blocks alone, half the uploads, and transposed codes."""
    layout = StepLayout(4, 2048, 16, 16, torch.bfloat16, False)
    spec, machine = spec_of("llama-3.1-8b"), Machine(CARDS["rtx4090"], 1)
    plain, narrow = (make_plan(s, machine, layout, Limits(24 * GIB)) for s in (spec, with_fp8(spec)))
    whole = plain
    matrices = 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336)
    operations, tokens = 2 * matrices * 4 * 2048, 4 * 2048
    rows = 6144 + 4096 + 28672 + 4096
    forward = 3 * 4096 - (2 * 4096 + 14336)  # attention's output; norms and SwiGLU write 1 byte in place of 2
    inputs = 3 * 2 * 4096 + 3 * 14336  # codes transposed, or written transposed
    outputs = 3 * 6144 + 3 * 4096 + 28672 + 5 * 4096  # columns; SwiGLU finds the maxima of gate_up's
    moved = tokens * (2 * forward + 3 * rows + inputs + outputs)
    saved = 4 * operations * (1 / (0.96 * 165e12) - 1 / (0.86 * 330e12)) - moved / (TRAFFIC * 1008e9)
    block = [plan.costs[0].forward + plan.costs[0].backward for plan in (plain, narrow)]
    assert block[0] - block[1] == pytest.approx(saved, rel=1e-6)
    assert narrow.costs[-1] == plain.costs[-1]
    assert narrow.costs[0].params == matrices + 4 * rows + 2 * 2 * 4096  # and two norms
    assert narrow.costs[0].params < 0.501 * plain.costs[0].params
    assert narrow.costs[0].prepared == matrices
    assert narrow.store_bytes - plain.store_bytes == pytest.approx(32 * (matrices + 4 * rows), rel=1e-4)
    assert narrow.estimate.period < 0.7 * plain.estimate.period
    uploads = [
        sum(stage_bytes(s, stage, torch.bfloat16) for stage in plain.plan.stages) for s in (spec, with_fp8(spec))
    ]
    assert uploads[1] <= 0.55 * uploads[0]
    frozen = with_lora(spec, LoRA(r=8))
    plain, narrow = (layer_costs(s, layout, machine, None)[0] for s in (frozen, with_fp8(frozen)))
    moved = tokens * (2 * (2 * 4096 + 3 * 4096 + 3 * 14336) + 3 * rows)  # norms write codes beside their output
    saved = 3 * operations * (1 / (0.96 * 165e12) - 1 / (0.86 * 330e12)) - moved / (TRAFFIC * 1008e9)
    assert plain.forward + plain.backward - narrow.forward - narrow.backward == pytest.approx(saved, rel=1e-6)
    assert narrow.params == plain.params and narrow.prepared == 2 * matrices + 4 * rows  # a frozen base
    old = make_plan(with_fp8(spec), Machine(CARDS["rtx3090"], 1), layout, Limits(24 * GIB))
    assert old.estimate.period > whole.estimate.period


@pytest.mark.parametrize("frozen", [(), ("model.layers.*",)], ids=["full", "frozen"])
def test_sums_in_float16_are_planned_at_their_rate(frozen):
    """By hand, of Llama-3.1-8B: twice the rate for products; for weights' gradients only where layers ask for it."""
    spec, machine = freeze(spec_of("llama-3.1-8b"), frozen), Machine(CARDS["rtx4090"], 1)
    layout = StepLayout(4, 2048, 16, 16, torch.float16, False)
    before, after = (layer_costs(spec, each, machine, None) for each in (layout, replace(layout, half_sums=True)))
    for index, matrices in ((0, 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336)), (-1, 4096 * 128256)):
        one = 2 * 4 * 2048 * matrices  # operations of a product with each matrix
        saved = one / (0.96 * 165e12) - one / (MATMUL * 330e12)
        assert before[index].forward - after[index].forward == pytest.approx(saved, rel=1e-6)
        assert before[index].backward - after[index].backward == pytest.approx(2 * saved, rel=1e-6)
    summed, asked = replace(layout, half_sums=True), with_half_sums(spec)
    for index, (layer, half) in enumerate(zip(spec.stack, asked.stack, strict=True)):
        work, kept = layer_work(asked, half, summed)[1], layer_work(spec, layer, summed)[1]
        assert work.half == work.matmul == kept.matmul, index
        assert kept.half == kept.matmul * (1 if frozen and layer is not spec.head else 0.5)


@pytest.mark.parametrize("rates", [None, Rates(661, 658, 1221)], ids=["data_sheet", "doctor"])
def test_blocks_of_long_sequences_take_the_measured_time(rates):
    """Measured on an H200: 40.9 ms for a block's forward and 172.4 ms for its backward, Qwen3-1.7B, 65,536 tokens."""
    card = replace(CARDS["h200"], measured=rates and MeasuredRates(rates, "2026-11-26"))
    layout = StepLayout(1, 65536, 8, 8, torch.bfloat16, True)
    block = layer_costs(spec_of("qwen3-1.7b"), layout, Machine(card, 1), None)[0]
    assert block.forward == pytest.approx(0.0409, rel=0.03)
    assert block.backward == pytest.approx(0.1724, rel=0.03)


def test_rounds_need_less_host_memory_for_activations():
    whole, halves = (plan_of("qwen3-1.7b", 24 * GIB, round_size=size) for size in (16, 8))
    each = [plan.boundary_bytes / (outputs(plan.plan.stages)[1] + 1) for plan in (whole, halves)]  # 0 has two sets
    assert each[1] == each[0] / 2


def test_a_limit_too_small_names_the_largest_layer_and_what_it_needs():
    with pytest.raises(UserError, match=r"layer 'head', the largest, needs \d+\.\d+ GiB .* with 8192 tokens") as caught:
        plan_of("llama-3.1-8b", 4 * GIB)
    assert "the limit leaves 3.50 GiB" in str(caught.value)
