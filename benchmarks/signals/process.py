"""A process that trains, as /proc and its records show it from outside."""

import os
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from rptrain.runs.folder.event_log import is_finished
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records import events
from tests import run_tools as tools

STEPS = 200
SETTINGS = (
    f"train.max_steps={STEPS}",
    "save.save_steps=20",
    "data.val_size=0.3",
    "train.eval_steps=50",
    "eval.questions=8",
    "log.logging_steps=1",
)
LOOK = 0.002  # seconds between two looks
HANGS = 60.0  # seconds after the last signal until a process is killed
TICKS = os.sysconf("SC_CLK_TCK")


class End(NamedTuple):
    code: int  # negative: the signal that killed it
    time: float  # seconds since the start
    delay: float  # seconds in all that its main thread waited for a core


class Usual(NamedTuple):
    """What an undisturbed process takes, in seconds. Its run begins with the first record, and its closing with the
    last."""

    life: float
    run: float
    closing: float
    step: float  # with a validation
    save: float


class Trainer:
    """A process that trains in a folder. Its run is `run`."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDir(folder / "runs" / "run")
        self.output = folder / "output"
        tools.write_config(folder)
        line = [sys.executable, "-P", "-m", "rptrain", "--config", str(folder / "run.toml"), *SETTINGS]
        environment = os.environ | {"OMP_NUM_THREADS": "2"}
        with open(self.output, "wb") as output:
            self._began = time.time()
            self._process = subprocess.Popen(line, stdout=output, stderr=output, env=environment)
        self._status = Path(f"/proc/{self._process.pid}/status")

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.time() - self._began

    def since(self, unix_time: float) -> float:
        """Seconds from the start to a time."""
        return unix_time - self._began

    def wait_until(self, seconds: float) -> None:
        """Wait for that time since the start."""
        time.sleep(max(0.0, seconds - self.seconds))

    def wait_for_run(self) -> None:
        """Wait for the first record of the run, or the end of the process."""
        while self.alive and not (self.run.events_path.is_file() and self.run.events_path.stat().st_size):
            time.sleep(LOOK)

    def wait_for_end_of_run(self) -> None:
        """Wait for the last record of a complete run, or the end of the process."""
        while self.alive and not (self.run.events_path.is_file() and is_finished(self.run.events_path)):
            time.sleep(LOOK)

    @property
    def alive(self) -> bool:
        return self._field("State").startswith(("R", "S", "D"))

    @property
    def handles(self) -> bool:
        """Whether its handlers of signals are installed."""
        return bool(self._signals("SigCgt") >> (signal.SIGTERM - 1) & 1)

    @property
    def phase(self) -> str:
        """What it does, by its records and files."""
        if not self.handles:
            return "after the end" if self.run.finished else "before main"
        if not self.run.events_path.is_file():
            return "imports"
        last = [event for event in events.read(self.run.events_path) if not isinstance(event, events.Sample)][-1:]
        match last:
            case [events.Finished()]:
                return "closing"
            case [events.Evaluation(name="exact_match") as scored] if scored.step:
                return "export"
            case [events.CheckpointSaved(step=step)] if step == STEPS:
                return "questions"
            case [events.Step() | events.CheckpointSaved()] | [events.Evaluation(name=events.VALIDATION_LOSS)]:
                return "saving" if any(self.run.checkpoints_path.glob(".*")) else "training"
        return "loading"

    def send(self, number: signal.Signals) -> bool:
        """Send a signal once the ones before are delivered; False if the process has ended."""
        while self._signals("ShdPnd") & ~self._signals("SigBlk") and self.alive:
            time.sleep(LOOK)
        if not self.alive:
            return False
        self._process.send_signal(number)
        return True

    @property
    def delay(self) -> float:
        """Seconds that its main thread has waited for a core."""
        return int(self._status.with_name("schedstat").read_text().split()[1]) / 1e9

    def wait(self) -> End:
        """Wait for its end; kill it if it hangs."""
        killer = threading.Timer(HANGS, self._process.kill)
        killer.start()
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        ended, delay = self.seconds, self.delay
        killer.cancel()
        return End(self._process.wait(), ended, delay)

    def _signals(self, name: str) -> int:
        return int(self._field(name) or "0", 16)

    def _field(self, name: str) -> str:
        fields = dict(line.split(":\t", 1) for line in self._status.read_text().splitlines() if ":\t" in line)
        return fields.get(name, "")


def usual(folder: Path) -> Usual:
    """Of one undisturbed process in a folder."""
    trainer = Trainer(folder)
    end = trainer.wait()
    if end.code != 0:
        raise SystemExit(f"an undisturbed run ended with {end.code}: {trainer.output.read_text()}")
    found = [*events.read(trainer.run.events_path)]
    times = [event.time for event in found if isinstance(event, events.Step)]
    steps = [later - earlier for earlier, later in pairwise(times)]
    saves = [event.seconds or 0.0 for event in found if isinstance(event, events.CheckpointSaved)]
    first, last = (trainer.since(found[place].time) for place in (0, -1))
    return Usual(end.time, last - first, end.time - last, max(steps), max(saves))
