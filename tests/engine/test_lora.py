"""Adapters in the engine: exactly the plain loop's, the same bits with dropout on any workers, and a small store."""

from dataclasses import replace

import pytest
import torch

from rptrain.engine.memory.store import ModelStore
from rptrain.models.families.registry import build
from rptrain.models.transforms.lora import LoRA, with_lora
from tests.cases import BOTH, UPDATES, grid

from ..layouts import layout_of
from . import plain, runs
from .test_frozen import same_as_first

PLAN = "F0-1 F2-3 FB4-4 B2-3 B0-1"
TIED = plain.config(tie_word_embeddings=True)
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
MLPS = (*EXPERTS, "gate_proj.weight", "up_proj.weight", "down_proj.weight")  # also dense ones, and shared experts
SOME_DENSE = plain.QWEN3_MOE | {"mlp_only_layers": [1]}
CASES = {
    "all": (plain.CONFIG, LoRA(r=4, lora_alpha=8)),
    "rank-one-rslora": (TIED, LoRA(r=1, lora_alpha=3, use_rslora=True)),
    "upper-layers": (plain.CONFIG, LoRA(r=3, target_modules=r".*\.[23]\..*\.(q|v|up)_proj")),
    "modules-to-save": (plain.CONFIG, LoRA(r=3, modules_to_save=("embed_tokens", "lm_head", "input_layernorm"))),
    "tied-embedding-saved": (TIED, LoRA(r=3, modules_to_save=("embed_tokens",))),
    "qwen3-moe": (plain.QWEN3_MOE, LoRA(r=3)),
    "gpt-oss-aux": (plain.GPT_OSS | {"router_aux_loss_coef": 0.7}, LoRA(r=3)),
    "qwen3-moe-experts": (plain.QWEN3_MOE, LoRA(r=3, target_parameters=EXPERTS)),
    "gpt-oss-experts": (plain.GPT_OSS, LoRA(r=2, target_modules=(), target_parameters=EXPERTS)),
    "qwen3-moe-some-dense": (SOME_DENSE, LoRA(r=3, target_modules=(), target_parameters=MLPS)),
    "dora": (TIED, LoRA(r=3, use_dora=True)),
    "gpt-oss-dora": (plain.GPT_OSS, LoRA(r=3, target_modules=("k_proj", "o_proj"), use_dora=True)),
    "gpt-oss": (plain.GPT_OSS, LoRA(r=3, target_modules=("q_proj", "o_proj"))),
}


def assert_equals_the_plain_loop(store, cfg, lora, batches, rate, *, asynchronous):
    """In float64: losses, norms and adapters; and the rest is as it was."""
    expected = runs.checkpoint_tensors(store)
    before = {name: tensor.clone() for name, tensor in expected.items()}
    units = [unit for unit in store.spec.units if unit.trainable]
    trained = {part.key for unit in units for param in unit.params for part in param.parts}
    assert any("lora_A" in name for name in trained)
    frozen = expected.keys() - trained
    options = {"weight_decay": 0.1, "max_grad_norm": 0.1}
    losses, norms = plain.train(
        expected,
        {**cfg, "lora_scale": lora.scale},
        batches,
        [rate] * len(batches),
        delayed=asynchronous,
        betas=runs.BETAS,
        frozen=frozen,
        **options,
    )
    got_losses, got_norms, got, _ = runs.run(
        cfg, batches, f"{PLAN} | N=2 M=4 MR=4", rate=rate, asynchronous=asynchronous, store=store, **options
    )
    assert got_losses == pytest.approx(losses, abs=1e-10)
    assert got_norms == pytest.approx(norms, rel=1e-9)
    for name, tensor in expected.items():
        assert (got[name] - tensor).abs().max() < 1e-10, name
        assert torch.equal(got[name], before[name]) == (name in frozen), name


@pytest.mark.sample(6, gate=13)
@pytest.mark.parametrize(("cfg", "lora"), CASES.values(), ids=CASES)
@BOTH
def test_equals_the_plain_loop(asynchronous, cfg, lora):
    steps, rate = 4, 5e-3
    batches = plain.make_batches(steps)
    store = runs.make_store(cfg, torch.float64, asynchronous=asynchronous, lora=lora)
    assert_equals_the_plain_loop(store, cfg, lora, batches, rate, asynchronous=asynchronous)


DROPPING = LoRA(r=3, lora_alpha=12, lora_dropout=0.3, modules_to_save=("norm",))


@pytest.mark.long
@UPDATES
@pytest.mark.parametrize("dtype", [grid(torch.float32), torch.bfloat16])
def test_same_bits_with_dropout_on_any_number_of_workers_and_any_plan(asynchronous, dtype):
    batches = plain.make_batches(3)
    others = [f"{PLAN} | N={n} M=4 MR=4" for n in (1, 3)]
    others += [f"{plan} | N=2 M=4 MR=4" for plan in ("F0-2 FB3-4 B2-2 B1-1 B0-0", "FB0-4")]
    same_as_first(
        [runs.run(TIED, batches, plan, asynchronous=asynchronous, dtype=dtype, lora=DROPPING) for plan in others]
    )


@pytest.mark.sample(1, gate=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("cfg", "parameters"),
    [(plain.QWEN3_MOE, EXPERTS), (plain.GPT_OSS, EXPERTS), (plain.GLM4_MOE, MLPS), (plain.MINIMAX_M2, EXPERTS)],
    ids=["qwen3-moe", "gpt-oss", "glm4-moe", "minimax-m2"],
)
def test_same_bits_with_adapters_of_experts_on_any_number_of_workers_and_any_plan(cfg, parameters, dtype):
    batches, lora = plain.make_batches(3), LoRA(r=3, target_parameters=parameters)
    others = [f"{PLAN} | N={n} M=4 MR=4" for n in (1, 3)] + [f"FB0-4 | N={n} M=4 MR=4" for n in (2, 4)]
    same_as_first([runs.run(cfg, batches, plan, asynchronous=True, dtype=dtype, lora=lora) for plan in others])


def test_masks_follow_from_seed_step_and_row_and_from_nothing_else():
    """The same tokens in all micro-batches of two steps; then in micro-batches of half as many rows."""
    first = plain.make_batches(1, micro_batches=2)[0]
    same = replace(first, input_ids=first.input_ids[:1].repeat(2, 1), labels=first.labels[:1].repeat(2, 1))
    same = replace(same, positions=first.positions[:1].repeat(2, 1), documents=first.documents[:1] * 2)
    same = replace(same, supervised=int((same.labels != -100).sum()))

    def losses(*batches, sequences=2):
        plan = f"FB0-4 | N=1 M={4 // sequences} MR={4 // sequences}"
        return runs.run(TIED, batches, plan, dtype=torch.float64, asynchronous=False, lora=DROPPING, rate=1e-30)[0]

    zero, one, seed = losses(same, replace(same, step=1), replace(same, seed=1))
    assert len({zero, one, seed}) == 3
    assert losses(same) == losses(replace(same, seed=1 << 70)) == [zero]
    cut = {name: getattr(same, name).view(4, -1) for name in ("input_ids", "labels", "positions")}
    documents = tuple(pair for four in same.documents for pair in (four[:2], four[2:]))
    assert losses(replace(same, **cut, documents=documents, sequences=1), sequences=1) == pytest.approx(
        [zero], rel=1e-12
    )


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_the_base_takes_two_bytes_a_parameter(asynchronous):
    cfg = {**plain.CONFIG, "hidden_size": 512, "num_hidden_layers": 2}
    base = build(cfg)
    spec = with_lora(base, LoRA(r=4))
    generations = 1 + asynchronous
    size = sum(ModelStore.sizes(spec, layout_of(torch.bfloat16, generations=generations)).values())
    adapters = sum(unit.numel for unit in spec.units if unit.trainable)
    pages = 4096 * len(spec.units) * (generations + 4)  # what buffers that end in the midst of one may take more
    least = 2 * sum(unit.numel for unit in base.units) + (2 * generations + 2 + 2 + 8) * adapters
    assert least <= size <= least + pages
