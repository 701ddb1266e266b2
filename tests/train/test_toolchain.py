"""Runs on machines where kernels cannot be compiled: refused before anything is begun, or resumable afterwards."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from rptrain.bench import run as bench
from rptrain.engine.stage_pass import StagePass
from rptrain.inference import weights
from rptrain.inference.placement import Placement
from rptrain.kernels import toolchain_errors
from rptrain.kernels.toolchain_errors import ToolchainError
from rptrain.machine.hardware import Gpu, here
from rptrain.runs.folder.run_dir import RunDir
from rptrain.train import begin, job
from tests.kernels.stub_cuda import raised

from .. import run_tools as tools

BROKEN = ToolchainError("Triton finds no C compiler", "install gcc")


@pytest.fixture
def broken(monkeypatch):
    """Two GPUs, on the second of which no kernel runs."""
    gpus = tuple(Gpu(f"cuda:{index}", 1 << 28, 8 << 30, "free", 8 << 30) for index in range(2))

    def try_out(device):
        if device.index == 1:
            raise BROKEN

    for module in (begin, bench):
        monkeypatch.setattr(module, "here", lambda engine, launch=None: replace(here(engine), gpus=gpus))
    monkeypatch.setattr(job, "try_out", try_out)
    monkeypatch.setattr(weights, "try_out", try_out)


@pytest.mark.parametrize("command", [(), ("bench",)], ids=["train", "bench"])
def test_a_run_is_refused_before_data_is_read(tmp_path, monkeypatch, broken, command):
    monkeypatch.setattr(job, "training_set", lambda *given: pytest.fail("read data"))
    tools.write_model(tmp_path / "model")
    tools.write_config(tmp_path)
    told = tools.invoke(*command, "--config", tmp_path / "run.toml")
    assert (told.exit_code, told.stderr.splitlines()[-1]) == (2, str(BROKEN))
    assert not (tmp_path / "runs").exists()


def test_a_model_does_not_answer_there(monkeypatch, broken):
    monkeypatch.setattr(weights, "_loaded", lambda *given, **named: pytest.fail("read weights"))
    monkeypatch.setattr(Placement, "device", SimpleNamespace(type="cuda", index=1))
    for kind in ("gpu", "streamed"):
        with pytest.raises(ToolchainError):
            weights.placed(None, Placement(kind, "", 0, 1.0), pytest.fail)  # type: ignore[arg-type]


def test_a_kernel_that_cannot_be_compiled_later(tmp_path, monkeypatch):
    """A run whose cache of kernels fills up names the cache's folder and how to resume."""
    tools.write_model(tmp_path / "model")
    triton = SimpleNamespace(knobs=SimpleNamespace(cache=SimpleNamespace(dir="/cache")))
    monkeypatch.setattr(toolchain_errors, "triton", triton)
    run_stage, run = StagePass.run, RunDir(tmp_path / "runs/run")

    def fail(*given, **named):
        if run.checkpoints():
            raise raised("triton.runtime.cache", OSError(28, "No space left on device"))
        return run_stage(*given, **named)

    monkeypatch.setattr(StagePass, "run", fail)
    tools.write_config(tmp_path)
    told = tools.invoke("--config", tmp_path / "run.toml", "save.save_steps=1", "train.max_steps=1000")
    message = "\n".join(told.stderr.splitlines()[-2:])
    assert told.exit_code == 1 and "/cache cannot be used (No space left on device)" in message
    assert "TRITON_CACHE_DIR" in message and "resume from it with: rptrain --config" in message
