"""The cost of watching a run: `python -m benchmarks.watching` prints the share of a core that the interface takes.

A real run of the bundled example on two workers, and the real interface that follows it in a terminal of 120 × 36.
"""

import argparse
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from rptrain.runs.view import RunView

CONFIG = Path(__file__).parents[1] / "rptrain.toml"
COLUMNS, ROWS = 120, 36
SETTLED = 10.0  # seconds after which the interface has read all that there was


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--profile", type=Path, help="py-spy's record of the interface goes to this file, as text")
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        run = Path(folder) / "runs" / "tiny-tasks"
        command = [sys.executable, "-P", "-m", "rptrain", "--config", str(CONFIG), "engine.devices=cpu:2"]
        command += ["train.max_steps=1000000", f"save.output_dir={run.parent}"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as trainer:
            try:
                until_it_trains(run, trainer)
                watch(run, given.seconds, given.profile)
            finally:
                trainer.kill()


def until_it_trains(run: Path, trainer: subprocess.Popen[bytes]) -> None:
    view = RunView(run)
    while view.step < 40:
        assert trainer.poll() is None, "the trainer ended"
        time.sleep(0.5)
        view.refresh()


def watch(run: Path, seconds: float, profile: Path | None) -> None:
    """Prints what the interface takes for `seconds`, and how much it writes to its terminal."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(TERM="xterm-256color", COLORTERM="truecolor", XDG_CONFIG_HOME=str(run))
        os.execv(sys.executable, [sys.executable, "-P", "-m", "rptrain", "attach", str(run)])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    written: list[int] = []
    threading.Thread(target=_drain, args=(terminal, written), daemon=True).start()
    try:
        time.sleep(SETTLED)
        process = psutil.Process(child)
        with process.oneshot():
            before, began = process.cpu_times(), time.monotonic()
        had = sum(written)
        if profile is not None:
            spy = ["py-spy", "record", "-p", str(child), "-d", str(int(seconds)), "-r", "200", "-f", "raw", "-o"]
            subprocess.run([*spy, str(profile)], check=True)
        else:
            time.sleep(seconds)
        after, took = process.cpu_times(), time.monotonic() - began
        user, system = ((after.user - before.user) / took, (after.system - before.system) / took)
        said = (sum(written) - had) / took
        print(
            f"{user + system:.2%} of a core ({user:.2%} user, {system:.2%} system) over {took:.0f} s, "
            f"{said / 1024:.1f} KiB/s to the terminal, {process.memory_info().rss / 2**20:.0f} MiB"
        )
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def _drain(terminal: int, written: list[int]) -> None:
    while True:
        try:
            written.append(len(os.read(terminal, 65536)))
        except OSError:
            return


if __name__ == "__main__":
    main()
