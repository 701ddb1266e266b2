"""What can be trained beside whole weights: as the plain loop, and the same bits with any plan, on CPUs and on GPUs."""

import pytest
import torch

from rptrain.models.transforms.lora import LoRA
from tests.cases import UPDATES, grid

from ..engine import plain, runs

SIZES = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256, "moe_intermediate_size": 64}
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
DENSE = plain.config(**SIZES, tie_word_embeddings=True)
QWEN3_MOE, GPT_OSS = plain.QWEN3_MOE | SIZES, plain.GPT_OSS | SIZES
PLANS = ("F0-1 F2-3 FB4-4 B2-3 B0-1", "F0-2 FB3-4 B2-2 B1-1 B0-0", "FB0-4")
KINDS = {
    "dora": (DENSE, LoRA(r=4, use_dora=True), "bf16"),
    "dora-on-nf4": (DENSE, LoRA(r=4, use_dora=True), "nf4"),
    "aux-loss": (QWEN3_MOE | {"router_aux_loss_coef": 0.7}, LoRA(r=4), "bf16"),
    "gpt-oss-aux-loss": (GPT_OSS | {"router_aux_loss_coef": 0.7}, LoRA(r=4), "mxfp4"),
    "experts-adapters": (QWEN3_MOE, LoRA(r=4, target_parameters=EXPERTS), "bf16"),
    "dense-adapters-on-int8": (
        QWEN3_MOE | {"mlp_only_layers": [1]},
        LoRA(r=4, target_parameters=("mlp.gate_proj.weight", "mlp.down_proj.weight")),
        "int8",
    ),
    "experts-adapters-on-nf4": (QWEN3_MOE, LoRA(r=4, target_modules=(), target_parameters=EXPERTS), "nf4"),
}
ON_CPU = ("dora-on-nf4", "gpt-oss-aux-loss")  # tests/engine has the others
EVERYWHERE = pytest.mark.parametrize(
    ("device", "cfg", "lora", "base"),
    [
        *(pytest.param("cpu", *KINDS[name], id=f"cpu-{name}") for name in ON_CPU),
        *(pytest.param("cuda", *kind, id=f"cuda-{name}", marks=pytest.mark.gpu) for name, kind in KINDS.items()),
    ],
)
TRAINING = {"rate": 1e-2, "max_grad_norm": 0.5, "weight_decay": 0.1}


def whole_loop(cfg, lora, base, batches, asynchronous):
    """Losses and norms of the plain loop in float64, on the weights that are held."""
    with runs.make_store(cfg, torch.float64, asynchronous=asynchronous, lora=lora, base=base) as store:
        trained = {
            part.key for unit in store.spec.units if unit.trainable for param in unit.params for part in param.parts
        }
        tensors = runs.checkpoint_tensors(store)
    options = {name: value for name, value in TRAINING.items() if name != "rate"}
    rates = [TRAINING["rate"]] * len(batches)
    scaled = cfg | {"lora_scale": lora.scale}
    frozen = tensors.keys() - trained
    return plain.train(
        tensors, scaled, batches, rates, delayed=asynchronous, betas=runs.BETAS, frozen=frozen, **options
    )


@EVERYWHERE
@UPDATES
def test_equals_the_plain_loop(device, cfg, lora, base, asynchronous):
    batches = plain.make_batches(3, length=16)
    losses, norms = whole_loop(cfg, lora, base, batches, asynchronous)
    kind = {"lora": lora, "base": base, "asynchronous": asynchronous, "device": device}
    found = runs.run(cfg, batches, f"{PLANS[0]} | N=1 M=4 MR=4", dtype=torch.float32, **kind, **TRAINING)
    assert found[0] == pytest.approx(losses, rel=1e-4)
    assert found[1] == pytest.approx(norms, rel=1e-3)
    assert len(set(found[0])) == len(batches)


@pytest.mark.grid
@EVERYWHERE
def test_the_same_bits_every_time_and_with_any_plan(device, cfg, lora, base):
    """In the first plan the head alone is the first stage of backward, which has nothing to dequantize."""
    batches, results = plain.make_batches(3, length=16), []
    kind = {"lora": lora, "base": base, "asynchronous": True, "device": device, "dtype": torch.bfloat16}
    for plan in (PLANS[0], *PLANS):
        results.append(runs.run(cfg, batches, f"{plan} | N=1 M=4 MR=4", **kind, **TRAINING))
    for losses, norms, weights, _ in results[1:]:
        assert (losses, norms) == results[0][:2]
        assert all(torch.equal(weights[name], tensor) for name, tensor in results[0][2].items())


@pytest.mark.parametrize(
    ("device", "base"),
    [("cpu", "nf4"), *(pytest.param("cuda", base, marks=pytest.mark.gpu) for base in ("bf16", "nf4"))],
)
@pytest.mark.parametrize("plan", [PLANS[0], grid(PLANS[2])])
def test_evaluation_during_a_run_is_of_the_newest_weights_and_changes_nothing(plan, device, base):
    *batches, other = plain.make_batches(4, length=16)
    lora, plan = LoRA(r=4), f"{plan} | N=1 M=4 MR=4"
    options = {"device": device, "asynchronous": True, "max_grad_norm": 0.5}
    for dtype in (torch.float32, torch.bfloat16):
        kind = {"lora": lora, "base": base, "asynchronous": True, "lock": device == "cuda"}
        with runs.make_store(DENSE, dtype, **kind) as store:
            tokens, found = other.sequences * other.length, []
            with runs.engine_of(store, plan, tokens=tokens, **options) as engine:
                for batch in batches:
                    engine.forward_backward(batch)
                    engine.step(1e-2)
                    loss = engine.evaluate(other) / other.supervised
                    at = {name: tensor.double() for name, tensor in runs.checkpoint_tensors(store).items()}
                    found.append((loss, plain.loss(at, DENSE | {"lora_scale": lora.scale}, other).item()))
            weights = runs.checkpoint_tensors(store)
        exact = 1e-4 if dtype == torch.float32 else 2e-2
        assert [loss for loss, _ in found] == pytest.approx([expected for _, expected in found], rel=exact)
        assert len({loss for loss, _ in found}) == len(batches)
        plainly = runs.run(DENSE, batches, plan, dtype=dtype, lora=lora, base=base, rate=1e-2, **options)
        assert all(torch.equal(weights[name], tensor) for name, tensor in plainly[2].items())
