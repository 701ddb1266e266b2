"""Blocks that multiply in FP8: the same bits on any number of workers and any plan, and learning."""

import pytest
import torch

from rptrain.models.adapters.lora import LoRA
from tests.cases import UPDATES, long

from . import plain, runs
from .test_frozen import same_as_first
from .test_lora import EXPERTS

PLANS = (
    "F0-1 F2-3 FB4-4 B2-3 B0-1 | N=1 M=4 MR=4",
    "F0-1 F2-3 FB4-4 B2-3 B0-1 | N=3 M=4 MR=4",
    "F0-2 FB3-4 B2-2 B1-1 B0-0 | N=2 M=4 MR=4",
    "FB0-4 | N=4 M=4 MR=4",
)
QWEN3_MOE = plain.QWEN3_MOE | {"moe_intermediate_size": 16}
CASES = {
    "full": {},
    "lora": {"lora": LoRA(r=3, lora_dropout=0.1)},
    "dora": {"lora": LoRA(r=3, use_dora=True)},
    "nf4": {"lora": LoRA(r=3), "base": "nf4"},
}
MIXTURES = {
    "qwen3-moe": {"cfg": QWEN3_MOE},
    "gpt-oss": {"cfg": plain.GPT_OSS},
    "mxfp4": {"cfg": plain.GPT_OSS, "lora": LoRA(r=3, target_parameters=EXPERTS), "base": "mxfp4"},
}


@UPDATES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_same_bits_on_any_number_of_workers_and_any_plan(asynchronous, dtype, case):
    assert_same_bits(asynchronous, dtype, case)


@UPDATES
@pytest.mark.parametrize("dtype", [long(torch.float32), torch.bfloat16])
@pytest.mark.parametrize("case", MIXTURES.values(), ids=MIXTURES)
def test_same_bits_with_experts(asynchronous, dtype, case):
    assert_same_bits(asynchronous, dtype, case)


def assert_same_bits(asynchronous, dtype, case):
    options = {"cfg": plain.CONFIG, "asynchronous": asynchronous, "dtype": dtype, "rate": 1e-2} | case
    options["batches"] = plain.make_batches(3)
    results = [runs.run(plan=plan, fp8=True, **options) for plan in PLANS]
    same_as_first(results)
    assert runs.run(plan=PLANS[0], **options)[0] != results[0][0]


@UPDATES
def test_learns_as_without(asynchronous):
    batches = plain.make_batches(4) * 10
    losses = [
        runs.run(plain.CONFIG, batches, PLANS[1], asynchronous=asynchronous, rate=1e-2, fp8=fp8)[0]
        for fp8 in (False, True)
    ]
    assert losses[1][:5] == pytest.approx(losses[0][:5], rel=0.03)
    assert all(loss[0] - loss[-1] > 1 for loss in losses)
