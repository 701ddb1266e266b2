"""Whether memory grows or anything is left behind: the bundled example in one process, many times or once and for long.

python -m benchmarks.soak 180                           # seconds; runs of 100 steps, a line for each
python -m benchmarks.soak --one 3600                    # one run with validation, saves and pauses, a line per sample
python -m benchmarks.soak --one 480 --devices cuda:0    # on a GPU
Exits with status 1 if memory grew by more than 1 % from the first third to the last, if a thread, a descriptor, a lock,
a child process or a temporary file was left, or if a record, a loss or a file is missing or wrong.
"""

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.commit import commit
from benchmarks.holdings import Holdings, added, counts, holdings
from rptrain.config.resolve import Resolved, resolve
from rptrain.config.schema import Config
from rptrain.runs.folder.control import PAUSE, STOP, ask, withdraw
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records import events
from rptrain.train.run import train
from rptrain.train.telemetry import MAX_BYTES
from tests.checkpoints import verify_checkpoint
from tests.own_memory import anonymous_and_files

CONFIG = Path(__file__).resolve().parent.parent / "rptrain.toml"
ALWAYS = ("eval.questions=0", "save.resume=never", "data.val_size=0.02", "train.eval_steps=250")
STEPS, EVERY = 100, 10  # of a short run, and between two saves
WARM = 3  # short runs after which nothing is to grow
SAMPLES = 90  # of a long run, after its first checkpoint and a tenth of its time
LOOK = 0.1  # seconds between two looks for the first checkpoint
PAUSED = 2.0  # seconds
RECORD = 512  # bytes, more than a record of events.jsonl has
MOST = 0.01


@dataclass(frozen=True)
class Sample:
    memory: dict[str, int]  # in bytes
    held: dict[str, int]


class Soak:
    """Runs on the given devices in a folder, and what was found wrong with them."""

    def __init__(self, folder: Path, devices: str) -> None:
        self._folder, self._devices = folder, devices
        self._began = time.monotonic()
        self._samples: list[Sample] = []
        self.problems: list[str] = []
        self.result: dict[str, Any] = {}

    def short_runs(self, seconds: float) -> None:
        warm: Holdings = {}
        while time.monotonic() - self._began < seconds or len(self._samples) < WARM + 3:
            shutil.rmtree(train(self._short(), quiet=True).path)
            self._sample(f"run {len(self._samples) + 1}")
            warm = holdings() if len(self._samples) == WARM else warm
        self._nothing_left(warm)
        self._samples = self._samples[WARM:]
        self._memory_stays()

    def long_run(self, seconds: float, pause: float) -> None:
        """Train, pause every so many seconds, and ask the run to stop at the end."""
        for _ in range(WARM):
            shutil.rmtree(train(self._short(), quiet=True).path)
        config = self._config("train.max_steps=100000000")
        run = RunDir(self._folder / str(config.config.log.run_name))
        ends, pauses = threading.Event(), list[float]()
        before = holdings()
        self._began = time.monotonic()

        def look() -> None:
            time.sleep(seconds / 10)
            while not run.checkpoints():  # the first save starts a thread that stays
                time.sleep(LOOK)
            start = time.monotonic()
            end = max(self._began + seconds, start + SAMPLES * LOOK)
            for number in range(SAMPLES):
                self._sample(f"sample {number + 1}")
                time.sleep(max(0.0, start + (end - start) * (number + 1) / SAMPLES - time.monotonic()))
            ends.set()

        def command() -> None:
            while not ends.wait(pause):
                ask(run.path, PAUSE)
                time.sleep(PAUSED)
                withdraw(run.path, PAUSE)
                pauses.append(time.monotonic())
            ask(run.path, STOP)

        threads = [threading.Thread(target=target, daemon=True) for target in (look, command)]
        for thread in threads:
            thread.start()
        train(config, quiet=True)
        for thread in threads:
            thread.join()
        self._nothing_left(before)
        self._memory_stays()
        self._counts_stay()
        self.problems += recorded(run, config.config, len(pauses), self.result)
        self.problems += small(run, config.config.save.save_total_limit or 1)

    def _config(self, *overrides: str) -> Resolved:
        here = f"engine.devices={self._devices}", f"save.output_dir={self._folder}"
        return resolve(CONFIG, [*ALWAYS, *here, *overrides])

    def _short(self) -> Resolved:
        return self._config(f"train.max_steps={STEPS}", f"save.save_steps={EVERY}")

    def _sample(self, name: str) -> None:
        sample = Sample(memory(), counts(holdings()))
        self._samples.append(sample)
        sizes = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in sample.memory.items())
        held = ", ".join(f"{count} {kind}" for kind, count in sample.held.items())
        print(f"{time.monotonic() - self._began:7.1f} s  {name}: {sizes}; {held}", flush=True)

    def _memory_stays(self) -> None:
        """By medians: single values differ by 2 %, by what the allocator happens to keep."""
        for name in self._samples[0].memory:
            first, last = (median(sample.memory[name] for sample in third) for third in self._thirds())
            grown = last / first - 1
            self.result[name] = (
                f"{first / 2**20:.1f} MiB in the first third, {last / 2**20:.1f} in the last, {grown:+.2%}"
            )
            if grown > MOST:
                self.problems.append(f"{name}: {self.result[name]}")

    def _counts_stay(self) -> None:
        """By the smallest values: a save has a thread and files of its own while it lasts."""
        for kind in self._samples[0].held:
            first, last = (min(sample.held[kind] for sample in third) for third in self._thirds())
            self.result[kind] = f"{first} in the first third, {last} in the last"
            if last > first:
                self.problems.append(f"{kind}: {self.result[kind]}")

    def _thirds(self) -> tuple[Sequence[Sample], Sequence[Sample]]:
        third = len(self._samples) // 3
        return self._samples[:third], self._samples[-third:]

    def _nothing_left(self, before: Holdings) -> None:
        after = holdings()
        self.result["after warm-up"], self.result["after the end"] = counts(before), counts(after)
        self.problems += [f"{kind} left: {names}" for kind, names in added(before, after).items() if names]


def memory() -> dict[str, int]:
    """Bytes of anonymous pages of the process, all that it has in memory, and what the GPU has in use."""
    anonymous, files = anonymous_and_files()
    sizes = {"anonymous": anonymous, "RSS": anonymous + files}
    if torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        sizes["GPU"] = total - free
    return sizes


def recorded(run: RunDir, config: Config, pauses: int, result: dict[str, Any]) -> Iterator[str]:
    """What is wrong with the records and the last checkpoint of a run that was stopped. `result` gets the counts."""
    found = [*events.read(run.events_path)]
    last = verify_checkpoint(run.checkpoints()[-1])["step"]
    number = Counter(type(event).__name__ for event in found)
    result["records"], result["last step"] = dict(number), last
    logging, validating, saving = config.log.logging_steps, config.train.eval_steps, config.save.save_steps
    for kind, every, also in (
        (events.Step, logging, set()),
        (events.Evaluation, validating, set()),
        (events.CheckpointSaved, saving, {last}),  # the stop saves, too
    ):
        steps = [event.step for event in found if isinstance(event, kind)]
        if steps != sorted({*range(every, last + 1, every), *also}):
            yield f"the steps of {kind.__name__} are not every {every}th up to {last}: {steps[-9:]}"
    losses = [event.loss for event in found if isinstance(event, events.Step)]
    losses += [event.score for event in found if isinstance(event, events.Evaluation)]
    if not all(loss is not None and math.isfinite(loss) for loss in losses):
        yield "a loss is missing or not finite"
    if not number["Paused"] == number["Continued"] == pauses:
        yield f"{pauses} pauses were asked for: {number['Paused']} records of a pause, {number['Continued']} of its end"
    if not isinstance(found[-1], events.Stopped):
        yield f"the last record is {found[-1]}"
    if wrong := [
        event.sentence() for event in found if event.severity != "info" and not isinstance(event, events.Step)
    ]:
        yield f"warnings were recorded: {wrong}"


def small(run: RunDir, kept: int) -> Iterator[str]:
    """Which of the run's files take more than they may."""
    lines = run.events_path.read_bytes().count(b"\n")
    checkpoints = list(run.checkpoints_path.iterdir())
    sizes = [sum(file.stat().st_size for file in path.rglob("*")) for path in checkpoints]
    for name, size, limit in [
        ("events.jsonl", run.events_path.stat().st_size, RECORD * lines),
        *((file.name, file.stat().st_size, MAX_BYTES + 8 * RECORD) for file in run.path.glob("lanes*.jsonl")),
        ("checkpoints", len(checkpoints), kept),
        ("the largest checkpoint", max(sizes), min(sizes) * 1.01),
    ]:
        print(f"{name}: {size:,}, at most {limit:,.0f}")
        if size > limit:
            yield f"{name}: {size:,}, more than {limit:,.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--one", action="store_true", help="one run instead of many")
    parser.add_argument("--devices", default="cpu:2", help="as engine.devices")
    parser.add_argument("--pause", type=float, default=2.0, metavar="MINUTES", help="between two pauses of one run")
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        runs, temporary = Path(name) / "runs", Path(name) / "tmp"
        temporary.mkdir()
        tempfile.tempdir = os.environ["TMPDIR"] = str(temporary)
        soak = Soak(runs, given.devices)
        if given.one:
            soak.long_run(given.seconds, given.pause * 60)
        else:
            soak.short_runs(given.seconds)
    settings = {"seconds": given.seconds, "one": given.one, "devices": given.devices, "pause_minutes": given.pause}
    result = {"commit": commit(), **settings, **soak.result, "problems": soak.problems}
    print(json.dumps(result, indent=1))
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    return int(bool(soak.problems))


if __name__ == "__main__":
    sys.exit(main())
