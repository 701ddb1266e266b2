"""Units in a type of their own: held, moved and updated in it, as in plain loops, and to the same bits in any plan."""

import pytest
import torch

from rptrain.engine.distributed.traffic import Traffic
from rptrain.engine.footprint import rounded_bytes
from rptrain.engine.memory.share import Share
from rptrain.engine.optim.loss_scale import LossScale
from rptrain.engine.optim.traffic import update_bytes_of
from rptrain.models.params import Unit
from rptrain.models.transforms.freeze import freeze
from rptrain.models.transforms.lora import LoRA
from tests import own_types
from tests.cases import BOTH, UPDATES, grid

from ..layouts import layout_of
from . import half, plain, runs
from .distributed import test_checkpoints as saved
from .distributed import test_exactness as processes
from .distributed.test_exactness import small_messages  # noqa: F401 - a fixture

CFG = plain.GPT_OSS | {"num_hidden_layers": 2}
STAGES = ("F0-0 F1-1 FB2-2 B1-1 B0-0", "FB0-2")
OPTIONS = {"weight_decay": 0.1, "max_grad_norm": 1.0}
RATE = 2e-3


@pytest.fixture(autouse=True)
def own_sinks(monkeypatch):
    own_types.use_own_sinks(monkeypatch)


def assert_same(one, other):
    assert repr(one[:2]) == repr(other[:2])  # the norm of a skipped step may be NaN
    assert all(torch.equal(tensor, other[2][name]) for name, tensor in one[2].items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_each_unit_has_the_buffers_of_its_type(dtype):
    """Those of a float64 model are in float64."""
    with runs.make_store(CFG, dtype, asynchronous=True) as store:
        own, rest = own_types.sinks(store.units), store.units[1]
        kind = torch.float64 if dtype == torch.float64 else torch.float32
        assert len(own) == 2
        for state in own:
            buffers = [*state.params, *state.grads, *state.moments.values()]
            assert {each.dtype for each in buffers} == {kind}
            assert state.remainder is state.masters is None
        assert {each.dtype for each in [*rest.params, *rest.grads]} == {dtype}
        sizes = store.sizes(store.spec, store.layout)
        assert sizes["params"] == sum(-(-flat.nbytes // 4096) * 4096 for u in store.units for flat in u.params)
        assert sizes["grad"] == sum(-(-flat.nbytes // 4096) * 4096 for u in store.units for flat in u.grads)


def test_parameters_that_are_trained_have_one_type():
    param, own = (runs.build(plain.CONFIG).units[1].params[0], runs.build(CFG).units[-1].params[0])
    with pytest.raises(AssertionError, match="one type"):
        Unit("both", (param, own))
    assert Unit("both", (param, own), trainable=False).mixed


def test_plans_count_their_bytes():
    spec, layout = runs.build(CFG), layout_of(torch.bfloat16)
    own, others = spec.units[-1], spec.units[1]
    assert update_bytes_of(layout, [own]) == 4 + 2 * (4 + 8)
    moved = 26 * others.numel + 28 * own.numel
    assert update_bytes_of(layout, [others, own]) == moved / (others.numel + own.numel)
    traffic = Traffic(Share(0, 2, 2), torch.bfloat16, "float32")
    assert (traffic.weights(own), traffic.weights(others)) == (2 * own.numel, others.numel)
    assert rounded_bytes(spec, layout) == 2 * max(unit.numel for unit in spec.units[1:])
    assert rounded_bytes(freeze(spec, KINDS["only"]["frozen"]), layout) == 0


@pytest.mark.long
@BOTH
def test_equals_the_plain_loop(asynchronous):
    batches = plain.make_batches(3)
    with runs.make_store(CFG, torch.float64, asynchronous=asynchronous) as store:
        expected = runs.checkpoint_tensors(store)
        losses, norms = plain.train(
            expected, CFG, batches, [RATE] * 3, delayed=asynchronous, betas=runs.BETAS, **OPTIONS
        )
        got = runs.run(
            CFG, batches, f"{STAGES[0]} | N=2 M=4 MR=4", rate=RATE, asynchronous=asynchronous, store=store, **OPTIONS
        )
    assert got[0] == pytest.approx(losses, abs=1e-10)
    assert got[1] == pytest.approx(norms, rel=1e-9)
    assert all((got[2][name] - tensor).abs().max() < 1e-10 for name, tensor in expected.items())


@UPDATES
def test_equals_the_float16_loop_to_the_bit(asynchronous):
    """The loop holds sinks in float32, and rounds neither them nor their gradients."""
    batches, scale = plain.make_batches(4), LossScale.start(2.0**10, 10)
    with runs.make_store(CFG, torch.float16, asynchronous=asynchronous) as store:
        spec = store.spec
        weights = [{name: w.clone() for name, w in store.weights(i).items()} for i in range(len(spec.units))]
        losses, norms, skipped, _, masters = half.train(
            spec, weights, batches, rate=RATE, betas=runs.BETAS, delayed=asynchronous, scale=scale.scale,
            growth_steps=10, **OPTIONS,
        )  # fmt: skip
        assert not any(skipped)
        got_losses, got_norms, *_ = runs.run(
            CFG, batches, f"{STAGES[0]} | N=2 M=4 MR=4", rate=RATE, asynchronous=asynchronous, store=store,
            loss_scale=scale, **OPTIONS,
        )  # fmt: skip
        assert (got_losses, got_norms) == (losses, pytest.approx(norms, rel=1e-12))
        expected = half.rounded(spec, masters)
        for state, tensors in zip(store.units, expected, strict=True):
            ours = state.views[state.newest]
            assert all(torch.equal(ours[name], tensor) for name, tensor in tensors.items())
        for state in own_types.sinks(store.units):
            (values,) = state.views[state.newest].values()
            assert not torch.equal(values, values.half().float())


KINDS = {
    "bf16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16, "loss_scale": LossScale.start(2.0**18, 1)},
    "lora": {"dtype": torch.bfloat16, "lora": LoRA(r=3)},
    "fp8": {"dtype": torch.bfloat16, "fp8": True},
    "frozen": {"dtype": torch.bfloat16, "frozen": ["model.layers.0.*"]},
    "only": {"dtype": torch.bfloat16, "frozen": ["*_proj*", "*norm*", "*router*", "*embed*", "lm_head*"]},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("sizes", ["M=4 MR=4", "M=4 MR=1 R=2"], ids=["one-round", "replicas"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@BOTH
def test_same_bits_on_any_number_of_workers_and_any_plan(asynchronous, kind, sizes):
    batches = plain.make_batches(3)
    options = {"asynchronous": asynchronous, "rate": 1e-2, **OPTIONS, **kind}
    plans = (f"{STAGES[0]} | N=1 {sizes}", f"{STAGES[0]} | N=4 {sizes}", f"{STAGES[1]} | N=2 {sizes}")
    one, *others = (runs.run(CFG, batches, plan, **options) for plan in plans)
    for other in others:
        assert_same(one, other)


@pytest.mark.parametrize("moments", [grid("bf16"), "int8"])
def test_small_moments(moments):
    batches = plain.make_batches(3)

    def go(plan):
        with runs.make_store(CFG, torch.bfloat16, asynchronous=True, moments=moments) as store:
            return runs.run(CFG, batches, plan, asynchronous=True, store=store, **OPTIONS)

    one, other = (go(f"{stages} | N=2 M=4 MR=4") for stages in STAGES)
    assert_same(one, other)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@BOTH
def test_same_bits_in_several_processes(asynchronous, dtype):
    cfg = CFG | {"vocab_size": processes.VOCAB}
    batches = plain.make_batches(3, micro_batches=12, vocab=processes.VOCAB)

    def train(store, plan, **options):
        return runs.train(store, batches, plan, **options)

    options = {"asynchronous": asynchronous, "rate": 1e-2, **OPTIONS}
    alone = processes.alone(cfg, {"dtype": dtype}, train, **options)
    for found in processes.several(2, cfg, {"dtype": dtype}, train, **options):
        assert_same(alone, found)


@pytest.mark.long
@BOTH
def test_resumed_in_another_number_of_processes(tmp_path, asynchronous):
    cfg, kind = CFG | {"vocab_size": processes.VOCAB}, {"dtype": torch.bfloat16}
    (tmp_path / "config.json").write_text("{}")
    batches = plain.make_batches(saved.STEPS, micro_batches=12, vocab=processes.VOCAB)
    options = {"asynchronous": asynchronous, "batches": batches, "folder": tmp_path}
    found = processes.several(2, cfg, kind, saved.train, saves=True, **options)
    found += processes.several(3, cfg, kind, saved.train, resumed=True, **options)
    found.append(processes.alone(cfg, kind, saved.train, resumed=True, **options))
    losses, weights = processes.alone(cfg, kind, saved.train, **options)
    for other, its_weights in found:
        assert other == losses
        assert all(torch.equal(its_weights[name], tensor) for name, tensor in weights.items())
