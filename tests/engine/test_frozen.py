"""Frozen parameters: exactly the plain loop that leaves them out, and nothing of them is kept, moved or written."""

import math
import time
from fnmatch import fnmatchcase
from functools import partial

import pytest
import torch

from rptrain.engine.memory import arena
from rptrain.engine.memory.store import ModelStore
from rptrain.engine.meter import Meter, likeness
from rptrain.engine.optim.adam import CpuAdam
from rptrain.engine.optim.gradients import label
from rptrain.models.families.registry import build
from rptrain.models.transforms.freeze import freeze
from tests.cases import BOTH, UPDATES, grid

from ..layouts import layout_of
from . import plain, runs
from .memory.test_store import Runtime

PLAN = "F0-1 F2-3 FB4-4 B2-3 B0-1"
TIED = plain.config(tie_word_embeddings=True)
LAYERS = [f"model.layers.{i}.*" for i in range(4)]
CASES = {
    "embedding": (plain.CONFIG, ["model.embed_tokens.weight"]),
    "head": (plain.CONFIG, ["lm_head.weight"]),
    "tied": (TIED, ["model.embed_tokens.weight"]),
    "lower-layers": (plain.CONFIG, ["model.embed_tokens.weight", *LAYERS[:2]]),
    "upper-layers": (plain.CONFIG, [*LAYERS[2:], "model.norm.weight", "lm_head.weight"]),
    "only-the-embedding": (plain.CONFIG, [*LAYERS, "model.norm.weight", "lm_head.weight"]),
    "only-the-head": (plain.CONFIG, ["model.embed_tokens.weight", *LAYERS]),
    "mlp": (TIED, ["*.mlp.*"]),
    "attention": (plain.CONFIG, ["*.self_attn.*", "*norm*"]),
    "qwen3-moe": (plain.QWEN3_MOE, ["*.experts.*", "*.q_norm.weight", "model.layers.1.*"]),
    "gpt-oss": (plain.GPT_OSS, ["*.sinks", "*_proj_bias", "*.router.*", "*.o_proj.bias", "*.gate_up_proj"]),
    "gpt-oss-products": (plain.GPT_OSS, ["*.down_proj", "*_proj.weight", "model.norm.weight"]),
}


def matched(names, patterns):
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}


@pytest.mark.sample(6, gate=12)
@pytest.mark.parametrize(("cfg", "patterns"), CASES.values(), ids=CASES)
@BOTH
def test_equals_the_plain_loop_that_leaves_them_out(asynchronous, cfg, patterns):
    steps, rate = 4, 5e-3
    batches = plain.make_batches(steps)
    store = runs.make_store(cfg, torch.float64, asynchronous=asynchronous, frozen=patterns)
    expected = runs.checkpoint_tensors(store)
    before = {name: tensor.clone() for name, tensor in expected.items()}
    frozen = matched(expected, patterns)
    options = {"weight_decay": 0.1, "max_grad_norm": 0.1}
    losses, norms = plain.train(
        expected, cfg, batches, [rate] * steps, delayed=asynchronous, betas=runs.BETAS, frozen=frozen, **options
    )
    assert max(norms) > 0.1, "clipping must take part"
    got_losses, got_norms, got, _ = runs.run(
        cfg, batches, f"{PLAN} | N=2 M=4 MR=4", rate=rate, asynchronous=asynchronous, store=store, **options
    )
    assert got_losses == pytest.approx(losses, abs=1e-10)
    assert got_norms == pytest.approx(norms, rel=1e-9)
    for name, tensor in expected.items():
        assert (got[name] - tensor).abs().max() < 1e-10, name
        if name in frozen:
            assert torch.equal(got[name], before[name]), f"{name} is frozen"
        else:
            assert (got[name] - before[name]).abs().max() > rate / 2, f"{name} must have moved"


MIXED = ["model.layers.1.*", "model.layers.2.mlp.*", "*.q_proj.weight", "*.k_proj.weight", "*.v_proj.weight"]
BOTTOM = ["model.embed_tokens.weight", *LAYERS[:2], "*.mlp.*"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("patterns", [MIXED, BOTTOM], ids=["mixed", "bottom"])
@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_on_any_number_of_workers_and_any_plan(asynchronous, dtype, patterns):
    batches = plain.make_batches(3)
    others = [f"{PLAN} | N={n} M=4 MR=4" for n in (1, 3)]
    others += [f"{plan} | N=2 M=4 MR=4" for plan in ("F0-2 FB3-4 B2-2 B1-1 B0-0", "FB0-4")]
    results = [
        runs.run(TIED, batches, plan, asynchronous=asynchronous, dtype=dtype, frozen=patterns, max_grad_norm=0.1)
        for plan in others
    ]
    same_as_first(results)


@UPDATES
def test_rounds_keep_their_sums_of_what_is_trained(asynchronous):
    batches = plain.make_batches(4, micro_batches=6)
    options = {"asynchronous": asynchronous, "frozen": BOTTOM}
    same_as_first(
        [runs.run(TIED, batches, f"{PLAN} | N={n} M=6 MR=2", dtype=torch.bfloat16, **options) for n in (1, 2, 3)]
    )
    one, two = (
        runs.run(TIED, batches, f"{PLAN} | N=2 M=6 MR={size}", dtype=torch.float64, **options) for size in (6, 2)
    )
    assert one[0] == pytest.approx(two[0], abs=1e-12)
    assert all((one[2][name] - two[2][name]).abs().max() < 1e-12 for name in one[2])


@pytest.mark.parametrize(
    "patterns",
    [
        pytest.param(MIXED, id="mixed"),
        grid(BOTTOM, id="bottom"),
        grid(CASES["only-the-head"][1], id="head"),
    ],
)
@UPDATES
def test_delays_anywhere_change_nothing(asynchronous, patterns):
    """Devices that wait for no version of their parameters may be far ahead of the optimizer."""
    batches = plain.make_batches(5)
    plan = f"{PLAN} | N=3 M=4 MR=4"
    results = [runs.run(plain.CONFIG, batches, plan, asynchronous=asynchronous, frozen=patterns)]
    for slow in ("optimizer", "rows", "B0-1", "download", "upload"):

        def probe(where, slow=slow):
            if slow in where:
                time.sleep(0.003)

        results.append(runs.run(plain.CONFIG, batches, plan, asynchronous=asynchronous, frozen=patterns, probe=probe))
    same_as_first(results)


def same_as_first(results):
    losses, norms, weights, _ = results[0]
    for got_losses, got_norms, got, _ in results[1:]:
        assert (got_losses, got_norms) == (losses, norms)
        assert all(torch.equal(got[name], weights[name]) for name in weights)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_skipped_step_leaves_all_as_it_was(asynchronous, monkeypatch):
    batches = plain.make_batches(3)
    go = partial(runs.run, TIED, plan=f"{PLAN} | N=2 M=4 MR=4", asynchronous=asynchronous, frozen=MIXED)
    expected = go(batches[:2])[2]
    true_squares, calls = CpuAdam.squares, []
    trained = sum(unit.trainable for unit in freeze(build(TIED), MIXED).units)

    def squares(self, grad):
        calls.append(None)
        return torch.tensor([math.inf]) if len(calls) > 2 * trained else true_squares(self, grad)

    monkeypatch.setattr(CpuAdam, "squares", squares)
    _, norms, got, _ = go(batches)
    assert [math.isinf(norm) for norm in norms] == [False, False, True]
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_only_what_is_trained_leaves_the_devices_and_is_updated():
    updated = set()

    def probe(where):
        if where.startswith("optimizer"):
            updated.add(where.removeprefix("optimizer update of "))

    meter, steps = Meter(), 3
    with runs.make_store(plain.CONFIG, torch.bfloat16, asynchronous=True, frozen=MIXED) as store:
        runs.train(store, plain.make_batches(steps), f"{PLAN} | N=2 M=4 MR=4", meter=meter, probe=probe)
        units = store.spec.units
    downloaded = sum(reading.subject for reading in meter.readings if reading.kind == "download")
    # in bfloat16, once a step, the first of which is not read; the embedding's come by boundary 0
    trained = sum(unit.numel for unit in units if unit.trainable and unit.name != "embed")
    assert downloaded == 2 * (steps - 1) * trained
    assert updated == {label(unit.name) for unit in units if unit.trainable}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_frozen_parameter_takes_its_own_bytes_and_no_more(asynchronous):
    """By hand, of units that fill whole pages: bfloat16, 2 bytes frozen; trained 14 in sync, 16 in async."""
    cfg = plain.config(hidden_size=64, intermediate_size=64, head_dim=16, num_hidden_layers=2, vocab_size=64)
    layer = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 64 + 2 * 64  # q and o, k and v, the MLP, norms
    table = 64 * 64
    norms, others = 2 * 64, layer - 2 * 64
    page = 4096

    def pages(elements, *sizes):
        return sum(-(-elements * size // page) * page for size in sizes)

    trained = (2, 2, 2, 4, 4, *([2] if asynchronous else []))
    options = {"generations": 1 + asynchronous, "moments": "fp32"}
    spec = freeze(build(cfg), ["*_proj.weight", "lm_head.weight"])
    expected = 2 * pages(others, 2) + 2 * pages(norms, *trained) + pages(table, 2)
    expected += pages(table, *trained) + pages(128, *trained)  # the embedding; the last norm, 64 and padding
    assert sum(ModelStore.sizes(spec, layout_of(torch.bfloat16, **options)).values()) == expected
    with ModelStore(spec, layout_of(torch.bfloat16, **options)) as store:
        for state in store.units:
            kept = [*state.params, *state.grads, *state.moments.values()]
            kept += [] if state.remainder is None else [state.remainder]
            each = sum(trained) if state.unit.trainable else 2
            assert sum(tensor.nbytes for tensor in kept) == each * state.unit.numel, state.unit.name


def test_frozen_units_are_locked_too(monkeypatch):
    """Those of their buffers that there are: a range of no bytes cannot be."""
    runtime = Runtime()
    monkeypatch.setattr(arena, "_cudart", lambda: runtime)
    with runs.make_store(plain.CONFIG, torch.bfloat16, asynchronous=True, frozen=MIXED, lock=True) as store:
        assert not store.locking.missing
        assert runtime.registered.keys() >= {flat.data_ptr() for state in store.units for flat in state.params}
        assert min(runtime.registered.values()) > 0
    assert not runtime.registered


def test_times_of_a_frozen_layer_are_its_own():
    """Layers are alike where the same of them is trained."""
    spec = freeze(build(plain.CONFIG), ["model.layers.1.*", "model.layers.2.mlp.*"])
    alike = [likeness(spec, layer) for layer in spec.layers]
    assert alike[0] == alike[3]
    assert len(set(alike)) == 3
