"""Compare updates with the routers' auxiliary loss to those of transformers, which takes it over all layers together.

python -m benchmarks.router_loss [--layers N]: prints a line for each family and coefficient. Models are small and
random, in float64; the first step of AdamW is compared. Differences are norms over all weights, or over the routers,
divided by those of transformers' updates. With one layer there is no difference but rounding.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rptrain.engine.engine import Devices, Engine
from rptrain.engine.footprint import footprint
from rptrain.engine.memory.step_layout import StepLayout
from rptrain.engine.memory.store import ModelStore
from rptrain.engine.optimizer import Optimizer
from rptrain.kernels.batch import IGNORED, Batch
from rptrain.models.families import registry
from rptrain.models.transforms.balance import balanced
from rptrain.models.weights import pretrained
from rptrain.schedule.plan import Plan

EXPERTS, TOKENS, VOCAB, RATE = 8, 512, 512, 1e-4
COEFFICIENTS = (0.001, 0.01)
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 64},
    "gpt_oss": {"num_local_experts": EXPERTS, "sliding_window": 128},
    "minimax_m2": {"num_local_experts": EXPERTS},
}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
Weights = dict[str, Tensor]  # by names in checkpoints


def held(store: ModelStore) -> Weights:
    """A copy of the weights."""
    return {
        param.parts[0].key: store.view(index, param.name).clone()
        for index, unit in enumerate(store.spec.units)
        for param in unit.params
    }


def loaded(directory: Path, coefficient: float) -> ModelStore:
    spec = balanced(registry.build(registry.model_config(directory)), coefficient)
    store = ModelStore(spec, StepLayout(1, TOKENS, 1, 1, torch.float64, asynchronous=False))
    pretrained.load(pretrained.check(directory, spec), spec, store.stored_view)
    store.loaded()
    return store


def ours(directory: Path, ids: Tensor, coefficient: float) -> Weights:
    """The weights after a step of the engine."""
    labels = torch.cat([ids[:, 1:], torch.full((1, 1), IGNORED)], 1)
    positions, tokens = torch.arange(ids.numel())[None], ids.numel()
    batch = Batch(ids, positions, labels, ((tokens,),), sequences=1, length=tokens, supervised=tokens - 1)
    with loaded(directory, coefficient) as store:
        plan = Plan.parse(f"FB0-{len(store.spec.layers)} | N=1 M=1 MR=1")
        with Engine(
            store, plan, Devices(["cpu:0"], footprint(store.spec, plan.stages, store.layout)), Optimizer()
        ) as engine:
            engine.forward_backward(batch)
            engine.step(RATE)
            engine.synchronize()
        return held(store)


def theirs(directory: Path, after: Path, ids: Tensor, coefficient: float) -> Weights:
    """The weights after a step of transformers and torch.optim.AdamW, which are saved to `after`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager").eval()
    model.set_experts_implementation("eager")
    model.router_aux_loss_coef = coefficient
    model(ids, labels=ids, output_router_logits=True).loss.backward()
    torch.optim.AdamW(model.parameters(), RATE, (0.9, 0.999), 1e-8, weight_decay=0.0).step()
    model.save_pretrained(after)
    with loaded(after, 0.0) as store:
        return held(store)


def difference(first: Weights, second: Weights, before: Weights, words: str) -> float:
    """The norm of the difference of two updates, divided by that of the second, over weights named like this."""
    names = [name for name in before if words in name]
    apart = sum((first[name] - second[name]).square().sum().item() for name in names)
    return (apart / sum((second[name] - before[name]).square().sum().item() for name in names)) ** 0.5


def compare(family: str, layers: int, folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family], num_hidden_layers=layers)
    AutoModelForCausalLM.from_config(config, dtype=torch.float64).save_pretrained(folder / "model")
    ids = torch.randint(VOCAB, (1, TOKENS))
    with loaded(folder / "model", 0.0) as store:
        before = held(store)
    routers = "router" if family == "gpt_oss" else "gate.weight"
    without = theirs(folder / "model", folder / "without", ids, 0.0)
    for coefficient in COEFFICIENTS:
        step = theirs(folder / "model", folder / f"with-{coefficient}", ids, coefficient)
        own = ours(folder / "model", ids, coefficient)
        figures = [f"{difference(one, step, before, words):8.2%}" for one in (own, without) for words in ("", routers)]
        print(f"{family:12}{coefficient:7} ", "  ".join(figures))


def main() -> None:
    from transformers.utils.logging import disable_progress_bar

    parser = argparse.ArgumentParser("python -m benchmarks.router_loss", description=__doc__)
    parser.add_argument("--layers", type=int, default=3, help="layers of the models (default: 3)")
    layers = parser.parse_args().layers
    disable_progress_bar()
    print("difference from transformers: all weights, routers; the same without the loss")
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            compare(family, layers, Path(folder))


if __name__ == "__main__":
    main()
