"""Several processes save while they train, and any number of processes continues to the same bits."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from rptrain.checkpoint.processes import Processes
from rptrain.checkpoint.state import load_state, save_state
from tests.cases import UPDATES, long

from .. import plain, runs
from .test_exactness import KINDS, SIZES, alone, several

STEPS, SAVED = 4, 2
LOADING = threading.Lock()  # it changes the number of torch's threads in the process, which stands for several here


class Meeting:
    """Exchanges values between threads."""

    def __init__(self, world):
        self._barrier, self._values = threading.Barrier(world, timeout=60), [None] * world

    def gather(self, rank, value):
        self._values[rank] = json.loads(json.dumps(value))
        self._barrier.wait()
        found = [*self._values]
        self._barrier.wait()
        return found


def train(store, plan, *, batches, folder, gather=None, resumed=False, **options):
    """Saves after some steps, or continues from there; returns the losses of the other steps, and the weights."""
    begin = 0
    if resumed:
        with LOADING:
            begin = load_state(folder / f"checkpoint-{SAVED}", store.units)["step"]
    rank = 0 if store.share is None else store.share.rank
    losses = []
    tokens = batches[0].sequences * batches[0].length
    with (
        ThreadPoolExecutor(1) as saver,
        runs.engine_of(store, plan, tokens=tokens, applied=begin, **options) as engine,
    ):
        for step, batch in enumerate(batches[begin:], begin):
            if step == SAVED and gather is not None:
                saving = saver.submit(save, store, engine.snapshot(), folder, Processes(rank, partial(gather, rank)))
            losses.append(engine.forward_backward(batch))
            engine.step(1e-2)
        engine.synchronize()
        if gather is not None:
            saving.result()
        found = [loss.result() for loss in losses][SAVED - begin :]
    return found, runs.checkpoint_tensors(store)


def save(store, snapshot, folder, processes):
    with snapshot:
        meta = {"model_dir": str(folder)}
        options = {"order": snapshot.order, "release": snapshot.release}
        save_state(folder, store.units, step=SAVED, meta=meta, processes=processes, **options)


@UPDATES
@pytest.mark.parametrize("kind", ["bf16", *map(long, ("fp8", "int8-moments", "lora", "frozen", "tied"))])
def test_resumed_in_another_number_of_processes(tmp_path, kind, asynchronous):
    changes, of_store = KINDS[kind]
    cfg = plain.config(tie_word_embeddings=True) | changes | SIZES
    (tmp_path / "config.json").write_text("{}")
    options = {"asynchronous": asynchronous, "batches": plain.make_batches(STEPS, micro_batches=6), "folder": tmp_path}
    found = several(2, cfg, of_store, train, gather=Meeting(2).gather, **options)
    found += several(3, cfg, of_store, train, resumed=True, **options)
    found.append(alone(cfg, of_store, train, resumed=True, **options))
    parts = [*(tmp_path / f"checkpoint-{SAVED}/units").glob("*.elements-*")]
    assert (len(parts) > 1) == (kind != "lora")  # its units are small, and not divided
    losses, weights = alone(cfg, of_store, train, **options)
    for other, its_weights in found:
        assert other == losses
        assert all(torch.equal(its_weights[name], weights[name]) for name in weights)
