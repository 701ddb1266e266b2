"""A GPU that fails in mid-run: a message with its place, the last record, the command that resumes; no traceback."""

import re
import shlex
from unittest.mock import Mock

import pytest
import torch

from rptrain.cli import argv
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records import events
from rptrain.train.end import TRACEBACK, RunEnd
from rptrain.train.save import Saver
from rptrain.train.telemetry import Telemetry

from .. import run_tools as tools

LOST = "CUDA error: device lost\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
FULL = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24 GiB. Process 41 has 3 GiB."
STARTS = 3  # of the failing place: after the checkpoint of step 2


def plant(monkeypatch, place, error):
    """The error is raised where the engine reaches a place once more after STARTS times."""
    left = [STARTS]

    def fail(where):
        if re.search(place, where):
            left[0] -= 1
            if left[0] < 0:
                raise error

    monkeypatch.setattr("rptrain.train.session.Engine", tools.probed(fail))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tools.write_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def folder(tmp_path, monkeypatch, model):
    """A model, and a run that saves each step before the next one begins."""
    (tmp_path / "model").symlink_to(model)
    tools.write_config(tmp_path)
    tools.plan_with(monkeypatch, tools.STAGES)
    monkeypatch.setattr(Saver, "poll", Saver.wait)
    return tmp_path


def told(folder, *overrides):
    """What a run says that fails; it has one last record, which says the same."""
    result = tools.invoke("--config", folder / "run.toml", "save.save_steps=1", *overrides)
    assert result.exit_code == 1 and not isinstance(result.exception, RuntimeError)
    (failed,) = tools.events(RunDir(folder / "runs/run"), events.Failed)
    message = result.stderr[result.stderr.index(failed.message) :].rstrip("\n")
    assert message == failed.message and len(message.splitlines()) <= 20
    assert "Traceback" not in result.output
    return failed.message.splitlines()


def test_the_message_names_the_place_and_the_command_that_resumes(folder, monkeypatch):
    plant(monkeypatch, r"^optimizer update of layers\.1$", torch.AcceleratorError(LOST))
    first, advice, resume, kept = told(folder)
    assert first == "The GPU failed in the update of layers.1: CUDA error: device lost." and "dmesg" in advice
    saved = RunDir(folder / "runs/run").checkpoints()[-1].name
    assert resume.startswith(f"{saved} is complete") and kept.endswith(TRACEBACK)
    written = (folder / "runs/run" / TRACEBACK).read_text()
    assert written.startswith("Traceback") and "AcceleratorError: CUDA error: device lost" in written


def test_the_command_resumes_with_the_bits_of_an_undisturbed_run(folder, monkeypatch):
    with monkeypatch.context() as patch:
        plant(patch, r":B1-2.* micro-batch 2$", torch.AcceleratorError(LOST))
        first, _, resume, _ = told(folder)
    assert first.startswith("cpu:") and "failed in the backward pass of layers 1-2, micro-batch 2" in first
    assert tools.invoke(*argv.arguments(shlex.split(resume.partition("rptrain ")[2]))).exit_code == 0
    undisturbed = tools.train_here(folder, "save.resume=never")
    assert tools.state(RunDir(folder / "runs/run")) == tools.state(undisturbed)


def test_after_too_little_memory_a_lower_limit_is_proposed(folder, monkeypatch):
    monkeypatch.setattr(RunEnd, "vram", property(lambda end: 20 << 30, lambda end, value: None), raising=False)
    plant(monkeypatch, r"micro-batch 0$", torch.OutOfMemoryError(FULL))
    first, advice, resume, _ = told(folder, "save.save_steps=0")
    assert "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24 GiB." in first and "41" not in first
    assert "nvidia-smi" in advice and resume == (
        "The run has no checkpoint: fix the problem and start again, with engine.vram_limit=18GiB"
    )


def test_too_little_host_memory_in_mid_run_names_the_command_that_resumes(folder, monkeypatch):
    plant(monkeypatch, r":B1-2.* micro-batch 2$", MemoryError())
    first, resume = told(folder)
    assert first.startswith("memory cannot be allocated: ") and "resume from it with: rptrain --config " in resume


def test_a_bug_keeps_its_traceback_which_ends_with_the_command(folder, monkeypatch):
    plant(monkeypatch, r":B1-2.* micro-batch 2$", IndexError("wrong"))
    result = tools.invoke("--config", folder / "run.toml", "save.save_steps=1")
    assert isinstance(result.exception, RuntimeError) and "IndexError: wrong" in str(result.exception)
    assert "resume from it with: rptrain --config " in result.exception.__notes__[0]


def test_a_failure_between_the_steps_is_a_message_too(folder, monkeypatch):
    """Where the engine is not what uses the GPU."""
    monkeypatch.setattr("rptrain.train.trainer.open_engine", Mock(side_effect=torch.OutOfMemoryError(FULL)))
    first, advice, _, _ = told(folder)
    assert first.startswith("The GPU failed: CUDA out of memory.") and "engine.vram_limit" in advice


@pytest.mark.parametrize("command", ["bench", "generate"])
def test_other_commands_end_with_a_message(folder, monkeypatch, command):
    if command == "bench":
        plant(monkeypatch, r"micro-batch 0$", torch.AcceleratorError(LOST))
        arguments = ("--config", folder / "run.toml", "engine.replan=false")
    else:
        monkeypatch.setattr("rptrain.inference.generate.stream_text", Mock(side_effect=torch.AcceleratorError(LOST)))
        arguments = (folder / "model", "a")
    result = tools.invoke(command, *arguments)
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    first, advice = result.stderr.splitlines()[-2:]
    assert "CUDA error: device lost." in first and "dmesg" in advice
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert isinstance(tools.invoke(command, *arguments).exception, RuntimeError)


def test_the_telemetry_does_not_repeat_the_error(tmp_path):
    said = []
    telemetry = Telemetry(tmp_path, ["cpu:0"], said.append, lambda: None)
    engine = Mock(activity=Mock(side_effect=torch.AcceleratorError(LOST)))
    with telemetry, telemetry.watching(engine, 0):
        telemetry._thread.join(tools.PATIENCE)
        assert engine.activity.called and not telemetry._thread.is_alive()
    assert not said
