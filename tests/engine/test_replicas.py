"""Groups that compute rounds side by side: the bits follow from their number, not from the devices that they have."""

import random
import threading
import time
from collections import defaultdict
from dataclasses import replace
from itertools import cycle

import pytest
import torch

from rptrain.engine.errors import EngineError
from rptrain.engine.optim.adam import CpuAdam
from rptrain.engine.optim.loss_scale import LossScale
from rptrain.models.transforms.lora import LoRA
from rptrain.schedule.plan import Plan
from tests.cases import BOTH, UPDATES, grid

from . import plain, runs
from .test_frozen import same_as_first
from .test_lora import EXPERTS
from .test_replan import same, tensors, trained

PLANS = ["F0-0 F1-1 FB2-2 B1-1 B0-0", "F0-0 FB1-2 B0-0", "FB0-2"]
SMALL = {"num_hidden_layers": 2}
UNTIED, TIED = (plain.config(tie_word_embeddings=tied, **SMALL) for tied in (False, True))
QWEN3_MOE, GPT_OSS = plain.QWEN3_MOE | SMALL, plain.GPT_OSS | SMALL
DROPOUT = LoRA(r=3, lora_dropout=0.1)
FLOAT16 = {"dtype": torch.float16, "loss_scale": LossScale.start(2.0**18, 1)}
KINDS = {
    "qwen3-moe": (QWEN3_MOE, {}),
    "gpt-oss-aux": (GPT_OSS | {"router_aux_loss_coef": 0.7}, {}),
    "lora": (UNTIED, {"lora": DROPOUT}),
    "embedding-saved": (UNTIED, {"lora": LoRA(r=3, modules_to_save=("embed_tokens", "lm_head"))}),
    "tied-embedding-saved": (TIED, {"lora": LoRA(r=3, modules_to_save=("embed_tokens",))}),
    "frozen": (TIED, {"frozen": ["model.layers.0.*", "model.embed_tokens.weight"]}),
    "nf4": (UNTIED, {"lora": DROPOUT, "base": "nf4"}),
    "mxfp4-experts": (GPT_OSS, {"lora": LoRA(r=3, target_parameters=EXPERTS), "base": "mxfp4"}),
    "fp8": (UNTIED, {"fp8": True}),
    "fp8-base": (UNTIED, {"lora": DROPOUT, "base": "fp8", "fp8": True}),
    "float16": (TIED, FLOAT16),
    "float16-untied": (UNTIED, FLOAT16),
}


SIZES = [
    # replicas, micro-batches, round size, workers: fewer than groups, also where they do not divide them; as many; more
    (2, 8, 2, (1, 2, 4)),
    (3, 6, 1, (2, 3, 6)),
    (4, 4, 1, (1, 3, 8)),
    (2, 12, 6, (1, 2, 4, 6, 8)),
    (2, 12, 3, (1, 2, 4, 6)),
    (3, 12, 2, (1, 2, 3, 6)),
    (4, 12, 3, (1, 2, 3, 4, 8)),
    (6, 12, 1, (1, 2, 3, 4, 5, 6)),
]


@pytest.mark.sample(4, gate=8)
@pytest.mark.parametrize(("replicas", "micro_batches", "round_size", "workers"), SIZES)
@pytest.mark.parametrize("cfg", [UNTIED, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # sums of rows in bfloat16 are often exact
@BOTH
def test_same_bits_on_any_number_of_workers_and_any_plan(
    asynchronous, dtype, cfg, replicas, micro_batches, round_size, workers
):
    batches = plain.make_batches(3, micro_batches=micro_batches)
    options = {"asynchronous": asynchronous, "dtype": dtype, "max_grad_norm": 1.0}
    sizes = f"M={micro_batches} MR={round_size} R={replicas}"
    plans = [f"{stages} | N={n} {sizes}" for n, stages in zip(workers, cycle(PLANS), strict=False)]
    results = [runs.run(cfg, batches, plan, **options) for plan in plans]
    same_as_first(results)
    assert max(results[0][1]) > 1.0, "clipping must take part"


@pytest.mark.sample(6, gate=12)
@BOTH
@pytest.mark.parametrize(("cfg", "kind"), KINDS.values(), ids=KINDS)
def test_same_bits_with_every_kind_of_model(asynchronous, cfg, kind):
    batches = plain.make_batches(4 if "loss_scale" in kind else 2, micro_batches=4)
    options = {"asynchronous": asynchronous, "dtype": torch.bfloat16, "rate": 1e-2} | kind
    plans = (f"{PLANS[0]} | N=1 M=4 MR=1 R=2", f"{PLANS[1]} | N=4 M=4 MR=1 R=2")
    one, other = (runs.run(cfg, batches, plan, **options) for plan in plans)
    assert repr(one[:2]) == repr(other[:2])  # the norm of a skipped step may be NaN
    assert all(torch.equal(other[2][name], one[2][name]) for name in one[2])
    assert "loss_scale" not in kind or len({norm < float("inf") for norm in one[1]}) == 2


@pytest.mark.parametrize(
    ("asynchronous", "cfg", "plan"),
    [
        pytest.param(True, TIED, "N=4 M=4 MR=1 R=2", id="tied-4-on-2"),
        pytest.param(False, UNTIED, "N=2 M=6 MR=2 R=3", id="untied-2-on-3"),
        grid(True, UNTIED, "N=2 M=6 MR=3 R=2", id="untied-2-on-2"),
        grid(False, TIED, "N=1 M=4 MR=1 R=2", id="tied-1-on-2"),
        grid(True, TIED, "N=3 M=6 MR=1 R=3", id="tied-3-on-3"),
        grid(True, UNTIED, "N=6 M=6 MR=2 R=3", id="untied-6-on-3"),
    ],
)
def test_equals_the_plain_loop(asynchronous, cfg, plan):
    rates, options = [5e-3] * 3, {"weight_decay": 0.1, "max_grad_norm": 1.0}
    plan = Plan.parse(f"{PLANS[0]} | {plan}")
    batches = plain.make_batches(len(rates), micro_batches=plan.micro_batches)
    kind = {"asynchronous": asynchronous, "wide_grad": True, "replicas": plan.replicas}
    with runs.make_store(cfg, torch.float64, **kind) as store:
        expected = runs.checkpoint_tensors(store)
        losses, norms = plain.train(expected, cfg, batches, rates, delayed=asynchronous, betas=runs.BETAS, **options)
        assert max(norms) > 1.0, "clipping must take part"
        got = runs.run(cfg, batches, plan, rate=rates[0], asynchronous=asynchronous, store=store, **options)
    assert got[0] == pytest.approx(losses, abs=1e-10)
    assert got[1] == pytest.approx(norms, rel=1e-9)
    assert all((got[2][name] - tensor).abs().max() < 1e-10 for name, tensor in expected.items())


def gradients(monkeypatch, batch, plan):
    """One step: by unit, the partial gradient of each group as it arrived, and their sum."""
    found, add = {}, CpuAdam.squares
    plan = Plan.parse(plan)
    kind = {"wide_grad": plan.rounds > 1, "replicas": plan.replicas}
    with runs.make_store(TIED, torch.float32, asynchronous=False, **kind) as store:
        units = {state.grads[0].data_ptr(): index for index, state in enumerate(store.units)}

        def noted(adam, grad, *others):
            parts = [each.clone() for each in (grad, *others)]
            squares = add(adam, grad, *others)
            found.setdefault(units[grad.data_ptr()], (parts, grad.clone()))  # the head's, before rows are added
            return squares

        with monkeypatch.context() as patch:
            patch.setattr(CpuAdam, "squares", noted)
            runs.run(TIED, [batch], plan, asynchronous=False, store=store)
    return found


def part_of(batch, micro_batches):
    """Some micro-batches of a batch. The loss is divided by the same number of tokens."""
    chosen = {name: getattr(batch, name)[micro_batches] for name in ("input_ids", "positions", "labels")}
    return replace(batch, **chosen, documents=tuple(batch.documents[m] for m in micro_batches))


TREES = {
    2: lambda g: g[0] + g[1],
    3: lambda g: (g[0] + g[1]) + g[2],
    4: lambda g: (g[0] + g[1]) + (g[2] + g[3]),
    6: lambda g: ((g[0] + g[1]) + (g[2] + g[3])) + (g[4] + g[5]),
}


@pytest.mark.parametrize("replicas", [2, 3, 4, 6])
def test_groups_have_the_gradients_of_their_rounds_and_these_are_added_as_a_tree(replicas, monkeypatch):
    """Each group computes two rounds. Its gradient equals that of a run with only their micro-batches, in one round."""
    (batch,) = plain.make_batches(1, micro_batches=2 * replicas)
    workers = {2: 2, 3: 2, 4: 4, 6: 3}[replicas]
    found = gradients(monkeypatch, batch, f"{PLANS[0]} | N={workers} M={2 * replicas} MR=1 R={replicas}")
    assert len(found) == 4
    for parts, total in found.values():
        assert len(parts) == replicas and torch.equal(total, TREES[replicas](parts))
    assert replicas < 4 or any(not torch.equal(total, sum(parts)) for parts, total in found.values())
    for group in {0, replicas - 1}:
        own = part_of(batch, [group, group + replicas])
        alone = gradients(monkeypatch, own, f"{PLANS[2]} | N=1 M=2 MR=2")
        del alone[0]  # has the rows of the embedding
        assert all(torch.equal(found[unit][0][group], total) for unit, (_, total) in alone.items())


@pytest.mark.sample(2)
@pytest.mark.parametrize("workers", [1, 2, 4])
@UPDATES
def test_delays_anywhere_change_nothing(asynchronous, workers):
    batches = plain.make_batches(3)
    options = {"asynchronous": asynchronous, "dtype": torch.bfloat16}
    usual = runs.run(TIED, batches, f"{PLANS[2]} | N=2 M=4 MR=1 R=2", **options)
    rng, lock, places = random.Random(workers), threading.Lock(), set()

    def probe(where):
        with lock:
            places.add(where.split()[0] if "optimizer" in where else where.split()[-1])
            pause = rng.random() < 0.1 and rng.random() * 0.01
        if pause:
            time.sleep(pause)

    delayed = runs.run(TIED, batches, f"{PLANS[0]} | N={workers} M=4 MR=1 R=2", probe=probe, **options)
    assert {"optimizer", "upload", "download", "input", "output", "sums", "m3"} <= places
    same_as_first([usual, delayed])


@pytest.mark.parametrize("slow", [grid(0), 1])
def test_a_group_may_be_later_than_the_other(slow):
    """The faster one is an iteration ahead at most, and the order of gradients stays."""
    batches, plan = plain.make_batches(4), f"{PLANS[0]} | N=2 M=4 MR=1 R=2"

    def probe(where):
        if f"@{slow}" in where and "micro-batch" in where:
            time.sleep(0.002)

    same_as_first([runs.run(TIED, batches, plan, asynchronous=True, probe=each) for each in (None, probe)])


@pytest.mark.parametrize("cfg", [grid(UNTIED, id="untied"), pytest.param(TIED, id="tied")])
@UPDATES
def test_other_plans_and_workers_between_steps_continue_to_the_bit(asynchronous, cfg):
    ends = "M=4 MR=2 R=2"
    options = {"asynchronous": asynchronous, "dtype": torch.float32}
    parts = [(f"{PLANS[0]} | N=2 {ends}", 2), (f"{PLANS[1]} | N=4 {ends}", 2), (f"{PLANS[2]} | N=1 {ends}", 2)]
    assert same(trained(cfg, parts, **options), trained(cfg, [(parts[0][0], 6)], **options))


def test_an_evaluation_has_the_same_bits_with_and_without_replicas():
    batch, other = plain.make_batches(2)
    found = set()
    for ends in ("N=1 M=4 MR=4", "N=2 M=4 MR=1", "N=2 M=4 MR=2 R=2", "N=1 M=4 MR=1 R=2", "N=4 M=4 MR=1 R=2"):
        plan = Plan.parse(f"{PLANS[0]} | {ends}")
        kind = {"wide_grad": plan.rounds > 1, "replicas": plan.replicas}
        with (
            runs.make_store(TIED, torch.bfloat16, asynchronous=True, **kind) as store,
            runs.engine_of(store, plan, tokens=batch.sequences * batch.length) as engine,
        ):
            losses = engine.evaluate(other), engine.evaluate(batch)
            engine.forward_backward(batch)
            engine.step(1e-3)
            found.add((*losses, engine.evaluate(other) != losses[0]))
    assert len(found) == 1 and found.pop()[2]


def test_each_device_evaluates_micro_batches():
    """One of each round of a single micro-batch, in two turns."""
    (batch,), found, lock = plain.make_batches(1, micro_batches=8), defaultdict(set), threading.Lock()

    def probe(where):
        if where.startswith("evaluation, layer") and not where.endswith(("input", "output")):
            with lock:
                found[threading.current_thread().name.split()[0]].add(where.split()[-1])

    plan = f"{PLANS[0]} | N=4 M=8 MR=1 R=4"
    with (
        runs.make_store(TIED, torch.bfloat16, asynchronous=True, wide_grad=True, replicas=4) as store,
        runs.engine_of(store, plan, tokens=batch.sequences * batch.length, probe=probe) as engine,
    ):
        engine.evaluate(batch)
    assert found == {f"cpu:{device}": {str(device), str(device + 4)} for device in range(4)}


@UPDATES
def test_snapshots_and_evaluations_between_steps_change_nothing(asynchronous):
    *batches, other = plain.make_batches(4)
    plan, options = f"{PLANS[0]} | N=4 M=4 MR=1 R=2", {"asynchronous": asynchronous}
    expected = runs.run(TIED, batches, plan, dtype=torch.bfloat16, **options)
    kind = {"wide_grad": True, "replicas": 2}
    with runs.make_store(TIED, torch.bfloat16, **options, **kind) as store:
        tokens, losses, steps = other.sequences * other.length, [], []
        with runs.engine_of(store, plan, tokens=tokens, **options) as engine:
            for batch in batches:
                losses.append(engine.forward_backward(batch))
                steps.append(engine.step(1e-3))
                engine.evaluate(other)
                with engine.snapshot():
                    state = tensors(store)
            engine.synchronize()
            found = [loss.result() for loss in losses], [step.result().grad_norm for step in steps]
        assert all(torch.equal(a, b) for a, b in zip(tensors(store), state, strict=True))
        same_as_first([expected, (*found, runs.checkpoint_tensors(store), None)])


@pytest.mark.sample(4)
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("place", ["micro-batch 3", "download", "partial sums", grid("gradient rows m2")])
def test_a_failure_in_one_group_ends_every_thread(place, workers):
    before, seen = {*threading.enumerate()}, []

    def fail(where):
        if place in where:
            seen.append(where)
            if len(seen) == 3:
                raise OSError("planted")

    plan = f"{PLANS[0]} | N={workers} M=4 MR=1 R=2"
    with pytest.raises(EngineError, match="planted") as caught:
        runs.run(TIED, plain.make_batches(4), plan, asynchronous=True, probe=fail)
    assert place.split()[0] in str(caught.value)
    assert {*threading.enumerate()} <= before
