"""Blocks that multiply in FP8: the same bits on any number of workers and any plan, and learning."""

import pytest
import torch

from rptrain.engine.footprint import stage_prepared
from rptrain.engine.transfer.layouts import ParamLayout
from rptrain.kernels.fp8 import FP8Weight
from rptrain.models.families.registry import build
from rptrain.models.transforms.fp8 import with_fp8
from rptrain.models.transforms.lora import LoRA, with_lora
from rptrain.models.transforms.quantize import with_base
from rptrain.schedule.plan import Stage
from tests.cases import BOTH, UPDATES

from . import plain, runs
from .test_frozen import same_as_first
from .test_lora import EXPERTS, MLPS

PLANS = (
    "F0-1 F2-3 FB4-4 B2-3 B0-1 | N=1 M=4 MR=4",
    "F0-1 F2-3 FB4-4 B2-3 B0-1 | N=3 M=4 MR=4",
    "F0-2 FB3-4 B2-2 B1-1 B0-0 | N=2 M=4 MR=4",
    "FB0-4 | N=4 M=4 MR=4",
)
QWEN3_MOE = plain.QWEN3_MOE | {"moe_intermediate_size": 16}
HEADS = {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
EXPERT_SIZES = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
CASES = {
    "full": {},
    "lora": {"lora": LoRA(r=3, lora_dropout=0.1)},
    "dora": {"lora": LoRA(r=3, use_dora=True)},
    "nf4": {"lora": LoRA(r=3), "base": "nf4"},
    "fp8": {"lora": LoRA(r=3), "base": "fp8"},
    "fp8-dora": {"lora": LoRA(r=3, use_dora=True), "base": "fp8"},
}
MIXTURES = {
    "qwen3-moe": {"cfg": QWEN3_MOE},
    "gpt-oss": {"cfg": plain.GPT_OSS},
    "glm4-moe": {"cfg": plain.GLM4_MOE},
    "glm4-moe-adapted": {"cfg": plain.GLM4_MOE, "lora": LoRA(r=3, target_parameters=MLPS)},
    "qwen3.5": {"cfg": plain.of_family("qwen3_5_text") | HEADS},
    "qwen3.5-moe-adapted": {"cfg": plain.of_family("qwen3_5_moe_text") | HEADS | EXPERT_SIZES, "lora": LoRA(r=3)},
    "mxfp4": {"cfg": plain.GPT_OSS, "lora": LoRA(r=3, target_parameters=EXPERTS), "base": "mxfp4"},
}


@pytest.mark.sample(3, gate=6)
@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_same_bits_on_any_number_of_workers_and_any_plan(asynchronous, dtype, case):
    assert_same_bits(asynchronous, dtype, case)


@pytest.mark.long
@pytest.mark.sample(5)
@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", MIXTURES.values(), ids=MIXTURES)
def test_same_bits_with_experts_and_delta_nets(asynchronous, dtype, case):
    assert_same_bits(asynchronous, dtype, case)


def assert_same_bits(asynchronous, dtype, case):
    options = {"cfg": plain.CONFIG, "asynchronous": asynchronous, "dtype": dtype, "rate": 1e-2} | case
    options["batches"] = plain.make_batches(3)
    results = [runs.run(plan=plan, fp8=True, **options) for plan in PLANS]
    same_as_first(results)
    assert runs.run(plan=PLANS[0], **options)[0] != results[0][0]


@pytest.mark.long
@pytest.mark.sample(5)
@BOTH
@pytest.mark.parametrize("plan", PLANS[:2], ids=["one-worker", "three-workers"])
@pytest.mark.parametrize(
    ("cfg", "lora"),
    [
        pytest.param(plain.CONFIG, LoRA(r=3, lora_dropout=0.1), id="dense"),
        pytest.param(plain.CONFIG, LoRA(r=3, use_dora=True), id="dora"),
        pytest.param(
            plain.CONFIG, LoRA(r=3, target_modules=("q_proj",), modules_to_save=("o_proj",)), id="trained-beside"
        ),
        pytest.param(QWEN3_MOE, LoRA(r=3, target_parameters=EXPERTS), id="experts"),
        pytest.param(plain.GLM4_MOE, LoRA(r=3, target_parameters=MLPS), id="glm4-moe"),
    ],
)
def test_a_base_held_in_fp8_has_the_bits_of_one_quantized_on_the_device(cfg, lora, plan, asynchronous):
    """And of the adapters after it."""
    batches, kind = plain.make_batches(3), {"asynchronous": asynchronous, "lora": lora, "fp8": True}
    with (
        runs.make_store(cfg, torch.bfloat16, **kind) as store,
        runs.make_store(cfg, torch.bfloat16, base="fp8", **kind) as held,
    ):
        quantized = [(index, param) for index, unit in enumerate(held.spec.units) for param in unit.quantized]
        for index, param in quantized:
            held.stored_view(index, param.name).write(store.view(index, param.name))
        results = [runs.run(None, batches, plan, asynchronous=asynchronous, store=s, rate=1e-2) for s in (store, held)]
    assert results[0][:2] == results[1][:2]
    codes = {part.key for _, param in quantized for part in param.parts}
    assert codes and codes < results[0][2].keys()
    assert all(torch.equal(results[1][2][name], x) for name, x in results[0][2].items() if name not in codes)


@pytest.mark.parametrize("kind", ["F", "B"])
def test_held_codes_are_read_in_the_slot_and_transposed_for_backward(kind):
    """A matrix that cannot be multiplied in FP8 is dequantized; forward, nothing else is prepared."""
    spec = with_fp8(with_base(with_lora(build(plain.CONFIG | {"intermediate_size": 40}), LoRA(r=3)), "fp8"))
    layout = ParamLayout(spec, Stage(kind, 0, 2), torch.bfloat16)
    size = stage_prepared(spec, Stage(kind, 0, 2), torch.bfloat16)
    slot, prepared = torch.zeros(layout.size, dtype=torch.uint8), torch.full((size,), 7, dtype=torch.uint8)
    for bound in layout.bind(slot, prepared):
        weights = {name: w for name, w in bound.params.items() if isinstance(w, FP8Weight)}
        assert set(weights) == {"qkv", "o", "gate_up"}
        assert [place.data_ptr() for _, place in bound.quantized] == [bound.params["down"].data_ptr()]
        assert not bound.in_fp8
        assert len(bound.uploaded) == (3 if kind == "B" else 0)
        for w in weights.values():
            for part in w.rows:
                assert 0 <= part.data_ptr() - slot.data_ptr() <= len(slot) - part.nbytes
            assert (w.columns is not None) == (kind == "B")
        bound.prepare()


@pytest.mark.long
@UPDATES
def test_learns_as_without(asynchronous):
    batches = plain.make_batches(4) * 10
    losses = [
        runs.run(plain.CONFIG, batches, PLANS[1], asynchronous=asynchronous, rate=1e-2, fp8=fp8)[0]
        for fp8 in (False, True)
    ]
    assert losses[1][:5] == pytest.approx(losses[0][:5], rel=0.03)
    assert all(loss[0] - loss[-1] > 1 for loss in losses)
