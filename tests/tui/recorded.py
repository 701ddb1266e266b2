"""Runs that never were: folders with the records that a trainer would have written."""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

from rptrain.runs.records.lanes import LaneRecord, OptimizerState, Snapshot
from rptrain.runs.records.process import ProcessId
from rptrain.runs.records.timeline import Schedule, SlotSpan, StepTimeline

BEGAN = 1_700_000_000.0
GIB = 1 << 30
STEPS = ("step", "sample", "checkpoint_saved")  # events of the first process alone
CONFIG = """\
[model]
path = "{model}"

[[data.train]]
path = "builtin:random"

[train]
max_steps = {total}

[log]
run_name = "{name}"
"""


def make_run(
    parent: Path,
    name: str = "llama",
    *,
    steps: int = 400,
    total: int = 1000,
    devices: int = 4,
    end: str | None = None,
    alive: bool = True,
    began: float = BEGAN,
    model: str = "llama-3.1-8b",
    every: float = 2.0,
    processes: int = 1,
) -> Path:
    """A run of GPUs with `steps` reported steps of `every` seconds; `end` is the name of its last event. Each of
    several processes has `devices` GPUs, on a host of its own: node-0, node-1, …
    """
    run = parent / name
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.toml").write_text(CONFIG.format(model=model, total=total, name=name))
    names = tuple(f"cuda:{index}" for index in range(devices))
    own = ProcessId.of(os.getpid())
    last = began + 40 + steps * every
    for rank in range(processes):
        folder = run / "processes" / str(rank) if rank else run
        folder.mkdir(parents=True, exist_ok=True)
        process = own if alive else ProcessId(own.host, own.pid, f"{own.birth.partition('/')[0]}/0")
        process = process if processes == 1 else ProcessId(f"node-{rank}", 17, "another")
        with (folder / "events.jsonl").open("w") as file:
            for record in _records(names, process, steps, total, end, began, model, every):
                several = {"processes": processes} if record["event"] == "process_started" else {}
                if rank == 0 or record["event"] not in STEPS:
                    file.write(json.dumps({"schema": 1, **record, **several}, separators=(",", ":")) + "\n")
        with (folder / "lanes.jsonl").open("w") as file:
            for index in range(240):
                file.write(snapshot(names, last - 60 + index / 4, index + rank).to_line() + "\n")
    return run


def _records(
    names: tuple[str, ...],
    process: ProcessId,
    steps: int,
    total: int,
    end: str | None,
    began: float,
    model: str,
    every: float,
) -> Iterator[dict[str, Any]]:
    yield {
        "event": "run_started",
        "time": began,
        "config_hash": "0123",
        "version": "0.1.0",
        "devices": names,
        "model": model,
        "parameters": 8_030_261_248,
    }
    parts = [["optimizer state", 60 * GIB], ["weights, two generations", 30 * GIB], ["gradients", 15 * GIB]]
    memory = [{"kind": "host memory", "name": "host", "parts": parts, "limit": 200 * GIB}]
    memory += [{"kind": "GPU memory", "name": name, "parts": [["work", 14 * GIB]], "limit": 24 * GIB} for name in names]
    yield {
        "event": "process_started",
        "time": began + 1,
        "host": process.host,
        "pid": process.pid,
        "birth": process.birth,
        "total_steps": total,
        "staleness": 1,
        "memory": memory,
    }
    yield {"event": "plan", "time": began + 2, "lines": ["F0-7 FB8-28 B0-7", "cuda:0 …"]}
    stages, count = ("F0-7", "FB8-28", "B0-7"), len(names)
    schedule = Schedule(stages, count, len(stages), timeline(count, 4, 0.0))
    estimated = {"step_seconds": 1.9, "bubble": 0.021, "floor_seconds": 1.8, "schedule": asdict(schedule)}
    yield {"event": "estimated", "time": began + 3, **estimated}
    random = Random(began)
    slow = random.uniform(60, 200)
    for step in range(1, steps + 1):
        yield {
            "event": "step",
            "time": began + 40 + step * every,
            "step": step,
            "loss": 1.2 + 2.4 * math.exp(-step / slow) + random.gauss(0, 0.04),
            "learning_rate": 1e-5 * min(step / 50, 0.5 + 0.5 * math.cos(math.pi * step / total)),
            "grad_norm": 0.8 + random.expovariate(4) + (6 if step % 137 == 0 else 0),
            "tokens": 131072,
            "supervised": 100000,
            "tokens_per_second": 65536 + random.gauss(0, 600),
            "skipped": step == 7,
        }
        if step % 200 == 0:
            path = f"checkpoints/checkpoint-{step}"
            yield {
                "event": "sample",
                "time": began + 40 + step * every,
                "step": step,
                "prompt": "Spell backwards: abc",
                "text": "cba",
            }
            yield {"event": "checkpoint_saved", "time": began + 40 + step * every, "step": step, "path": path}
    if end == "failed":
        yield {"event": "failed", "time": began + 41 + steps * every, "message": "EngineError: cuda:1 fell off the bus"}
    elif end is not None:
        yield {"event": end, "time": began + 41 + steps * every, "step": steps}


def snapshot(names: tuple[str, ...], time: float, index: int) -> Snapshot:
    """A quarter of a second of devices that go through F, FB and B in turn."""
    kinds = ("F", "FB", "FB", "B", "F", "FB", "B", "")
    lanes = []
    for number, name in enumerate(names):
        kind = kinds[(index // 3 + 2 * number) % len(kinds)]
        stage = {"F": "F0-7", "FB": "FB8-28", "B": "B0-7", "": None}[kind]
        lanes.append(
            LaneRecord(
                name,
                "computing" if kind else "waiting",
                stage or "F0-7",
                kind or "F",
                number,
                index % 16,
                400,
                None if kind else "weights of layers.3",
                {kind: 0.24} if kind else {},
                3_100_000_000,
                1_200_000_000,
                int(18.2 * GIB),
                97,
                61 + number,
            )
        )
    optimizer = OptimizerState("updates layers.17", 1, 1.41)
    step = timeline(len(names), 399, 0.05) if index % 20 == 0 else None
    return Snapshot(time, 0.25, "training", 118 * GIB, 74 * GIB, tuple(lanes), optimizer, timeline=step)


def timeline(devices: int, iteration: int, wait: float) -> StepTimeline:
    """A step of three slots that go round; each is longer by the seconds that its device waits before it."""
    slots = ((0, 0.3), (1, 1.0), (2, 0.5))
    lanes = []
    for device in range(devices):
        at, lane = 0.0, []
        for turn in range(len(slots)):
            slot, seconds = slots[(device + 3 * iteration + turn) % len(slots)]
            lane.append(SlotSpan(slot, round(at + wait, 3), round(at + wait + seconds, 3)))
            at += wait + seconds
        lanes.append(tuple(lane))
    seconds = 1.85 + 3 * wait
    return StepTimeline(iteration, seconds, (round(1.8 / seconds, 4),) * devices, tuple(lanes), iteration + 1)


def touch(run: Path, seconds: float) -> None:
    os.utime(run, (seconds, seconds))
