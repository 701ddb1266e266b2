"""Whether memory grows: the bundled example again and again in one process, with saves.

python -m tests.soak 180    # seconds; a line a run, and exit code 1 where memory grew by more than 1 %
"""

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import psutil

from rptrain.config_source import resolve
from rptrain.trainer import train

CONFIG = Path(__file__).resolve().parent.parent / "rptrain.toml"
STEPS, EVERY = 100, 10  # of a run, and between two saves
WARM = 3  # runs after which memory is to stay as it is
MOST = 0.01


def run(folder: str) -> int:
    """Trains; the bytes that the process takes afterwards."""
    overrides = [f"train.max_steps={STEPS}", f"save.save_steps={EVERY}", "eval.questions=0", "save.resume=never"]
    train(resolve(CONFIG, [*overrides, "engine.devices=cpu:2", f"save.output_dir={folder}"]), quiet=True)
    return psutil.Process().memory_info().rss


def main(seconds: float) -> int:
    began, taken = time.monotonic(), []
    while time.monotonic() - began < seconds or len(taken) < WARM + 2:
        with tempfile.TemporaryDirectory() as folder:
            taken.append(run(folder))
        print(f"{time.monotonic() - began:7.1f} s  run {len(taken)}: {taken[-1] / 2**20:.1f} MiB", flush=True)
    first, last = (median(part) for part in halves(taken[WARM:]))
    grown = last / first - 1
    print(f"{STEPS} steps with {STEPS // EVERY} saves a run: {grown:+.2%} from the first half of the runs to the last")
    return int(grown > MOST)


def halves(values: list[int]) -> tuple[list[int], list[int]]:
    """Single runs differ by 2 %, by what the allocator happens to keep."""
    middle = len(values) // 2
    return values[:middle], values[middle:]


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
