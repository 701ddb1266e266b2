"""Whether memory or files grow: the bundled example in one process, again and again or once and for long.

python -m benchmarks.soak 180          # seconds; runs of 100 steps, a line for each
python -m benchmarks.soak --one 3600   # one run with the saves that rptrain.toml has, a line for each sample
Exit code 1 where memory grew by more than 1 % from the first third to the last, or files are beyond their limits.
"""

import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

from rptrain.config.resolve import resolve
from rptrain.runs.control import STOP, ask
from rptrain.runs.run_dir import RunDir
from rptrain.train.telemetry import MAX_BYTES
from rptrain.train.trainer import train
from tests.own_memory import anonymous_and_files

CONFIG = Path(__file__).resolve().parent.parent / "rptrain.toml"
ALWAYS = ("eval.questions=0", "save.resume=never", "engine.devices=cpu:2")
STEPS, EVERY = 100, 10  # of a short run, and between two saves
WARM = 3  # short runs after which memory is to stay as it is
SAMPLES = 90  # of a long run, behind a tenth of its time
RECORD = 512  # bytes, more than a record of events.jsonl has
MOST = 0.01
NAMES = ("anonymous", "RSS")


def main(seconds: float, *, one: bool) -> int:
    with tempfile.TemporaryDirectory() as folder:
        fine = long_run(Path(folder), seconds) if one else short_runs(Path(folder), seconds)
    return int(not fine)


def short_runs(folder: Path, seconds: float) -> bool:
    began, taken = time.monotonic(), []
    overrides = [f"train.max_steps={STEPS}", f"save.save_steps={EVERY}", f"save.output_dir={folder}"]
    config = resolve(CONFIG, [*ALWAYS, *overrides])
    while time.monotonic() - began < seconds or len(taken) < WARM + 3:
        shutil.rmtree(train(config, quiet=True).path)
        taken.append(memory())
        show(began, f"run {len(taken)}", taken[-1])
    return stays(taken[WARM:])


def long_run(folder: Path, seconds: float) -> bool:
    """Trains, and asks the run to stop after some seconds."""
    config = resolve(CONFIG, [*ALWAYS, "train.max_steps=100000000", f"save.output_dir={folder}"])
    run, taken, began = RunDir(folder / config.config.log.run_name), [], time.monotonic()

    def look() -> None:
        time.sleep(seconds / 10)
        for number in range(SAMPLES):
            taken.append(memory())
            show(began, f"sample {number + 1}", taken[-1])
            time.sleep(max(0.0, began + seconds * (0.1 + 0.9 * (number + 1) / SAMPLES) - time.monotonic()))
        ask(run.path, STOP)

    looker = threading.Thread(target=look, daemon=True)
    looker.start()
    train(config, quiet=True)
    looker.join()
    fine = stays(taken)
    return small(run, config.config.save.save_total_limit or 1) and fine


def memory() -> tuple[int, int]:
    """Bytes of anonymous pages of the process, and of all that it has in memory."""
    anonymous, files = anonymous_and_files()
    return anonymous, anonymous + files


def show(began: float, what: str, taken: tuple[int, int]) -> None:
    sizes = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in zip(NAMES, taken, strict=True))
    print(f"{time.monotonic() - began:7.1f} s  {what}: {sizes}", flush=True)


def stays(taken: list[tuple[int, int]]) -> bool:
    """By medians: single values differ by 2 %, by what the allocator happens to keep."""
    fine = True
    for name, values in zip(NAMES, zip(*taken, strict=True), strict=True):
        third = len(values) // 3
        first, last = median(values[:third]), median(values[-third:])
        grown = last / first - 1
        fine &= grown <= MOST
        print(f"{name}: {first / 2**20:.1f} MiB in the first third, {last / 2**20:.1f} in the last, {grown:+.2%}")
    return fine


def small(run: RunDir, kept: int) -> bool:
    """The run's files against what they may take."""
    events = run.events_path.read_bytes()
    checkpoints = list(run.checkpoints_path.iterdir())
    sizes = [sum(file.stat().st_size for file in path.rglob("*")) for path in checkpoints]
    found = [
        ("events.jsonl", len(events), RECORD * events.count(b"\n")),
        *((file.name, file.stat().st_size, MAX_BYTES + 8 * RECORD) for file in run.path.glob("lanes*.jsonl")),
        ("checkpoints", len(checkpoints), kept),
        ("the largest checkpoint", max(sizes), min(sizes) * 1.01),
    ]
    for name, size, limit in found:
        print(f"{name}: {size:,}, at most {limit:,.0f}" + ("" if size <= limit else ": too much"))
    return all(size <= limit for _, size, limit in found)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[-1]), one="--one" in sys.argv))
