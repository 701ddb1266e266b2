"""Several processes save while they train, and any number of processes continues to the same bits."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rptrain.checkpoint.processes import ALONE, Processes
from rptrain.checkpoint.state import Background, load_state, save_state
from tests.cases import BOTH

from .. import plain, runs
from .test_exactness import KINDS, SIZES, VOCAB, alone, several

STEPS, SAVED = 4, 2
LOADING = threading.Lock()  # it changes the number of torch's threads in the process, which stands for several here


def train(store, plan, *, batches, folder, saves=False, resumed=False, shared=None, **options):
    """Saves after some steps, or continues from there; returns the losses of the other steps, and the weights."""
    begin = 0
    if resumed:
        with LOADING:
            begin = load_state(folder / f"checkpoint-{SAVED}", store.units)["step"]
    processes = ALONE if shared is None else Processes.of(shared.peers)
    losses = []
    tokens = batches[0].sequences * batches[0].length
    with (
        ThreadPoolExecutor(1) as saver,
        runs.engine_of(store, plan, tokens=tokens, applied=begin, shared=shared, **options) as engine,
    ):
        for step, batch in enumerate(batches[begin:], begin):
            if step == SAVED and saves:
                saving = saver.submit(save, store, engine.snapshot(), folder, processes)
            losses.append(engine.forward_backward(batch))
            engine.step(1e-2)
        engine.synchronize()
        if saves:
            saving.result()
        found = [loss.result() for loss in losses][SAVED - begin :]
    return found, runs.checkpoint_tensors(store)


def save(store, snapshot, folder, processes):
    with snapshot:
        meta = {"model_dir": str(folder)}
        background = Background(snapshot.order, snapshot.release)
        save_state(folder, store.units, step=SAVED, meta=meta, background=background, processes=processes)


@pytest.mark.long
@pytest.mark.sample(3)
@BOTH
@pytest.mark.parametrize("kind", ["bf16", "fp8", "int8-moments", "lora", "frozen", "tied"])
def test_resumed_in_another_number_of_processes(tmp_path, kind, asynchronous):
    changes, of_store = KINDS[kind]
    cfg = plain.config(tie_word_embeddings=True) | changes | SIZES
    (tmp_path / "config.json").write_text("{}")
    options = {
        "asynchronous": asynchronous,
        "batches": plain.make_batches(STEPS, micro_batches=12, vocab=VOCAB),
        "folder": tmp_path,
    }
    found = several(2, cfg, of_store, train, saves=True, **options)
    found += several(3, cfg, of_store, train, resumed=True, **options)
    found.append(alone(cfg, of_store, train, resumed=True, **options))
    parts = [*(tmp_path / f"checkpoint-{SAVED}/units").glob("*.elements-*")]
    assert (len(parts) > 1) == (kind != "lora")  # its units are small, and not divided
    losses, weights = alone(cfg, of_store, train, **options)
    for other, its_weights in found:
        assert other == losses
        assert all(torch.equal(its_weights[name], weights[name]) for name in weights)
