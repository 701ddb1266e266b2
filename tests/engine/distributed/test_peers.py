"""A process that ends, fails or falls silent ends the step in all others, with its name."""

import re
import signal
import subprocess
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist

from tests import run_tools as tools
from tests.cases import grid

PROGRAM = """
import os, sys, threading, time, traceback
import torch
from rptrain.engine.distributed import peers as module
from rptrain.engine.distributed.launch import Launch
from rptrain.engine.distributed.peers import Peers
from rptrain.engine.distributed.shared import Shared
from rptrain.schedule.plan import Plan
from tests.engine import plain, runs

rank, port, fault = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if fault in ("step", "evaluation", "end", "done"):  # not less: a busy machine may hold up a thread for seconds
    module.SILENT = 10.0
plan = Plan.parse("FB0-4 | N=1 M=1 MR=1")
batches = plain.make_batches(200, micro_batches=3)
last = threading.Event()  # the optimizer begins the last update


def probe(name):
    if fault == "fails" and rank == 1 and "optimizer" in name:
        raise RuntimeError("broken")
    if last.is_set() and "optimizer" in name:
        stop("end")


def stop(where):
    # Tells the test, and gives it time to stop this process
    if fault == where and rank == 1:
        print("here", flush=True)
        time.sleep(60)


def train(peers):
    shared = Shared.open(peers, 3)
    kind = {"asynchronous": True, "wide_grad": True, "share": shared.share}
    with runs.make_store(plain.CONFIG, torch.float32, **kind) as store:
        tokens = batches[0].sequences * batches[0].length
        with runs.engine_of(store, plan, tokens=tokens, shared=shared, probe=probe) as engine:
            for step, batch in enumerate(batches):
                loss = engine.forward_backward(batch)
                if step == 3 and fault == "end":
                    update.result()
                    last.set()  # else this process could complete its part before it is stopped
                update = engine.step(1e-3)
                loss.result()
                if step == 3:
                    stop("step")
                    stop("evaluation")
                    engine.evaluate(batch) if fault == "evaluation" else None
                    if fault in ("end", "done"):
                        break
            if fault == "done" and rank == 0:
                time.sleep(1.5 * module.SILENT)


def end(*error):
    # As the trainer: threads that wait for messages could abort the process while Python ends
    traceback.print_exception(*error)
    os._exit(1)


sys.excepthook = end
with Peers(Launch(rank, 3, rank, 3, "127.0.0.1", port)) as peers:
    train(peers)
"""


def started(fault):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    line = [sys.executable, "-c", PROGRAM]
    processes = [subprocess.Popen([*line, str(rank), str(store.port), fault], **pipe) for rank in range(3)]
    return store, processes


LOST = "process 1 on .* has ended or cannot be reached: the step cannot be completed"


@pytest.mark.long
@pytest.mark.parametrize(
    ("where", "number", "reason"),
    [
        ("step", signal.SIGKILL, LOST),
        grid("step", signal.SIGSTOP, LOST),
        ("evaluation", signal.SIGSTOP, LOST),
        ("end", signal.SIGSTOP, LOST),
        ("fails", None, "process 1 on .* has failed: .*RuntimeError: broken: the step cannot be completed"),
    ],
)
def test_the_others_end_and_name_it(where, number, reason):
    """Wherever it is killed or stopped, and whatever they wait for."""
    _store, processes = started(where)
    try:
        if number is not None:
            assert processes[1].stdout.readline() == "here\n"
            processes[1].send_signal(number)
        for rank in (0, 2):
            output, _ = processes[rank].communicate(timeout=tools.PATIENCE)
            assert processes[rank].returncode == 1, output
            assert re.search(reason, output.strip().splitlines()[-1]), output
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.long
def test_a_process_may_end_long_before_the_others():
    _store, processes = started("done")
    outputs = [process.communicate(timeout=tools.PATIENCE)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
