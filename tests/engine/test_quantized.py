"""A base in 4 or 8 bits in the engine equals the plain loop on its dequantized weights; uploads are a quarter."""

import time

import pytest
import torch

from rptrain.engine.footprint import ALIGNMENT, stage_memory
from rptrain.engine.memory.store import ModelStore
from rptrain.engine.meter import Meter
from rptrain.kernels.quant import FORMATS, Quantized
from rptrain.models.families.registry import build
from rptrain.models.transforms.fp8 import with_fp8
from rptrain.models.transforms.lora import LoRA, with_lora
from rptrain.models.transforms.quantize import with_base
from rptrain.schedule.plan import Plan, Stage
from tests.cases import UPDATES

from ..layouts import layout_of
from . import plain, runs
from .test_frozen import same_as_first
from .test_lora import EXPERTS, MLPS, SOME_DENSE, assert_equals_the_plain_loop

PLAN = "F0-1 F2-3 FB4-4 B2-3 B0-1"
GLM = plain.GLM4_MOE | {"moe_intermediate_size": 64}  # so that every format has whole blocks
CASES = {
    "nf4": (plain.CONFIG, "nf4", LoRA(r=4, lora_alpha=8)),
    "mxfp4": (plain.CONFIG, "mxfp4", LoRA(r=3)),
    "int8": (plain.CONFIG, "int8", LoRA(r=3, modules_to_save=("embed_tokens", "input_layernorm"))),
    "fp8": (plain.CONFIG, "fp8", LoRA(r=3)),
    "qwen3-moe": (plain.QWEN3_MOE, "nf4", LoRA(r=3)),
    "qwen3-moe-fp8": (plain.QWEN3_MOE, "fp8", LoRA(r=3)),
    "gpt-oss-fp8": (plain.GPT_OSS, "fp8", LoRA(r=3)),
    "gpt-oss-as-published": (plain.GPT_OSS, "mxfp4", LoRA(r=3)),
    "adapted-experts": (plain.QWEN3_MOE, "nf4", LoRA(r=3, target_modules=(), target_parameters=EXPERTS)),
    "adapted-dense": (SOME_DENSE, "int8", LoRA(r=3, target_modules=(), target_parameters=MLPS)),
    "gpt-oss-adapted-experts": (plain.GPT_OSS, "mxfp4", LoRA(r=3, target_parameters=EXPERTS)),
    "gpt-oss-and-attention": (plain.GPT_OSS, "nf4", LoRA(r=3)),
}


@pytest.mark.sample(6, gate=12)
@pytest.mark.parametrize(("cfg", "base", "lora"), CASES.values(), ids=CASES)
def test_equals_the_plain_loop_on_the_dequantized_weights(cfg, base, lora):
    steps, rate = 3, 5e-3
    batches = plain.make_batches(steps)
    asynchronous = base != "nf4"
    store = runs.make_store(cfg, torch.float64, asynchronous=asynchronous, lora=lora, base=base)
    assert any(unit.quantized for unit in store.spec.units)
    formats = {param.format.name for unit in store.spec.units for param in unit.quantized}
    assert base in formats or cfg is plain.GPT_OSS
    assert_equals_the_plain_loop(store, cfg, lora, batches, rate, asynchronous=asynchronous)


@pytest.mark.sample(1, gate=3)
@pytest.mark.parametrize(
    ("cfg", "lora", "kind"),
    [
        pytest.param(plain.CONFIG, LoRA(r=4), "nf4", id="nf4"),
        *(
            pytest.param(GLM, LoRA(r=4, target_parameters=MLPS), kind, id=f"glm4-moe-{kind}")
            for kind in (*FORMATS, "fp8")
        ),
    ],
)
def test_the_bits_of_a_base_that_was_dequantized_before(cfg, lora, kind):
    batches, plan = plain.make_batches(3), f"{PLAN} | N=2 M=4 MR=4"
    results = []
    for base in (kind, "bf16"):
        with (
            runs.make_store(cfg, torch.bfloat16, asynchronous=False, lora=lora, base=kind) as narrow,
            runs.make_store(cfg, torch.bfloat16, asynchronous=False, lora=lora, base=base) as store,
        ):
            for index in narrow.spec.frozen if base == "bf16" else ():
                for name, tensor in narrow.weights(index).items():
                    store.view(index, name).copy_(tensor)
            results.append(runs.train(store, batches, plan, asynchronous=False, rate=1e-2))
    same_as_first(results)
    plainly = runs.run(cfg, batches, plan, dtype=torch.bfloat16, asynchronous=False, lora=lora)
    assert plainly[0] != results[0][0]


@pytest.mark.long
@UPDATES
def test_same_bits_on_any_number_of_workers_and_any_plan(asynchronous):
    batches, results = plain.make_batches(3), []
    for plan in (
        f"{PLAN} | N=1 M=4 MR=4",
        f"{PLAN} | N=3 M=4 MR=4",
        "FB0-4 | N=2 M=4 MR=4",
        "F0-0 F1-2 FB3-4 B2-2 B1-1 B0-0 | N=2 M=4 MR=4",
    ):
        options = {"asynchronous": asynchronous, "lora": LoRA(r=3, lora_dropout=0.1), "base": "nf4", "rate": 1e-2}
        results.append(runs.run(plain.CONFIG, batches, plan, dtype=torch.bfloat16, **options))
    same_as_first(results)


@pytest.mark.parametrize("slow", ["upload", "preparing", "micro-batch"])
def test_nothing_is_dequantized_before_it_arrived_or_while_it_is_read(slow):
    def probe(where):
        if slow in where:
            time.sleep(0.03 if slow == "upload" else 0.004)

    batches, plan = plain.make_batches(2), "F0-1 F2-3 FB4-4 B2-3 B0-1 | N=2 M=4 MR=4"
    options = {"asynchronous": True, "lora": LoRA(r=2), "base": "int8"}
    same_as_first([runs.run(plain.CONFIG, batches, plan, probe=p, **options) for p in (None, probe)])


def test_it_is_dequantized_once_a_stage_and_not_for_each_micro_batch():
    seen = []
    plan = Plan.parse("F0-3 FB4-4 B0-3 | N=1 M=4 MR=4")
    options = {"asynchronous": True, "lora": LoRA(r=2), "base": "nf4"}
    runs.run(plain.CONFIG, plain.make_batches(2), plan, probe=seen.append, **options)
    stages = [where.removesuffix(" preparing parameters") for where in seen if where.endswith(" preparing parameters")]
    slots = [slot for iteration in range(2) for slot in plan.slots(iteration) if slot.stage.kind != "FB"]
    assert sorted(stages) == sorted(str(slot) for slot in slots for _ in range(4))  # a layer each


def test_uploads_are_a_quarter_as_large():
    """As counted, and as planned."""
    cfg = plain.config(hidden_size=256, intermediate_size=768, head_dim=64, num_hidden_layers=2, vocab_size=32)
    lora, steps, plan = LoRA(r=1, target_modules=("q_proj",)), 3, Plan.parse("F0-1 FB2-2 B0-1 | N=1 M=4 MR=4")
    batches = plain.make_batches(steps, vocab=32)
    counted = {}
    for base in ("bf16", "nf4", "mxfp4", "int8", "fp8"):
        meter = Meter()
        with runs.make_store(cfg, torch.bfloat16, asynchronous=True, lora=lora, base=base) as store:
            runs.train(store, batches, plan, asynchronous=True, meter=meter)
            units = [unit for stage in plan.stages for layer in stage.layers for unit in store.spec.stack[layer].units]
            planned = sum(store.spec.units[unit].nbytes(2) for unit in units)
        copies = [reading for reading in meter.readings if reading.kind == "upload" and reading.iteration == 1]
        counted[base] = sum(reading.subject for reading in copies)
        assert counted[base] == planned
    assert counted["bf16"] / counted["nf4"] >= 3.5
    assert counted["bf16"] / counted["mxfp4"] >= 3.7
    assert counted["bf16"] / counted["int8"] == pytest.approx(2 / (1 + 4 / 128), rel=0.02)
    assert counted["bf16"] / counted["fp8"] == pytest.approx(2 / (1 + 4 / 256), rel=0.02)


@pytest.mark.parametrize("base", [*FORMATS, "fp8"])
def test_memory_is_what_the_formats_say(base):
    """By hand, of a layer whose matrices are all quantized: host, device, and what a device dequantizes."""
    cfg = plain.config(hidden_size=128, intermediate_size=128, head_dim=64, num_hidden_layers=1, vocab_size=128)
    matrices = 2 * 128 * 256 + 2 * 128 * 128 + 3 * 128 * 128  # q and o, k and v, the MLP
    rows = 256 + 256 + 128 + 256 + 128  # q, k and v, o, gate and up, down
    each = {"nf4": 0.5 + 4 / 64, "mxfp4": 0.5 + 1 / 32, "int8": 1 + 4 / 128, "fp8": 1 + 4 * rows / matrices}[base]
    spec = with_base(with_lora(build(cfg), LoRA(r=1)), base)
    (unit,) = (unit for unit in spec.units if unit.quantized)
    assert unit.nbytes(2) == each * matrices + 2 * 2 * 128  # and two norms
    trained = sum(unit.numel for unit in spec.units if unit.trainable)
    host = -(-unit.nbytes(2) // 4096) * 4096 + 2 * 128 * 128 * 2 + 4096  # with the tables and the last norm
    lora = sum(-(-trained * size // 4096) * 4096 for size in (2, 2, 2, 4, 4))
    assert sum(ModelStore.sizes(spec, layout_of(torch.bfloat16, generations=1)).values()) == host + lora
    with ModelStore(spec, layout_of(torch.bfloat16, generations=1)) as store:
        (state,) = (state for state in store.units if state.quantized)
        assert [flat.nbytes for flat in state.params] == [unit.nbytes(2)] and not state.grads
        assert all(isinstance(held, Quantized) for held in state.quantized.values())
    layout = layout_of(torch.bfloat16, tokens=16)
    memory = stage_memory(spec, Stage("B", 0, 1), layout)
    assert memory.params == -(-(unit.nbytes(2) + 2 * trained) // ALIGNMENT) * ALIGNMENT
    assert memory.prepared == 2 * matrices
    multiplied = with_fp8(spec)  # codes and scales of rows instead, unless the codes are uploaded
    for kind, copies in (("F", 1), ("B", 2)):
        prepared = stage_memory(multiplied, Stage(kind, 0, 1), layout).prepared
        assert prepared == ((copies - 1) * matrices if base == "fp8" else copies * matrices + 4 * rows)
