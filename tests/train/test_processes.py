"""Runs of several processes, as torchrun starts them: they train to the bits of one, stop and resume together."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

from rptrain.checkpoint.atomic_dir import complete_checkpoints
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.folder.run_log import FILE
from rptrain.runs.records import events

from .. import run_tools as tools
from ..commands import Command, Commands

Start = Callable[..., "Command | subprocess.Popen[str]"]
REPLICAS = ("engine.replicas=4", "engine.round_size=1", "engine.devices=cpu:4", "engine.replan=false")
ANSWERS = ("data.val_size=0.2", "train.eval_on_start=true", "log.sample_prompts=['a']")


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with Commands(tmp_path_factory.mktemp("commands")) as server:
        yield server


class Torchrun:
    """What torchrun does: a store, and processes that it starts again."""

    def __init__(self, folder: Path, commands: Commands) -> None:
        self._folder, self._commands = folder, commands
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    @contextmanager
    def processes(
        self,
        count: int,
        *overrides: str,
        own: Mapping[int, Sequence[str]] | None = None,
        environment: Mapping[str, str | int] | None = None,
        start: Start | None = None,
    ) -> Iterator[list[Command | subprocess.Popen[str]]]:
        """`own`: what single processes are given besides. `start`: None for forks."""
        launch = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1"}
        launch |= {"MASTER_PORT": self._store.port, "TORCHELASTIC_RUN_ID": "test", "OMP_NUM_THREADS": 1}
        launch |= {"TORCHELASTIC_USE_AGENT_STORE": True}
        started: list[Command | subprocess.Popen[str]] = []
        try:
            for rank in range(count):
                variables = launch | {"RANK": rank, "LOCAL_RANK": rank} | (environment or {})
                given = ("--config", self._folder / "run.toml", *REPLICAS, *overrides, *(own or {}).get(rank, ()))
                text = {key: str(each) for key, each in variables.items()}
                started.append((start or self._commands.start)(*given, environment=text))
            yield started
        finally:
            for process in started:
                process.kill()
                process.communicate()

    def run(self, count: int, *overrides: str) -> list[tuple[int, str, str]]:
        """The exit code, the output and the errors of each process."""
        with self.processes(count, *overrides) as started:
            return ended(started)


def ended(processes: Sequence[Command | subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    found = [process.communicate() for process in processes]
    return [(process.returncode, *output) for process, output in zip(processes, found, strict=True)]


@pytest.fixture
def torchrun(folder: Path, commands: Commands) -> Torchrun:
    tools.write_config(folder)
    return Torchrun(folder, commands)


def codes(results: Sequence[tuple[int, str, str]]) -> list[int]:
    return [code for code, _, _ in results]


def steps(run: RunDir) -> list[events.Step]:
    return tools.events(run, events.Step)


def losses(run: RunDir) -> dict[int, tuple[float | None, float | None]]:
    """The loss and the norm of the gradients after each step, when it was last trained."""
    return {step.step: (step.loss, step.grad_norm) for step in steps(run)}


def weights(run: RunDir) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in run.model_path.glob("*.safetensors")}


def same(runs: Sequence[RunDir]) -> bool:
    return all((losses(run), weights(run)) == (losses(runs[0]), weights(runs[0])) for run in runs)


def reached(run: RunDir, step: int) -> None:
    """Waits until a run has recorded a step."""
    tools.wait_for(lambda: run.events_path.is_file() and any(each.step >= step for each in steps(run)))


@pytest.mark.long
def test_two_processes_train_to_the_bits_of_one(folder, torchrun):
    alone = tools.train_here(folder, *REPLICAS, "log.run_name=alone")
    results = torchrun.run(2)
    run = RunDir(folder / "runs/run")
    assert codes(results) == [0, 0], results
    assert same([alone, run]) and run.finished and len(losses(run)) == 6
    assert "step 6/6" in results[0][1] and results[1][1] == ""
    assert "peers  2 processes; process 0 on " in results[0][1] and "listens at 127.0.0.1 (" in results[0][1]
    other = run.of_process(1)
    (started,) = tools.events(other, events.ProcessStarted)
    assert started.processes == 2 and other.finished and (other.path / "lanes.jsonl").is_file()
    assert complete_checkpoints(other.checkpoints_path) == [] and not other.model_path.exists()


@pytest.mark.long
@pytest.mark.parametrize(
    "overrides",
    [
        ("optim.update=sync", "model.dtype=bfloat16"),
        ("train.method=lora", "lora.r=4", "model.dtype=bfloat16", "lora.base=nf4", *ANSWERS),
        ("optim.max_grad_norm=0.01", "data.val_size=0.2", "train.eval_steps=2", "save.load_best_model_at_end=true"),
    ],
    ids=["sync", "lora", "validation"],
)
def test_other_kinds_of_runs(folder, torchrun, overrides):
    """With validation data, the last step of an epoch has one micro-batch, and two processes have none of it. The first
    process answers the prompts.
    """
    overrides += ("save.save_steps=2",)
    alone = tools.train_here(folder, *REPLICAS, *overrides, "log.run_name=alone")
    assert codes(torchrun.run(3, *overrides)) == [0, 0, 0]
    run = RunDir(folder / "runs/run")
    assert same([alone, run]) and len(losses(run)) == 6
    scores = [[each.score for each in tools.events(one, events.Evaluation)] for one in (alone, run)]
    assert scores[0] == scores[1]
    answers = [[(each.step, each.text) for each in tools.events(one, events.Sample)] for one in (alone, run)]
    assert answers[0] == answers[1] and bool(answers[0]) == ("log.sample_prompts=['a']" in overrides)
    assert not (run.of_process(1).path / FILE).exists() and (run.path / FILE).is_file()


@pytest.mark.long
def test_any_number_of_processes_resumes(folder, torchrun):
    constant = "optim.lr_scheduler_type=constant_with_warmup"
    alone = tools.train_here(folder, *REPLICAS, constant, "log.run_name=alone")
    run, resume = RunDir(folder / "runs/run"), "save.resume=auto"
    for count, last in ((2, 2), (4, 3), (1, 5), (3, 6)):
        results = torchrun.run(count, constant, f"train.max_steps={last}", resume)
        assert codes(results) == [0] * count, results
        resume = f"save.resume={run.path}"
    assert same([alone, run]) and len(tools.events(run, events.Resumed)) == 3


@pytest.mark.long
@pytest.mark.parametrize(
    ("override", "reason"),
    [("save.resume=nowhere", "neither a run nor a checkpoint"), ('log.report_to=["wandb"]', "wandb is not installed")],
)
def test_what_the_first_process_refuses_ends_all_at_once(torchrun, override, reason):
    (first, _, told), (second, _, error) = torchrun.run(2, override)
    assert (first, second) == (2, 1) and reason in told, told + error
    assert "Traceback" not in error and re.match(r"process 0 on .* has failed: ", error) and reason in error


@pytest.mark.long
@pytest.mark.parametrize("how", ["STOP", "signal"])
def test_all_processes_save_and_stop_together(folder, torchrun, how):
    run = RunDir(folder / "runs/run")
    with torchrun.processes(2, "train.max_steps=100000") as started:
        reached(run, 3)
        if how == "STOP":
            (run.control_path / "STOP").touch()
        else:
            started[1].send_signal(signal.SIGTERM)
        results = ended(started)
    assert codes(results) == [0, 0 if how == "STOP" else 130], results
    stopped = [tools.events(one, events.Stopped)[0] for one in (run, run.of_process(1))]
    assert stopped[0].step == stopped[1].step == run.saved_step >= 3


@pytest.mark.long
def test_a_pause_holds_all_processes_and_a_save_succeeds_or_fails_in_all(folder, torchrun):
    run = RunDir(folder / "runs/run")
    with torchrun.processes(2, "train.max_steps=100000") as started:
        reached(run, 2)
        (run.control_path / "PAUSE").touch()
        tools.wait_for(lambda: all(tools.events(one, events.Paused) for one in (run, run.of_process(1))))
        paused = tools.events(run, events.Paused)[0].step
        obstacle = run.checkpoints_path / f".checkpoint-{paused}.rptrain-partial" / "mine"
        obstacle.parent.mkdir()
        obstacle.touch()
        (run.control_path / "SAVE").touch()
        tools.wait_for(lambda: all(tools.events(one, events.SaveFailed) for one in (run, run.of_process(1))))
        failed = [tools.events(one, events.SaveFailed)[0].message for one in (run, run.of_process(1))]
        assert "is in the way" in failed[0] and re.match(r"process 0 on .* has failed: .* is in the way", failed[1])
        shutil.rmtree(obstacle.parent)
        (run.control_path / "SAVE").touch()
        tools.wait_for(lambda: run.saved_step > 0 and not (run.control_path / "SAVE").exists())
        assert run.saved_step == paused == steps(run)[-1].step
        (run.control_path / "STOP").touch()
        assert codes(ended(started)) == [0, 0]


@pytest.mark.long
@pytest.mark.parametrize(("resume", "left"), [("auto", 2), ("never", 2), ("never", 1)])
def test_the_others_name_a_process_that_is_killed_and_those_that_are_left_resume(folder, torchrun, resume, left):
    alone = tools.train_here(folder, *REPLICAS, "log.run_name=alone", "train.max_steps=40")
    run = RunDir(folder / "runs/run")
    overrides = ("train.max_steps=40", "save.save_steps=3", f"save.resume={resume}")
    with torchrun.processes(3, *overrides) as started:
        tools.wait_for(lambda: run.saved_step > 0)
        started[1].kill()
        first, _, third = ended(started)
    for code, _, error in (first, third):
        assert code == 1 and "Traceback" not in error, error
        reason, resume = error.strip().splitlines()[-2:]
        assert reason.startswith("process 1 on ") and resume.endswith("starts again resume from it")
    assert codes(torchrun.run(left, *overrides)) == [0] * left
    assert same([alone, run]) and [path.name for path in (folder / "runs").iterdir()].count("run") == 1
    assert tools.events(run, events.Resumed) and not (folder / "runs/run-2").exists()


def hosted() -> dict[str, str | int]:
    """Without a store of torchrun. The port is outside the range from which systems choose."""
    return {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": 20_000 + os.getpid() % 10_000}


@pytest.mark.long
def test_without_a_store_of_torchrun_the_first_process_hosts_one(folder, torchrun):
    with torchrun.processes(2, environment=hosted(), start=tools.command) as started:
        assert codes(ended(started)) == [0, 0]
    assert RunDir(folder / "runs/run").finished


@pytest.mark.long
def test_a_store_that_is_lost_is_named_without_frames(folder, torchrun):
    with torchrun.processes(2, "train.max_steps=100000", environment=hosted(), start=tools.command) as started:
        reached(RunDir(folder / "runs/run"), 1)
        started[0].kill()
        (_, (code, _, error)) = ended(started)
    assert code == 1 and "frame #" not in error and re.search(r"process 0 on |where the processes meet", error), error


@pytest.mark.long
def test_a_config_that_differs_is_refused_by_all(folder, torchrun):
    with torchrun.processes(2, own={1: ("save.save_steps=2", "engine.devices=cpu:6")}) as started:
        (first, _, told), (second, _, error) = ended(started)
    assert (first, second) == (1, 2), told + error
    differs = "the config differs from that of process 0 on "
    assert differs in error and "save.save_steps was 0, is 2. Give all processes the same config" in error
    assert "engine.devices" not in error and differs in told and "process 1 on" in told
    (failed,) = tools.events(RunDir(folder / "runs/run"), events.Failed)
    assert differs in failed.message
