"""SIGKILLs at random times of a run, half of them in a save, and what a resumed run ends with."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch

from rptrain import cli
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records import events
from rptrain.utils.replacing import PARTIAL
from tests import run_tools as tools

MODEL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6}
SETTINGS = (
    "train.max_steps=12",
    "save.save_steps=2",
    "save.save_total_limit=2",
    "data.val_size=0.3",
    "train.eval_steps=3",
    "optim.lr_scheduler_type=linear",
    "log.logging_steps=1",
)
LOOK = 0.0005  # seconds between two looks for a save
DRAWS = 50  # most draws of a time in a save, which may end earlier


@dataclass(frozen=True)
class Kill:
    in_save: bool  # whether a checkpoint was being written
    seconds: float  # since the start of the process
    step: int  # the last recorded one; 0: none
    resumed_from: int  # the step of the last checkpoint; 0: begun anew
    problems: tuple[str, ...]


class Forked:
    """The command line in a fork of this process, which must have no threads."""

    def __init__(self, folder: Path) -> None:
        arguments = ["--config", str(folder / "run.toml"), *SETTINGS]
        sys.stdout.flush()
        self._began = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                for stream in (1, 2):
                    os.dup2(os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream)
                sys.argv = ["rptrain", *arguments]
                cli.main()
            except SystemExit as ended:
                code = int(ended.code or 0)
            finally:
                os._exit(code)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def alive(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def kill(self) -> int:
        os.kill(self.pid, signal.SIGKILL)
        return self.wait()

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def killed(folder: Path, count: int, random: Random) -> Iterator[Kill]:
    """Every second one is in a save."""
    torch.set_num_threads(1)  # no thread pool before a fork
    tools.write_model(folder / "model", **MODEL)
    tools.write_config(folder)
    lives = []
    for _ in range(3):
        shutil.rmtree(folder / "runs", ignore_errors=True)
        process = Forked(folder)
        code = process.wait()
        assert code == 0, (folder / "output").read_text()
        lives.append(process.seconds)
    whole = RunDir(folder / "runs" / "run")
    expected, losses = tools.state(whole), tools.steps(whole)
    saves = [event.seconds or 0.0 for event in tools.events(whole, events.CheckpointSaved)]
    life, save = median(lives), median(saves)
    print(f"undisturbed: {life:.2f} s, {len(saves)} saves of {save:.3f} s", flush=True)
    for number in range(count):
        for _ in range(DRAWS):
            shutil.rmtree(folder / "runs")
            (folder / "output").unlink()
            if (found := _kill(folder, random, number % 2 == 1, life, save, len(saves))) is not None:
                break
        else:
            raise SystemExit(f"{DRAWS} processes or saves ended before they were killed")
        in_save, seconds = found
        run = RunDir(folder / "runs" / "run")
        step = max(tools.steps(run), default=0) if run.events_path.is_file() else 0
        resumed_from = run.saved_step if run.checkpoints_path.is_dir() else 0
        code = Forked(folder).wait()
        yield Kill(in_save, round(seconds, 3), step, resumed_from, tuple(differences(folder, code, expected, losses)))


def _kill(
    folder: Path, random: Random, in_save: bool, life: float, save: float, saves: int
) -> tuple[bool, float] | None:
    """Whether the kill was in a save, and when it was; None if the process or the save had ended."""
    process, checkpoints = Forked(folder), folder / "runs" / "run" / "checkpoints"
    if in_save:
        left, before = random.randint(1, saves), False
        while left and process.alive:
            now = _saves(checkpoints)
            left -= now and not before
            before = now
            time.sleep(LOOK)
        time.sleep(random.uniform(0, save))
    else:
        time.sleep(random.uniform(0, life))
    seconds = process.seconds
    if process.kill() != -signal.SIGKILL:
        return None
    saving = _saves(checkpoints)
    return None if in_save and not saving else (saving, seconds)


def summary(kills: list[Kill]) -> dict[str, Any]:
    return {
        "kills": len(kills),
        "with problems": sum(bool(kill.problems) for kill in kills),
        "in a save": sum(kill.in_save for kill in kills),
        "resumed from a checkpoint": sum(kill.resumed_from > 0 for kill in kills),
    }


def _saves(checkpoints: Path) -> bool:
    return any(checkpoints.glob(f"*{PARTIAL}"))


def differences(folder: Path, code: int, expected: dict[str, bytes], losses: object) -> Iterator[str]:
    """What differs from an undisturbed run after the process that resumed it has ended with this code."""
    if code != 0:
        yield f"the second process ended with {code}"
    finished = [run for run in map(RunDir, (folder / "runs").iterdir()) if run.finished]
    if not finished:
        yield "no run is finished"
    for run in finished:
        if tools.state(run) != expected:
            yield f"the weights or the optimizer state of {run.path.name} differ"
        if tools.steps(run) != losses:
            yield f"the losses of {run.path.name} differ"
        if _saves(run.checkpoints_path):
            yield f"{run.path.name} has an incomplete checkpoint"
