"""Whole runs of tiny models: their files and configs, runs that are killed, and what a run's folder holds afterwards.

As a program it trains, in a fork for each line of its input, and so imports torch once: see `Trainers`.
"""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from inspect import getsource
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import rptrain.train.replan
import rptrain.train.save
import rptrain.train.trainer
from rptrain.checkpoint.atomic_dir import KIND, STATE, written_aside
from rptrain.cli import argv
from rptrain.cli.commands import app
from rptrain.config.resolve import Resolved, resolve
from rptrain.engine.engine import Engine
from rptrain.engine.footprint import footprint
from rptrain.engine.meter import Measured
from rptrain.engine.recorder import Observers
from rptrain.inference.free_memory import free_memory
from rptrain.inference.generate import Request, generate_text
from rptrain.models.families import registry
from rptrain.models.locate import PRESETS
from rptrain.models.spec import ModelShape
from rptrain.models.weights import pretrained
from rptrain.planner import memory
from rptrain.planner.choose import RunPlan
from rptrain.runs.folder.event_log import EventLog
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records import events as metrics
from rptrain.schedule.plan import Plan
from rptrain.train.job import Job
from rptrain.train.run import train
from rptrain.train.trainer import Trainer

PRESET = PRESETS / "tiny-tasks"
SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "initializer_range": 0.2,
}
CONFIG = """\
[model]
path = "{folder}/model"
dtype = "float32"
[[data.train]]
path = "builtin:random"
[data]
max_length = 16
[train]
micro_batch_size = 16
global_batch_size = 64
max_steps = 6
[optim]
learning_rate = 1e-2
warmup_steps = 2
weight_decay = 0.1
[engine]
devices = "cpu:2"
[save]
output_dir = "{folder}/runs"
[log]
run_name = "run"
"""

PATIENCE = 120  # seconds until a test gives up waiting, on a machine that may be busy
STAGES = "F0-0 F1-2 FB3-3 B1-2 B0-0"  # of the models written here

GLM = {  # changes for a model whose checkpoints may have layers behind the last one
    "model_type": "glm4_moe",
    "architectures": ["Glm4MoeForCausalLM"],
    "tie_word_embeddings": False,
    "num_hidden_layers": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
}


def write_model(folder: Path, **changes: Any) -> Path:
    """A model with random weights, and with the tokenizer and the chat template of the bundled preset."""
    config = json.loads((PRESET / "config.json").read_text()) | SMALL | changes
    spec = registry.build(config)
    shutil.copytree(PRESET, folder)
    params = [unit.views(torch.zeros(unit.numel)) for unit in spec.units]
    pretrained.initialize(spec, lambda unit, name: params[unit][name], seed=0)
    pretrained.save(folder, spec, lambda unit, name: params[unit][name], torch.float32)
    return folder


def write_config(folder: Path, *overrides: str) -> Resolved:
    """The config above for a folder with a `model` in it."""
    file = folder / "run.toml"
    file.write_text(CONFIG.format(folder=folder), encoding="utf-8")
    return resolve(file, overrides)


def train_here(folder: Path, *overrides: str) -> RunDir:
    return train(write_config(folder, *overrides), quiet=True)


def command(*arguments: str | Path, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """The command line as a process of its own, with text pipes. `environment`: what it has besides that of tests."""
    line = [sys.executable, "-P", "-m", "rptrain", *map(str, arguments)]
    own = os.environ | {"OMP_NUM_THREADS": "2"} | (environment or {})  # 2: torch's own default, unlike in other tests
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=own)


def invoke(*arguments: str | Path) -> Result:
    """The command line in this process."""
    return CliRunner().invoke(app, argv.arguments([str(argument) for argument in arguments]))


def generated(source: Path, prompts: list[str], most: int, temperature: float, seed: int, raw: bool) -> list[str]:
    """Answers of at most `most` tokens, wherever they are fastest here."""
    return generate_text(Request(source, prompts, most, temperature, seed, raw), free_memory())


def wait_for(condition: Callable[[], bool]) -> None:
    """Waits for a state. The deadline only ends a hang, and the message quotes the condition."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"not within {PATIENCE} seconds: {getsource(condition).strip()}"
        time.sleep(0.005)


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file of this process may grow beyond `size` bytes meanwhile: a write up to there is cut short, as by a disk
    that is full.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def probed(probe: Callable[[str], None]) -> Callable[..., Engine]:
    """Opens engines that call the probe."""

    def opened(*given: Any, observers: Observers, **named: Any) -> Engine:
        return Engine(*given, observers=replace(observers, probe=probe), **named)

    return opened


# Plans that are given


def with_stages(made: RunPlan, spec: ModelShape, text: str) -> RunPlan:
    """The plan with other stages, and what they need on the devices; its other sizes stay as they were."""
    plan = replace(made.plan, stages=Plan.parse(f"{text} | N=1 M=1 MR=1").stages)
    return replace(made, plan=plan, device=footprint(spec, plan.stages, made.layout, plan.width))


def plan_with(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Whatever is planned from now on has these stages."""
    make = memory.make_plan

    def made(spec: ModelShape, *sizes: Any, **limits: Any) -> RunPlan:
        return with_stages(make(spec, *sizes, **limits), spec, text)

    monkeypatch.setattr(memory, "make_plan", made)


def replan_with(monkeypatch: pytest.MonkeyPatch, text: str) -> list[Measured]:
    """Measured times give these stages, whatever they are and however short the run is, and estimates give one stage.
    Two steps of each plan are compared. Returns the times that were planned with.
    """
    calls: list[Measured] = []

    def replan(job: Job, measured: Measured) -> RunPlan:
        calls.append(measured)
        return with_stages(job.plan, job.spec, text)

    plan_with(monkeypatch, "FB0-3")
    monkeypatch.setattr(rptrain.train.replan, "replan", replan)
    monkeypatch.setattr(rptrain.train.trainer, "COMPARED", 2)
    monkeypatch.setattr(rptrain.train.trainer, "is_worthwhile", lambda job, steps: True)
    return calls


# What a run left


def write_checkpoint(path: Path) -> None:
    """A whole checkpoint of no units."""
    with written_aside(path, {"kind": KIND}, 0) as aside:
        aside.write_json(STATE, {"step": int(path.name.split("-")[1]), "meta": {}, "units": {}})


def state(run: RunDir) -> dict[str, bytes]:
    """The files with the last checkpoint's tensors and the exported weights: every bit of the outcome."""
    files = [*run.checkpoints()[-1].glob("units/*"), *run.model_path.glob("*.safetensors")]
    return {file.name: file.read_bytes() for file in files}


def steps(run: RunDir) -> dict[int, tuple[float | None, float | None, float]]:
    """Loss, gradient norm and learning rate of each step; what a resumed run did again counts once."""
    found: dict[int, tuple[float | None, float | None, float]] = {}
    for event in metrics.read(run.events_path):
        if isinstance(event, metrics.Resumed):
            found = {step: values for step, values in found.items() if step <= event.step}
        elif isinstance(event, metrics.Step):
            found[event.step] = (event.loss, event.grad_norm, event.learning_rate)
    return found


def events(run: RunDir, kind: type[metrics.Event]) -> list[Any]:
    return [event for event in metrics.read(run.events_path) if isinstance(event, kind)]


# Runs that kill themselves


class Trainers:
    """Trains in child processes of a process that has done nothing but import. Context manager."""

    def __enter__(self) -> "Trainers":
        self._server = subprocess.Popen(
            [sys.executable, "-P", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.communicate()

    def train(
        self,
        folder: Path,
        *overrides: str,
        event: int | None = None,
        save: tuple[int, int] | None = None,
        seconds: float | None = None,
        replan: str | None = None,
    ) -> int:
        """The exit code, negative for a signal. The child kills itself in the middle of the record of step `event`,
        or before call `save[1]` that syncs, renames or deletes a file once the save of step `save[0]` has begun, or
        so many seconds after its first record, `run_started`. `replan`: the stages that measured times give.
        """
        assert self._server.stdin is not None and self._server.stdout is not None
        write_config(folder)
        order = {"file": str(folder / "run.toml"), "overrides": overrides}
        order |= {"event": event, "save": save, "seconds": seconds, "replan": replan}
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_in_record(step: int) -> None:
    """Every save is waited for, so that which one is the last does not depend on luck."""
    write = EventLog.write
    rptrain.train.save.Saver.poll = rptrain.train.save.Saver.wait

    def cut_short(log: EventLog, event: metrics.Event) -> None:
        if isinstance(event, metrics.Step) and event.step == step:
            os.write(log._file._file.fileno(), metrics.to_line(event).encode()[:40])
            _die()
        write(log, event)

    EventLog.write = cut_short


def _die_in_save(step: int, call: int) -> None:
    save, left = rptrain.train.save.save_state, [call]

    def armed(*arguments: Any, **named: Any) -> Path:
        if named["step"] == step:
            for name in ("fsync", "rename", "unlink", "rmdir"):
                setattr(os, name, counted(getattr(os, name)))
        return save(*arguments, **named)

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                _die()
            return function(*arguments, **named)

        return call

    rptrain.train.save.save_state = armed


def _die_after(seconds: float) -> None:
    run = Trainer.run
    timer = threading.Timer(seconds, _die)
    timer.daemon = True

    def timed(trainer: Trainer, checkpoint: Path | None) -> None:
        timer.start()
        run(trainer, checkpoint)

    Trainer.run = timed


def _train(
    file: str,
    overrides: Sequence[str],
    event: int | None,
    save: Sequence[int] | None,
    seconds: float | None,
    replan: str | None,
) -> None:
    if replan is not None:
        replan_with(pytest.MonkeyPatch(), replan)
    if seconds is not None:
        _die_after(seconds)
    if event is not None:
        _die_in_record(event)
    if save is not None:
        _die_in_save(*save)
    train(resolve(file, overrides), quiet=True)


def _serve() -> None:
    torch.set_num_threads(1)  # no thread pool before a fork
    for module in ("numpy.random", "peft", "rich.progress"):  # else imported by each child
        import_module(module)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _train(**json.loads(line))
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


CHATS = [[("user", "Spell backwards: " + word), ("assistant", word[::-1])] for word in ("a", "bc", "def", "ghij")] + [
    [
        ("system", "Write."),
        ("user", "ab" * size),
        ("assistant", "cd" * size),
        ("user", "?"),
        ("assistant", "e"),
    ]
    for size in range(1, 9)
]


def write_chats(file: Path) -> str:
    rows = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in CHATS]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return f"data.train.0.path={file}"


if __name__ == "__main__":
    _serve()
