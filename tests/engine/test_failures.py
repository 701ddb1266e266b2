"""A GPU that fails: what the error says of it, which GPU is named, and that the failed GPU is left alone."""

import pytest
import torch

from rptrain.engine.devices.cpu import CpuDevice, CpuStream
from rptrain.engine.distributed.peers import PeerLost
from rptrain.engine.engine import Engine
from rptrain.engine.errors import EngineError
from rptrain.engine.failures import gpu_failure, plain_place

from . import plain, runs
from .test_pipeline import CFG, PLAN

TORCH = """\
CUDA error: {}
Search for `cudaError' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""
FULL = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.99 GiB of which 1.00 GiB is free."
    " Process 41 has 3.00 GiB memory in use. Of the allocated memory 1.00 GiB is allocated by PyTorch."
)


@pytest.mark.parametrize(
    ("text", "kind", "advice"),
    [
        (TORCH.format("unspecified launch failure"), "lost", "dmesg"),
        (TORCH.format("device lost"), "lost", "nvidia-smi"),
        (TORCH.format("no CUDA-capable device is detected"), "lost", "restart the machine"),
        (TORCH.format("the launch timed out and was terminated"), "lost", "dmesg"),
        (TORCH.format("uncorrectable ECC error encountered"), "hardware", "gpu-reset"),
        (TORCH.format("an illegal memory access was encountered"), "program", "CUDA_LAUNCH_BLOCKING=1"),
        (TORCH.format("CUDA-capable device(s) is/are busy or unavailable"), "busy", "compute mode"),
        (TORCH.format("no kernel image is available for execution on the device"), "driver", "rptrain doctor"),
        (TORCH.format("operation not permitted"), "other", "nvidia-smi"),
        ("CUDA error 700: an illegal memory access was encountered", "program", "CUDA_LAUNCH_BLOCKING=1"),
        ("Triton Error [CUDA]: device-side assert triggered", "program", "report"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "memory", "engine.vram_limit"),
        (FULL, "memory", "engine.vram_limit"),
    ],
)
def test_the_kind_of_failure_decides_what_to_do(text, kind, advice):
    failed = gpu_failure(torch.AcceleratorError(text))
    assert failed is not None and failed.kind == kind and failed.final == (kind != "memory")
    first, what_to_do = failed.lines()
    assert advice in what_to_do and "TORCH_USE_CUDA_DSA" not in first and "allocated by PyTorch" not in first


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shape mismatch"),
        OSError("CUDA error: no"),
        EngineError("optimizer, waiting: CUDA error: copied"),
        PeerLost("process 1 on b has failed: AcceleratorError: CUDA error: device lost"),
    ],
    ids=["bug", "system", "without-its-cause", "of-another-process"],
)
def test_other_errors_are_not_of_a_gpu(error):
    assert gpu_failure(error) is None


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("2:B3-5@0r0m0-3 micro-batch 1", "backward pass of layers 3-5, micro-batch 1"),
        ("0:F0-0@1r0m0-3 micro-batch 0 input", "upload of activations for the forward pass of layer 0, micro-batch 0"),
        ("2:FB3-5@0r0m0-3 download", "download of gradients for the forward and backward pass of layers 3-5"),
        ("evaluation, layer 2 micro-batch 0", "evaluation of layer 2, micro-batch 0"),
        (
            "evaluation, layer 0 micro-batch 1 output",
            "download of activations for the evaluation of layer 0, micro-batch 1",
        ),
        ("update of layers.1", "update of layers.1"),
        ("waiting", ""),
    ],
)
def test_places_are_shown_in_words(place, words):
    assert plain_place(place) == words


def failing(place, error):
    def fail(where):
        if place in where:
            raise error

    return fail


def test_the_gpu_that_refuses_every_call_is_named(monkeypatch):
    """Not the one whose thread met the error first, as it waited for the other one's work."""
    busy = CpuStream.busy

    def refuse(stream):
        if stream._thread.name.startswith("cpu:1"):
            raise torch.AcceleratorError(TORCH.format("device lost"))
        return busy(stream)

    monkeypatch.setattr(CpuStream, "busy", refuse)
    probe = failing("@0r0m0-3 micro-batch 1", torch.AcceleratorError(TORCH.format("device lost")))
    with pytest.raises(EngineError) as caught:
        runs.run(CFG, plain.make_batches(2), PLAN, asynchronous=True, probe=probe)
    failed = gpu_failure(caught.value)
    assert failed is not None and failed.device == "cpu:1" and "micro-batch 1" in failed.place
    assert next(failed.lines()).startswith("cpu:1 failed in the ")


@pytest.mark.parametrize(
    ("text", "touched"), [(TORCH.format("device lost"), False), (FULL, True)], ids=["lost", "full"]
)
def test_a_lost_gpu_is_not_waited_for(monkeypatch, text, touched):
    """Nor another one, which may wait for it. After it ran out of memory, a GPU is closed as ever."""
    closed, devices = [], []

    class Gpu(CpuDevice):
        def __init__(self, *given):
            super().__init__(*given)
            devices.append(self)

        def finish(self):
            closed.append("finish")

        def close(self):
            closed.append("close")
            super().close()

    monkeypatch.setattr("rptrain.engine.engine.CpuDevice", Gpu)
    close = Engine.close
    monkeypatch.setattr(Engine, "close", lambda engine: [setattr(engine, "_cuda", True), close(engine)])
    probe = failing("micro-batch 2", torch.AcceleratorError(text))
    with pytest.raises(EngineError):
        runs.run(CFG, plain.make_batches(2), PLAN, asynchronous=True, probe=probe)
    assert (len(closed) > 0) == touched
    for device in devices:
        CpuDevice.close(device)
