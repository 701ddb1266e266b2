"""Weights that travel in FP8: the bits of quantizing on the device, half of the bytes, and states that are resumed."""

import math
import time

import pytest
import torch

from rptrain.checkpoint.state import load_state, save_state
from rptrain.engine.footprint import footprint
from rptrain.engine.memory import wire
from rptrain.engine.memory.store import ModelStore
from rptrain.engine.meter import Meter
from rptrain.engine.optim.adam import CpuAdam
from rptrain.models.families.registry import build
from rptrain.models.params import Unit
from rptrain.models.transforms.fp8 import with_fp8
from rptrain.models.transforms.lora import LoRA
from rptrain.schedule.plan import Plan
from rptrain.utils import native
from rptrain.utils.errors import UserError
from tests.cases import BOTH, UPDATES, grid

from ...layouts import layout_of
from .. import plain, runs
from ..test_frozen import same_as_first

PLAN = "F0-1 F2-3 FB4-4 B2-3 B0-1 | N=2 M=4 MR=4"
CASES = {
    "full": {},
    "frozen": {"frozen": ("*.mlp.*", "model.layers.1.*")},
    "lora": {"lora": LoRA(r=3, target_modules=("q_proj",), modules_to_save=("down_proj",))},
}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture
def on_the_device(monkeypatch):
    """Calls a function with weights that are uploaded in the model's type, and quantized where they arrive."""

    def call(function, *arguments, **named):
        with monkeypatch.context() as patch:
            patch.setattr(Unit, "wired", False)
            return function(*arguments, **named)

    return call


def assert_wire_is_of(state, generation, flat):
    """The generation has the codes, the scales and the other parameters of these weights."""
    expected = torch.zeros_like(state.wire[generation])
    for write in wire.writes(state.unit, flat, expected):
        write()
    assert expected.any() and torch.equal(state.wire[generation], expected)


@pytest.mark.sample(3)
@BOTH
@DTYPES
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_bits_of_quantizing_on_the_device(on_the_device, asynchronous, dtype, case):
    options = {"asynchronous": asynchronous, "dtype": dtype, "rate": 1e-2, "fp8": True} | case
    batches = plain.make_batches(3)
    same_as_first(
        [
            runs.run(plain.CONFIG, batches, PLAN, **options),
            on_the_device(runs.run, plain.CONFIG, batches, PLAN, **options),
        ]
    )


@pytest.mark.parametrize(
    ("slow", "asynchronous"),
    [
        ("writing", False),  # in async, nothing is read before the iteration after the next
        ("upload", True),
        ("preparing", False),
        ("optimizer", True),
        *(grid(slow, True) for slow in ("preparing", "writing")),
        *(grid(slow, False) for slow in ("optimizer", "upload")),
    ],
)
def test_delays_change_nothing(asynchronous, slow, monkeypatch):
    """No codes are published before all are written, or written while a device reads them."""

    def probe(where):
        if slow in where:
            time.sleep(0.01)

    batches, options = plain.make_batches(3), {"asynchronous": asynchronous, "fp8": True, "rate": 1e-2}
    expected = runs.run(plain.CONFIG, batches, PLAN, **options)
    if slow == "writing":
        quantize = wire.quantize_rows_into
        monkeypatch.setattr(wire, "PIECE", 500)
        monkeypatch.setattr(wire, "quantize_rows_into", lambda *args: (time.sleep(0.002), quantize(*args)))
    same_as_first([expected, runs.run(plain.CONFIG, batches, PLAN, probe=probe, **options)])


@UPDATES
def test_the_loss_of_other_data_is_that_of_the_newest_codes(on_the_device, asynchronous):
    *batches, other = plain.make_batches(3)

    def found():
        with runs.make_store(plain.CONFIG, torch.bfloat16, asynchronous=asynchronous, fp8=True) as store:
            tokens = other.sequences * other.length
            with runs.engine_of(store, PLAN, tokens=tokens, asynchronous=asynchronous) as engine:
                losses = [engine.evaluate(other)]
                for batch in batches:
                    engine.forward_backward(batch)
                    engine.step(1e-2)
                    losses.append(engine.evaluate(other))
        return losses

    losses = found()
    assert losses == on_the_device(found) and len(set(losses)) == 3


@pytest.mark.sample(3)
@BOTH
@DTYPES
@pytest.mark.parametrize("in_torch", [False, True], ids=["native", "torch"])
def test_a_step_leaves_the_newest_weights_and_both_generations_of_their_codes(
    asynchronous, dtype, in_torch, monkeypatch
):
    if in_torch:
        monkeypatch.setattr(native, "library", lambda module: None)
    monkeypatch.setattr(wire, "PIECE", 100)  # does not divide a matrix
    batches = plain.make_batches(2)
    with runs.make_store(plain.CONFIG, dtype, asynchronous=asynchronous, fp8=True) as store:
        wired = [state for state in store.units if state.wire]
        assert [bool(state.wire) for state in store.units] == [False, *[True] * 4, False, False]
        assert all(len(state.params) == 1 and len(state.wire) == 1 + asynchronous for state in wired)
        assert all(len(state.params) == 1 + asynchronous for state in store.units if not state.wire)
        for state in wired:
            for generation in range(state.generations):
                assert_wire_is_of(state, generation, state.params[0])
        for count in (1, 2):
            before = [state.params[0].clone() for state in wired]
            runs.run(None, batches[count - 1 : count], PLAN, asynchronous=asynchronous, store=store, rate=1e-2)
            for state, flat in zip(wired, before, strict=True):
                assert not torch.equal(state.params[0], flat)
                assert_wire_is_of(state, state.current, state.params[0])
                assert (state.before != state.current) == asynchronous
                if asynchronous:
                    assert_wire_is_of(state, state.before, flat)


@UPDATES
def test_a_skipped_step_leaves_the_wire_as_it_was(asynchronous, monkeypatch):
    batches = plain.make_batches(2)
    with runs.make_store(plain.CONFIG, torch.bfloat16, asynchronous=asynchronous, fp8=True) as store:
        runs.run(None, batches[:1], PLAN, asynchronous=asynchronous, store=store, rate=1e-2)
        wired = [state for state in store.units if state.wire]
        there = [(state.current, [buffer.clone() for buffer in state.wire]) for state in wired]
        monkeypatch.setattr(CpuAdam, "squares", lambda self, grad: torch.tensor([math.inf]))
        runs.run(None, batches[1:], PLAN, asynchronous=asynchronous, store=store, rate=1e-2)
        for state, (current, buffers) in zip(wired, there, strict=True):
            assert state.current == state.before == current
            assert all(map(torch.equal, state.wire, buffers))


# Checkpoints


def saved(store, batches, folder, asynchronous):
    """Trains, and saves the state."""
    (folder / "config.json").write_text("{}")
    runs.run(None, batches, PLAN, asynchronous=asynchronous, store=store, rate=1e-2)
    return save_state(folder, store.units, step=len(batches), meta={"model_dir": str(folder)})


@pytest.mark.sample(3)
@BOTH
@DTYPES
@pytest.mark.parametrize("skipped", [False, True], ids=["applied", "skipped"])
def test_a_resumed_state_goes_on_to_the_same_bits(asynchronous, dtype, skipped, tmp_path, monkeypatch):
    batches, options = plain.make_batches(5), {"asynchronous": asynchronous, "rate": 1e-2}
    kind = {"asynchronous": asynchronous, "fp8": True}
    with runs.make_store(plain.CONFIG, dtype, **kind) as store:
        checkpoint = saved(store, batches[:2], tmp_path, asynchronous)
        if skipped:
            with monkeypatch.context() as patch:
                patch.setattr(CpuAdam, "squares", lambda self, grad: torch.tensor([math.inf]))
                checkpoint = saved(store, batches[2:3], tmp_path, asynchronous)
        buffers = [
            [state.wire[i].clone() for i in (state.current, state.before)] for state in store.units if state.wire
        ]
        expected = runs.run(None, batches[3:], PLAN, store=store, applied=2, **options)
    with runs.make_store(plain.CONFIG, dtype, seed=9, **kind) as store:
        load_state(checkpoint, store.units)
        wired = [state for state in store.units if state.wire]
        for state, pair in zip(wired, buffers, strict=True):
            assert all(map(torch.equal, (state.wire[state.current], state.wire[state.before]), pair))
        same_as_first([expected, runs.run(None, batches[3:], PLAN, store=store, applied=2, **options)])


@pytest.mark.sample(2)
@DTYPES
@pytest.mark.parametrize("wide_grad", [False, True])
def test_a_previous_generation_in_full_is_quantized(on_the_device, dtype, wide_grad, tmp_path):
    """As older versions stored it."""
    batches, kind = plain.make_batches(4), {"asynchronous": True, "fp8": True, "wide_grad": wide_grad}
    plan = PLAN.replace("MR=4", "MR=2") if wide_grad else PLAN

    def older():
        (tmp_path / "config.json").write_text("{}")
        with runs.make_store(plain.CONFIG, dtype, **kind) as store:
            runs.run(None, batches[:2], plan, asynchronous=True, store=store, rate=1e-2)
            path = save_state(tmp_path, store.units, step=2, meta={"model_dir": str(tmp_path)})
            more = runs.run(None, batches[2:], plan, asynchronous=True, store=store, rate=1e-2, applied=2)
        return path, more

    checkpoint, expected = on_the_device(older)
    with runs.make_store(plain.CONFIG, dtype, seed=9, **kind) as store:
        load_state(checkpoint, store.units)
        again = runs.run(None, batches[2:], plan, asynchronous=True, store=store, rate=1e-2, applied=2)
    same_as_first([expected, again])


def test_a_state_in_fp8_is_not_resumed_without(tmp_path):
    with runs.make_store(plain.CONFIG, torch.bfloat16, asynchronous=True, fp8=True) as store:
        checkpoint = saved(store, plain.make_batches(1), tmp_path, True)
    with (
        runs.make_store(plain.CONFIG, torch.bfloat16, asynchronous=True) as store,
        pytest.raises(UserError, match=r"layers\.0\S* was saved with engine\.fp8 = true .* set engine\.fp8 = true, or"),
    ):
        load_state(checkpoint, store.units)


# Bytes

WIDE = plain.config(hidden_size=256, intermediate_size=768, head_dim=64, num_hidden_layers=2, vocab_size=32)


@DTYPES
def test_uploads_are_codes(dtype):
    """As counted, and as planned; beside them are the scales, the norms and the head."""
    plan, steps = Plan.parse("F0-1 FB2-2 B0-1 | N=1 M=4 MR=4"), 2
    batches, counted = plain.make_batches(steps, vocab=32), {}
    for fp8 in (False, True):
        meter = Meter()
        with runs.make_store(WIDE, dtype, asynchronous=True, fp8=fp8) as store:
            runs.train(store, batches, plan, asynchronous=True, meter=meter)
            units = [unit for stage in plan.stages for layer in stage.layers for unit in store.spec.stack[layer].units]
            planned = sum(store.spec.units[unit].wire_bytes(dtype.itemsize) for unit in units)
            need = footprint(store.spec, plan.stages, store.layout)
        counted[fp8] = sum(r.subject for r in meter.readings if r.kind == "upload" and r.iteration == 1)
        assert counted[fp8] == planned
    matrices = sum(param.numel for unit in with_fp8(build(WIDE)).units for param in unit.in_fp8)
    rows = 2 * (2 * 256 + 2 * 128 + 256 + 2 * 768)  # of both layers: q and o, k and v, down, gate and up
    others = counted[False] - 2 * matrices * dtype.itemsize
    assert counted[True] - others == pytest.approx(2 * (matrices + 4 * rows), abs=2 * 2 * 4 * 128)
    assert counted[True] <= (0.55 if dtype == torch.bfloat16 else 0.28) * counted[False]
    head = sum(store.spec.units[unit].nbytes(dtype.itemsize) for unit in store.spec.head.units)
    assert (need.params, need.prepared) == (planned - head, matrices)


@pytest.mark.parametrize(("generations", "each"), [(1, 15), (2, 16)], ids=["sync", "async"])
def test_bytes_per_parameter(generations, each):
    """Scales, norms, the table and the head beside."""
    cfg = plain.config(hidden_size=512, intermediate_size=1536, head_dim=64, num_hidden_layers=1, vocab_size=32)
    spec = with_fp8(build(cfg))
    sizes = ModelStore.sizes(spec, layout_of(torch.bfloat16, generations=generations))
    matrices = sum(param.numel for unit in spec.units for param in unit.in_fp8)
    total, rest = sum(sizes.values()), spec.num_parameters - matrices
    assert total / spec.num_parameters == pytest.approx(each, rel=0.01)
    assert sizes["wire"] == pytest.approx(generations * matrices, rel=0.01)
    with ModelStore(spec, layout_of(torch.bfloat16, generations=generations)) as store:
        assert store._arena._used == total
        taken = sum(t.nbytes for state in store.units for t in (*state.params, *state.wire))
    assert taken == pytest.approx((2 + generations) * matrices + 2 * generations * rest, rel=0.01)
