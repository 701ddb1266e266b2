"""Measures steps of two processes over a limited link: `python -m benchmarks.network --out FILE`.

Two engines with a model whose computation is a sleep (benchmarks/network/model.py) run in network namespaces that a
veth pair joins. tbf limits what each side sends. The time of a step at each rate is compared with the planner's, which
knows the sleeps, the rate and this machine. Needs root, ip and tc.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch

from benchmarks.commit import commit
from benchmarks.network.model import LENGTH, MICRO_BATCHES, WORLD, Sleeps, planned, sleeping_model
from benchmarks.network.namespaces import Side, Unavailable, joined, limit
from rptrain.schedule.network import hiding_rate

PORT = 29871
SLEEPS = Sleeps(0.005, 0.01, 0.02)  # with two micro-batches, 0.34 s per step
QUICK = Sleeps(0.0005, 0.001, 0.002)  # a tenth: the network is the limit at higher rates
CASES = ((SLEEPS, (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 10.0)), (QUICK, (0.1, 1.0, 10.0)))  # with rates in Gb/s
WARM_UP, SECONDS, LEAST = 2, 6.0, 3  # steps; seconds of all measurements at a rate, as expected; steps of one at least
MESSAGE, MESSAGES = 16 << 20, 40  # bytes and number of messages that show what gloo can do here


@contextmanager
def processes(sides: Sequence[Side], sleeps: Sleeps, *, asynchronous: bool) -> Iterator[list[subprocess.Popen[str]]]:
    options = json.dumps({"sleeps": astuple(sleeps), "asynchronous": asynchronous})
    with ExitStack() as stack:
        found = []
        for rank, side in enumerate(sides):
            arguments = [str(rank), sides[0].address, str(PORT), options]
            process = subprocess.Popen(
                side.command(sys.executable, "-m", "benchmarks.network.worker", *arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | {"GLOO_SOCKET_IFNAME": side.interface, "OMP_NUM_THREADS": "1"},
                text=True,
            )
            found.append(stack.enter_context(process))  # waits for its end, after its input was closed
        answers(found)
        yield found


def ask(found: Sequence[subprocess.Popen[str]], command: str) -> list[float]:
    """The answers of all processes to a command."""
    for process in found:
        assert process.stdin is not None
        process.stdin.write(command + "\n")
        process.stdin.flush()
    return answers(found)


def answers(found: Sequence[subprocess.Popen[str]]) -> list[Any]:
    lines = [process.stdout.readline() for process in found if process.stdout is not None]
    if not all(lines):
        raise RuntimeError("a process has ended early")
    return [json.loads(line) for line in lines]


def measure(
    found: Sequence[subprocess.Popen[str]],
    sleeps: Sleeps,
    rates: Sequence[float],
    *,
    asynchronous: bool,
    repeats: int,
) -> dict[str, Any]:
    """The rates with the measured and the expected seconds per step; the median of `repeats` of each."""
    rows = []
    for gigabits in rates:
        rate = gigabits * 1e9 / 8
        limit(rate)
        expected = planned(sleeps, asynchronous=asynchronous, rate=rate).estimate.period
        count = max(LEAST, round(SECONDS / expected / repeats))
        runs = [max(ask(found, f"steps {WARM_UP} {count}")) for _ in range(repeats)]
        seconds = statistics.median(runs)
        rows.append({"gigabits": gigabits, "seconds": seconds, "expected": expected, "runs": runs})
        print(
            f"{gigabits:>6} Gb/s: {seconds:.3f} s per step, {expected:.3f} s expected, {seconds / expected - 1:+.1%}",
            flush=True,
        )
    run = planned(sleeps, asynchronous=asynchronous, rate=1.0)
    hiding = hiding_rate(run.costs, run.plan.stages, run.setting, 1.0)
    assert hiding is not None
    free = planned(sleeps, asynchronous=asynchronous, rate=None)
    print(f"   expected to hide from {hiding * 8 / 1e9:.3g} Gb/s; {free.estimate.period:.3f} s without a network")
    return {
        "update": "async" if asynchronous else "sync",
        "sleeps": astuple(sleeps),
        "plan": str(run.plan),
        "hiding_gigabits": hiding * 8 / 1e9,
        "expected_without_network": free.estimate.period,
        "rates": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.network", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--repeats", type=int, default=3, help="measurements at each rate, whose median counts")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the namespaces are deleted
    cases: list[dict[str, Any]] = []
    messages: dict[str, float] = {}
    try:
        with joined() as sides:
            for sleeps, rates in CASES:
                for asynchronous in (True, False):
                    print(f"{'async' if asynchronous else 'sync'}, sleeps of {sleeps}")
                    limit(None)
                    with processes(sides, sleeps, asynchronous=asynchronous) as found:
                        cases.append(
                            measure(found, sleeps, rates, asynchronous=asynchronous, repeats=arguments.repeats)
                        )
                        if not messages:
                            for gigabits in (None, 10.0):
                                limit(gigabits and gigabits * 1e9 / 8)
                                rate = min(ask(found, f"messages {MESSAGE} {MESSAGES}")) * 8 / 1e9
                                messages["unlimited" if gigabits is None else f"{gigabits:g}"] = rate
                                print(f"gloo alone: {rate:.2f} Gb/s each way at once, link: {gigabits or 'unlimited'}")
                        limit(None)
    except Unavailable as error:
        raise SystemExit(str(error)) from error
    numel = sum(unit.numel for unit in sleeping_model(SLEEPS).units)
    document = {
        "commit": commit(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "processes": WORLD,
        "parameters": numel,
        "micro_batches": MICRO_BATCHES,
        "length": LENGTH,
        "messages_gigabits": messages,
        "cases": cases,
    }
    arguments.out.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
