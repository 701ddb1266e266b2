"""Frozen units in files: the bits of a base in memory, through few small buffers, however fast they are read."""

import os
import threading
import time
from contextlib import contextmanager

import pytest
import torch

from rptrain.engine import evaluate
from rptrain.engine.errors import EngineError
from rptrain.engine.memory.store import ModelStore
from rptrain.engine.transfer import copies, staging
from rptrain.kernels.quant import Quantized
from rptrain.models.transforms.lora import LoRA, without_adapters
from rptrain.models.weights import pretrained
from rptrain.models.weights.file_backed import FileBackedUnit, FileBackedWeights, file_backed_units
from tests.cases import grid, long

from ... import run_tools as tools
from ...layouts import layout_of
from .. import plain, runs
from ..test_frozen import same_as_first
from ..test_short_steps import some_short

PLAN = "F0-1 F2-3 FB4-4 B2-3 B0-1"
TIED = plain.config(tie_word_embeddings=True)
PARTS = ["*.mlp.*", "model.layers.1.*", "lm_head.weight"]
CASES = {
    "lora": (plain.CONFIG, {"lora": LoRA(r=3, lora_dropout=0.1)}),
    "tied": (TIED, {"lora": LoRA(r=3)}),
    "experts": (plain.QWEN3_MOE, {"lora": LoRA(r=3)}),
    "parts": (plain.CONFIG, {"frozen": PARTS}),
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Chunks that end within tensors, and fewer buffers than a unit has chunks."""
    make_small(monkeypatch, 3000)


def make_small(monkeypatch, chunk):
    for module in (copies, evaluate, staging):
        monkeypatch.setattr(module, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(staging, "BUFFERS", 3)
    monkeypatch.setattr(staging, "READERS", 2)


@contextmanager
def mapped_store(folder, cfg, kind, *, dtype=torch.float32, asynchronous=True, wide_grad=False, lock=False):
    """A store as `runs.make_store` makes it, its frozen units in files."""
    options = {"generations": 1 + asynchronous, "wide_grad": wide_grad}
    with runs.make_store(cfg, dtype, asynchronous=asynchronous, wide_grad=wide_grad, **kind) as memory:
        own = without_adapters(memory.spec)
        if not any(folder.iterdir()):
            pretrained.save(folder, own, memory.view, dtype)
        file_backed = FileBackedWeights(pretrained.check(folder, own), memory.spec, dtype)
        with ModelStore(
            memory.spec, layout_of(dtype, file_backed=True, **options), file_backed=file_backed, lock=lock
        ) as store:
            for index in store.in_memory:
                for param in store.spec.units[index].params:
                    held = memory.stored_view(index, param.name)
                    assert not isinstance(held, Quantized)
                    store.stored_view(index, param.name).copy_(held)
            store.loaded()
            yield store


@pytest.mark.parametrize("name", [long("lora"), "tied", grid("experts"), grid("parts")])
def test_the_bits_of_a_base_in_memory(tmp_path, name):
    cfg, kind = CASES[name]
    batches = plain.make_batches(3)
    options = {"asynchronous": True, "rate": 1e-2}
    results = [runs.run(cfg, batches, f"{PLAN} | N=2 M=4 MR=4", **options, **kind)]
    for devices in (1, 2, 3):
        with mapped_store(tmp_path, cfg, kind) as store:
            assert {*range(len(store.units))} - {*store.in_memory} == {*file_backed_units(store.spec)} != set()
            results.append(runs.train(store, batches, f"{PLAN} | N={devices} M=4 MR=4", **options))
    same_as_first(results)


@pytest.mark.parametrize("devices", [2, grid(7)])
def test_in_rounds_and_in_sync(tmp_path, devices):
    batches, kind = some_short([6, 1, 6]), CASES["parts"][1]
    plan = f"{PLAN} | N={devices} M=6 MR=2"
    results = [runs.run(plain.CONFIG, batches, plan, dtype=torch.bfloat16, asynchronous=False, **kind)]
    with mapped_store(tmp_path, plain.CONFIG, kind, dtype=torch.bfloat16, asynchronous=False, wide_grad=True) as store:
        results.append(runs.train(store, batches, plan, asynchronous=False))
    same_as_first(results)


@pytest.mark.parametrize("slow", ["reading", "upload", "micro-batch", "optimizer"])
def test_delays_anywhere_change_nothing(tmp_path, slow):
    def probe(where):
        if slow in where:
            time.sleep(0.002)

    batches, plan = plain.make_batches(2), f"{PLAN} | N=2 M=4 MR=4"
    results = [runs.run(TIED, batches, plan, asynchronous=True, **CASES["tied"][1])]
    with mapped_store(tmp_path, *CASES["tied"]) as store:
        results.append(runs.train(store, batches, plan, asynchronous=True, probe=probe))
    same_as_first(results)


@pytest.mark.parametrize("plan", [grid("N=1 M=4 MR=4"), "N=3 M=4 MR=2"])
def test_evaluations_in_between_read_the_same(tmp_path, plan):
    """Also the first, ahead of all training, and two in a row."""
    *batches, other = plain.make_batches(3)
    cfg, kind = CASES["lora"]
    found = []
    rounds = {"wide_grad": "MR=2" in plan}
    memory = runs.make_store(cfg, torch.float32, asynchronous=True, **rounds, **kind)
    with memory, mapped_store(tmp_path, cfg, kind, **rounds) as mapped:
        for store in (memory, mapped):
            with runs.engine_of(store, f"{PLAN} | {plan}", tokens=32) as engine:
                losses = [engine.evaluate(other)]
                for batch in batches:
                    losses.append(engine.forward_backward(batch).result())
                    engine.step(1e-2).result()
                    losses += [engine.evaluate(other), engine.evaluate(other)]
                found.append(losses)
    assert found[0] == found[1] and len({*found[0]}) > 3


def test_reading_is_ahead_of_what_is_computed(tmp_path):
    """Every buffer is filled for the next stage while none of it is asked for: the first micro-batch waits until so."""
    filled = []

    def probe(where):
        if where.startswith("reading"):
            filled.append(where)
        elif where == "embedding m0":
            tools.wait_for(lambda: len(filled) >= staging.BUFFERS)

    batches = plain.make_batches(1)
    with mapped_store(tmp_path, *CASES["lora"]) as store:
        runs.train(store, batches, f"{PLAN} | N=1 M=4 MR=4", asynchronous=True, probe=probe)


@pytest.mark.parametrize("change", ["cut", "touched"])
def test_a_file_that_changes_ends_the_run_and_is_named(tmp_path, monkeypatch, change):
    batches, plan = plain.make_batches(4), f"{PLAN} | N=2 M=4 MR=4"
    file = tmp_path / pretrained.SINGLE
    reading, read = threading.Lock(), FileBackedUnit.read

    def alone(unit, start, buffer):
        with reading:  # the file does not change between a reading and the check that follows it
            read(unit, start, buffer)

    monkeypatch.setattr(FileBackedUnit, "read", alone)
    with (
        mapped_store(tmp_path, *CASES["lora"]) as store,
        pytest.raises(EngineError) as caught,
        runs.engine_of(store, plan, tokens=32) as engine,
    ):
        for number, batch in enumerate(batches):
            engine.forward_backward(batch).result()
            engine.step(1e-3).result()
            if number == 0:
                with reading:
                    if change == "cut":
                        os.truncate(file, 2000)
                    else:
                        os.utime(file, ns=(0, 0))
    said = {"cut": "before all of it was read", "touched": "was changed while it was in use"}[change]
    assert said in str(caught.value) and str(file) in str(caught.value)
