"""One of the two processes: `python -m benchmarks.network.worker RANK HOST PORT OPTIONS`.

It reads a command per line, and prints a line of JSON for each: `steps WARM_UP COUNT` trains, and answers with the
seconds per step; `messages BYTES COUNT` sends and receives at once, and answers with the bytes per second each way.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from benchmarks.network.model import WORLD, Sleeps, batch, planned, sleeping_model
from rptrain.engine.distributed.launch import Launch
from rptrain.engine.distributed.peers import Peers
from rptrain.engine.distributed.shared import Shared
from rptrain.engine.engine import Devices, Engine
from rptrain.engine.memory.store import ModelStore
from rptrain.engine.optimizer import Optimizer

dist: Any = torch.distributed


def main(rank: int, host: str, port: int, sleeps: Sleeps, *, asynchronous: bool) -> None:
    torch.set_num_threads(1)
    store = None
    if rank == 0:
        store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    with Peers(Launch(rank, WORLD, 0, 1, host, port)) as peers:
        shared, messages = Shared.open(peers, WORLD), peers.channel()
        run, data = planned(sleeps, asynchronous=asynchronous, rate=None), batch()
        with ModelStore(sleeping_model(sleeps), replace(run.layout, share=shared.share)) as weights:
            _fill(weights)
            with Engine(weights, run.plan, Devices(["cpu:0"], run.device), Optimizer(), partners=shared) as engine:
                calls = {
                    "steps": lambda warm_up, count: _steps(engine, data, warm_up, count),
                    "messages": lambda nbytes, count: _messages(messages, 1 - rank, nbytes, count),
                }
                _serve(calls)
    del store


def _serve(calls: dict[str, Callable[[int, int], float]]) -> None:
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, *numbers = line.split()
        print(json.dumps(calls[name](*map(int, numbers))), flush=True)


def _fill(weights: ModelStore) -> None:
    for state in weights.units:
        for params in state.params:
            params.fill_(0.01)
    weights.loaded()


def _steps(engine: Engine, data: Any, warm_up: int, count: int) -> float:
    """Seconds per step, from the end of a step to the end of another."""
    began = 0.0
    before: Any = None
    for number in range(warm_up + count + 1):
        loss = engine.forward_backward(data)
        update = engine.step(1e-3)
        if before is not None:
            before.result()  # a step is submitted while the one before it is computed
        before = update
        if number == warm_up:
            began = time.perf_counter()
    seconds = (time.perf_counter() - began) / count
    loss.result()
    engine.synchronize()
    return seconds


def _messages(channel: Any, other: int, nbytes: int, count: int) -> float:
    """Bytes per second in each direction, both at once."""
    out, into = torch.zeros(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)
    began = 0.0
    for number in range(count + 1):
        if number == 1:
            began = time.perf_counter()
        for message in (*channel.receive(into, other), *channel.send(out, other)):
            message.wait()
    return nbytes * count / (time.perf_counter() - began)


if __name__ == "__main__":
    options = json.loads(sys.argv[4])
    main(
        int(sys.argv[1]),
        sys.argv[2],
        int(sys.argv[3]),
        Sleeps(*options["sleeps"]),
        asynchronous=options["asynchronous"],
    )
