"""Measure how long a training run takes to its first step, with data that is not in the cache.

python -m benchmarks.reading.first_step COMMIT OUT.json [--megabytes 100] [--characters 200 2000] [--cores 1 2 4]
    [--before 2] [--devices cuda:0]

Trains a small model for one step on a JSON-lines file of chats, with the installed rptrain bound to each number of
`--cores` and with that of COMMIT bound to each of `--before`: twice, since the second run finds the tokens in the
cache. The difference is what reading takes. At last a run is interrupted while it reads. Records the seconds, the lines
that a pipe gets with their times, the peak memory, the hash of the cache, and the loss, which has to be the same
everywhere.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.commit import commit
from benchmarks.golden import unpack
from benchmarks.reading import chats
from benchmarks.reading.measure import Peak, cache_hashes
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records import events

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": chats.VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "initializer_range": 0.02,
}
CONFIG = """
[model]
path = "model"
init = "random"

[[data.train]]
path = "chats.jsonl"

[data]
max_length = 2048

[train]
max_steps = 1

[save]
resume = "never"
"""
INTERRUPTED = 3.0  # seconds of reading until the signal


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.reading.first_step", description="Measure how long a run takes to its first step."
    )
    parser.add_argument("commit", help="the commit to compare with")
    parser.add_argument("out", type=Path, metavar="OUT.json", help="the JSON file to write")
    parser.add_argument("--megabytes", type=float, default=100, help="size of the data (default: 100)")
    parser.add_argument(
        "--characters", type=int, nargs=2, default=(200, 2000), metavar="N", help="of a message (default: 200 2000)"
    )
    parser.add_argument("--devices", default="cuda:0", help="engine.devices of the runs (default: cuda:0)")
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 2, 4], help="numbers of cores (default: 1 2 4)")
    parser.add_argument("--before", type=int, nargs="*", default=[2], help="the same for the other commit (default: 2)")
    given = parser.parse_args(arguments)
    with TemporaryDirectory() as name:
        folder = Path(name)
        rows = chats.write_chats(folder / "chats.jsonl", int(given.megabytes * 1e6), tuple(given.characters))
        chats.write_tokenizer(folder / "model")
        (folder / "model" / "config.json").write_text(json.dumps(MODEL))
        (folder / "run.toml").write_text(CONFIG)
        package = unpack(given.commit, folder / "package")
        results = list[dict[str, Any]]()
        for version, cores in [("before", count) for count in given.before] + [("now", count) for count in given.cores]:
            found = measured(folder, package if version == "before" else None, cores, given.devices)
            found["rows_per_second"] = round(rows / (found["seconds"] - found["seconds_cached"]), 1)
            results.append({"version": version, "cores": cores} | found)
            print(
                f"{version:6} {cores:3} cores {found['seconds']:7.1f} s, cached {found['seconds_cached']:7.1f} s",
                end="",
            )
            print(f", {found['rows_per_second']:8.1f} rows/s", flush=True)
        with TemporaryDirectory(dir=folder) as place:
            interrupted, _ = run(folder, Path(place), None, max(given.cores), given.devices, INTERRUPTED)
    result = {
        "commit": commit(),
        "before": given.commit,
        "devices": given.devices,
        "data": {"megabytes": given.megabytes, "rows": rows, "characters": given.characters},
        "runs": results,
        "interrupted": interrupted,
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n")


def measured(folder: Path, package: Path | None, cores: int, devices: str) -> dict[str, Any]:
    """What a run showed, and the seconds of another that finds its tokens in the cache."""
    with TemporaryDirectory(dir=folder) as text:
        place = Path(text)
        found, loss = run(folder, place, package, cores, devices)
        again, same = run(folder, place, package, cores, devices)
        if found["exit"] or again["exit"] or loss != same:
            raise SystemExit("\n".join(line for _, line in [*found["lines"], *again["lines"]]))
        return found | {"seconds_cached": again["seconds"], "loss": loss} | cache_hashes(place / "cache")


def run(
    folder: Path, place: Path, package: Path | None, cores: int, devices: str, interrupt: float | None = None
) -> tuple[dict[str, Any], float | None]:
    """What a run showed, and its loss. `interrupt`: seconds of reading after which it gets SIGINT."""
    runs = place / f"runs-{len(list(place.iterdir()))}"
    sets = (f"engine.devices={devices}", f"data.cache_dir={place}/cache", f"save.output_dir={runs}")
    environment = os.environ | ({} if package is None else {"PYTHONPATH": str(package)})
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "rptrain", "--config", "run.toml", *sets],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=environment | {"RPTRAIN_READING_PERIOD": "2"},
        preexec_fn=lambda: os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores]),
    )
    peak, lines, sent = Peak(process.pid), list[tuple[float, str]](), list[float]()

    def send() -> None:
        sent.append(time.perf_counter())
        process.send_signal(signal.SIGINT)

    timer = None
    for line in process.stdout or ():
        lines.append((round(time.perf_counter() - began, 1), line.rstrip()))
        if interrupt is not None and timer is None and line.startswith("reading "):
            timer = threading.Timer(interrupt, send)
            timer.start()
    process.wait()
    ended = time.perf_counter()
    found: dict[str, Any] = {"seconds": round(ended - began, 2), "exit": process.returncode, "peak_bytes": peak.end()}
    if timer is not None:
        timer.cancel()
    if sent:
        found["seconds_after_signal"] = round(ended - sent[0], 2)
    losses = [
        step.loss
        for path in runs.glob("*")
        for step in events.read(RunDir.open(path).events_path)
        if isinstance(step, events.Step)
    ]
    return found | {"lines": lines}, losses[0] if losses else None


if __name__ == "__main__":
    main(sys.argv[1:])
