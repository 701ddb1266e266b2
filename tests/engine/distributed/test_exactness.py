"""Several processes give the bits of one, for equal replicas. Here they are threads with connections of their own."""

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed

from rptrain.engine.distributed import exchange
from rptrain.engine.distributed.launch import Launch
from rptrain.engine.distributed.peers import Peers
from rptrain.engine.distributed.shared import Shared
from rptrain.engine.memory.moments import CHUNK
from rptrain.engine.optim.loss_scale import LossScale
from rptrain.models.transforms.lora import LoRA
from rptrain.schedule.plan import Plan
from tests import run_tools as tools
from tests.cases import BOTH, UPDATES

from .. import plain, runs
from ..test_replicas import DROPOUT
from ..test_short_steps import short

VOCAB = 1031  # with SIZES, several chunks of each matrix, and of the embedding
SIZES = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "vocab_size": VOCAB}
PLAN = Plan.parse("F0-0 F1-1 FB2-2 B1-1 B0-0 | N=1 M=12 MR=1 R=6")
BF16 = {"dtype": torch.bfloat16}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # changes of the config; of the store
    "tied": ({}, {}),
    "untied": ({"tie_word_embeddings": False, "pad_token_id": 3}, {}),
    "bf16": ({}, BF16),
    "qwen3-moe": (plain.QWEN3_MOE | {"moe_intermediate_size": 160}, BF16),
    "gpt-oss-aux": (plain.GPT_OSS | {"router_aux_loss_coef": 0.7}, {}),
    "lora": ({}, BF16 | {"lora": DROPOUT}),
    "embedding-saved": ({}, {"lora": LoRA(r=3, modules_to_save=("embed_tokens",))}),
    "frozen": ({}, {"frozen": ["model.layers.0.*", "model.embed_tokens.weight"]}),
    "nf4": ({}, BF16 | {"lora": DROPOUT, "base": "nf4"}),
    "fp8": ({}, BF16 | {"fp8": True}),
    "int8-moments": ({}, BF16 | {"moments": "int8"}),
}


@pytest.fixture(autouse=True)
def small_messages(monkeypatch):
    """Several for each part of a unit, and more than are received at a time."""
    monkeypatch.setattr(exchange, "PIECE", CHUNK // 4)


def together(world, call):
    """call(peers) in a thread for each of so many processes; their results."""
    dist: Any = torch.distributed
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    results, errors = {}, []

    def one(rank):
        try:
            with Peers(Launch(rank, world, rank, world, "127.0.0.1", store.port)) as peers:
                results[rank] = call(peers)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(tools.PATIENCE)
    assert not errors, errors
    return [results[rank] for rank in range(world)]


def several(world, cfg, kind, train, *, asynchronous, devices=1, reduce_dtype="float32", **options):
    """What `train` returns in each of so many processes with a part of PLAN."""

    def call(peers):
        shared = Shared.open(peers, PLAN.replicas, reduce_dtype)
        groups = len(shared.share.groups)
        own = Plan(PLAN.stages, min(devices, groups), PLAN.turns * groups, 1, groups)
        sizes = {"wide_grad": True, "replicas": groups, "share": shared.share, "asynchronous": asynchronous}
        with runs.make_store(cfg, **{"dtype": torch.float32, **sizes, **kind}) as store:
            return train(store, own, asynchronous=asynchronous, shared=shared, **options)

    return together(world, call)


def alone(cfg, kind, train, *, asynchronous, **options):
    sizes = {"wide_grad": True, "replicas": PLAN.replicas, "asynchronous": asynchronous}
    with runs.make_store(cfg, **{"dtype": torch.float32, **sizes, **kind}) as store:
        return train(store, PLAN, asynchronous=asynchronous, **options)


@pytest.mark.long
@pytest.mark.sample(11)
@pytest.mark.parametrize("world", [2, 3, 4])
@BOTH
@pytest.mark.parametrize("kind", KINDS)
def test_same_bits(kind, asynchronous, world):
    """With 4 processes, two have one group each and two have two groups, on two devices.

    In the last step but one, some groups have no micro-batches, and with 3 processes one process has none.
    """
    changes, of_store = KINDS[kind]
    cfg = plain.config(tie_word_embeddings=True) | changes | SIZES
    batches = plain.make_batches(3, micro_batches=12, vocab=VOCAB)
    batches[1] = short(batches[1], 4)
    options = {"asynchronous": asynchronous, "max_grad_norm": 1.0, "weight_decay": 0.1}

    def train(store, plan, **options):
        return runs.train(store, batches, plan, **options)

    losses, norms, weights, _ = alone(cfg, of_store, train, **options)
    assert max(norms) > 1.0, "clipping must take part"
    for found in several(world, cfg, of_store, train, devices=2, **options):
        assert found[:2] == (losses, norms)
        assert all(torch.equal(found[2][name], weights[name]) for name in weights)


@pytest.mark.long
@UPDATES
def test_skipped_steps_and_loss_scale(asynchronous):
    cfg, batches = plain.config(tie_word_embeddings=True) | SIZES, plain.make_batches(5, micro_batches=12, vocab=VOCAB)
    options = {"asynchronous": asynchronous, "rate": 1e-2, "loss_scale": LossScale.start(2.0**17, 1)}

    def train(store, plan, **options):
        return runs.train(store, batches, plan, **options)

    losses, norms, weights, _ = alone(cfg, {"dtype": torch.float16}, train, **options)
    assert len({norm < float("inf") for norm in norms}) == 2, norms
    for found in several(2, cfg, {"dtype": torch.float16}, train, **options):
        assert repr(found[:2]) == repr((losses, norms))  # the norm of a skipped step may be NaN
        assert all(torch.equal(found[2][name], weights[name]) for name in weights)


@UPDATES
def test_an_engine_that_is_closed_completes_its_steps(asynchronous):
    """Also those whose weights were not exchanged yet."""
    cfg, batches = plain.config() | SIZES, plain.make_batches(3, micro_batches=12, vocab=VOCAB)

    def train(store, plan, **options):
        with runs.engine_of(store, plan, tokens=batches[0].sequences * batches[0].length, **options) as engine:
            for batch in batches:
                engine.forward_backward(batch)
                engine.step(1e-3)
        return runs.checkpoint_tensors(store)

    expected = alone(cfg, {}, train, asynchronous=asynchronous)
    for found in several(2, cfg, {}, train, asynchronous=asynchronous):
        assert all(torch.equal(found[name], weights) for name, weights in expected.items())


def test_the_progress_of_a_process_without_micro_batches():
    """Of 3 processes, in a step with 2 micro-batches."""
    batch = short(plain.make_batches(1, micro_batches=12)[0], 2)

    def train(store, plan, **options):
        with runs.engine_of(store, plan, tokens=batch.sequences * batch.length, watched=True, **options) as engine:
            engine.forward_backward(batch)
            engine.step(1e-3)
            engine.synchronize()
            return engine.progress(0)

    found = several(3, plain.config(num_hidden_layers=2), {}, train, asynchronous=False)
    assert [(progress.micro_batches, progress.done, progress.computed) for progress in found] == [
        *((2, 2, 1.0), (0, 0, 1.0), (0, 0, 1.0))
    ]


def test_evaluations_snapshots_and_sums_of_each_part():
    """A process has optimizer state of its own part only; the parts are all."""
    cfg, (batch, other) = plain.config() | SIZES, plain.make_batches(2, micro_batches=12, vocab=VOCAB)

    def train(store, plan, **options):
        with runs.engine_of(store, plan, tokens=batch.sequences * batch.length, **options) as engine:
            before = engine.evaluate(other)
            loss = engine.forward_backward(batch)
            engine.step(1e-3)
            with engine.snapshot():
                moments = {i: state.moments["exp_avg"].clone() for i, state in enumerate(store.units)}
            return (before, loss.result(), engine.evaluate(other)), moments

    expected, whole = alone(cfg, {}, train, asynchronous=True)
    found = several(3, cfg, {}, train, asynchronous=True)
    assert all(values == expected for values, _ in found)
    for unit, moments in whole.items():
        parts = [part[unit] for _, part in found]
        turned = parts[-unit % 3 :] + parts[: -unit % 3]  # the first part of unit 1 is that of the last process
        assert torch.equal(torch.cat(turned), moments)
        assert len(moments) < 4 * CHUNK or all(0 < len(part) < len(moments) for part in parts)
