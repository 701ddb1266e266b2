"""Whether a run that is killed and resumed ends with the bits of an undisturbed one, for any config.

python -m benchmarks.kill_and_resume --kills 3 --config rptrain.toml [key=value…]   # exit code 1 where bits differ
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from random import Random
from signal import SIGKILL

from benchmarks.commit import commit
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records import events
from rptrain.utils.files import file_sha256, open_regular


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--config", required=True)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-P", "-m", "rptrain", "--config", arguments.config, *arguments.overrides]
        command += [f"save.output_dir={folder}", "log.logging_steps=1"]
        whole, killed = (RunDir(Path(folder) / name) for name in ("whole", "killed"))
        seconds, _ = train([*command, "log.run_name=whole"], whole, [])
        steps = sorted(losses(whole))
        after = sorted(Random(0).sample(steps[1:-1], arguments.kills))
        _, kills = train([*command, "log.run_name=killed"], killed, after)
        result = {
            "commit": commit(),
            "config": [arguments.config, *arguments.overrides],
            "steps": len(steps),
            "seconds": round(seconds, 1),
            "kills": kills,
            "files": sorted(digests(whole)),
            "same_losses": losses(whole) == losses(killed),
            "same_files": digests(whole) == digests(killed) != {},
        }
    print(json.dumps(result, indent=1))
    return int(not (result["same_losses"] and result["same_files"]))


def train(command: list[str], run: RunDir, after: list[int]) -> tuple[float, list[dict[str, int]]]:
    """A run that is killed once after each of some steps; the time of its last process, and where each kill was."""
    kills = []
    for step in after:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while process.poll() is None and step not in losses(run):
            time.sleep(0.02)
        process.kill()
        check(process, -SIGKILL)
        kills.append({"after_step": max(losses(run)), "resumes_from": run.saved_step})
    began = time.monotonic()
    check(subprocess.Popen(command, stdout=subprocess.DEVNULL), 0)
    return time.monotonic() - began, kills


def check(process: subprocess.Popen[bytes], expected: int) -> None:
    if process.wait() != expected:
        raise SystemExit(f"{process.args}: exit code {process.returncode}, not {expected}")


def losses(run: RunDir) -> dict[int, set[float | None]]:
    """All that the records say of each step: a step after the last save is computed again."""
    found = defaultdict(set)
    if run.events_path.exists():
        for event in events.read(run.events_path):
            if isinstance(event, events.Step):
                found[event.step].add(event.loss)
    return dict(found)


def digests(run: RunDir) -> dict[str, str]:
    found = {}
    for path in sorted(run.model_path.glob("*.safetensors")):
        with open_regular(path) as file:
            found[path.name] = file_sha256(file)
    return found


if __name__ == "__main__":
    sys.exit(main())
