"""GPUs by name, and why torch can use none of those that the driver lists."""

import os
from types import SimpleNamespace

import pynvml
import pytest
import torch

from rptrain.config.schema import Engine
from rptrain.doctor import gpu
from rptrain.inference.free_memory import free_memory
from rptrain.machine import gpus
from rptrain.machine.flags import MachineFlags
from rptrain.machine.gpus import resolve, unusable
from rptrain.machine.hardware import here
from rptrain.utils.errors import UserError
from rptrain.utils.parallel import cores

from .. import run_tools as tools


@pytest.fixture
def listed(monkeypatch):
    """The driver lists GPUs, torch of some build sees none. `problem`: the driver's error."""

    def make(build, *names, visible=None, cuda=13000, capability=(8, 9), problem=None):
        def init():
            if problem is not None:
                raise pynvml.NVMLError(problem)

        def no_gpu():
            raise RuntimeError("Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized")

        answers = {
            "nvmlInit": init,
            "nvmlShutdown": lambda: None,
            "nvmlSystemGetDriverVersion": lambda: "550.54",
            "nvmlSystemGetCudaDriverVersion_v2": lambda: cuda,
            "nvmlDeviceGetCount": lambda: len(names),
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetName": names.__getitem__,
            "nvmlDeviceGetCudaComputeCapability": lambda gpu: capability,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(pynvml, name, answer)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "init", no_gpu)
        monkeypatch.setattr(torch.version, "cuda", build)
        monkeypatch.delenv(gpus.VISIBLE, raising=False)
        if visible is not None:
            monkeypatch.setenv(gpus.VISIBLE, visible)

    return make


CARD = "NVIDIA GeForce RTX 4090"


@pytest.mark.parametrize(
    ("build", "options", "reason", "advice"),
    [
        (None, {}, "built without CUDA", "pip install --force-reinstall torch=="),
        ("13.0", {"cuda": 12040}, "550.54 supports CUDA 12.4, and torch", "update the driver, or .* for CUDA 12"),
        ("13.0", {"visible": "7"}, 'CUDA_VISIBLE_DEVICES = "7" names none of', "nvidia-smi -L"),
        ("13.0", {}, "Error 802: system not yet initialized", "dmesg"),
        ("13.0", {"problem": pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH}, "version mismatch", "or the machine after"),
        ("13.0", {"problem": pynvml.NVML_ERROR_UNKNOWN}, "Unknown Error", "restart the container"),
    ],
    ids=["build", "driver", "variable", "unknown", "mismatch", "container"],
)
def test_gpus_that_torch_cannot_use_are_refused_everywhere_with_the_remedy(
    listed, tmp_path, caplog, build, options, reason, advice
):
    listed(build, CARD, **options)
    for devices in ("auto", "cuda", "cuda:0"):
        with pytest.raises(UserError, match=rf'"{devices}": .*{reason}.*{advice}.*"cpu:2" is two workers on the CPU'):
            resolve(devices)
    tools.write_config(tmp_path)
    for command in ((), ("plan",), ("bench",)):
        told = tools.invoke(*command, "--config", tmp_path / "run.toml", "model.path=tiny-tasks", "engine.devices=auto")
        assert told.exit_code == 2 and "two workers on the CPU" in told.stderr
    check = gpu.examine()[0]
    assert check.status == "warning" and check.advice and check.text in str(unusable())
    assert free_memory().no_gpu == check.text and caplog.messages == [
        f"the model runs on the CPU, because {unusable()}"
    ]
    assert resolve("cpu:2") == ("cpu:0", "cpu:1")


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_gpus_that_are_hidden_on_purpose_leave_the_cpu_with_a_warning(listed, caplog, visible):
    listed(None, CARD, CARD, visible=visible)
    found = here(Engine())
    assert len(found.names) == cores() and not found.gpus
    (warning,) = found.warnings
    assert f'CUDA_VISIBLE_DEVICES = "{visible}" hides 2 GPUs ({CARD})' in warning
    with pytest.raises(UserError, match='"cuda": CUDA_VISIBLE_DEVICES'):
        resolve("cuda")
    assert "hides" in free_memory().no_gpu and not caplog.messages
    assert not here(Engine(devices="cpu:2")).warnings


@pytest.mark.parametrize(
    "options",
    [
        {"problem": pynvml.NVML_ERROR_LIBRARY_NOT_FOUND},
        {"problem": pynvml.NVML_ERROR_DRIVER_NOT_LOADED},
        {"names": ()},
        {"capability": (3, 5)},
    ],
    ids=["no-driver", "not-loaded", "no-gpu", "too-old"],
)
def test_a_machine_without_usable_gpus_is_silent(listed, options):
    names = options.pop("names", (CARD,))
    listed(None, *names, **options)
    assert unusable() is None and not here(Engine()).warnings
    assert resolve("auto") == tuple(f"cpu:{index}" for index in range(len(os.sched_getaffinity(0))))
    with pytest.raises(UserError, match='"cuda", but this machine has no CUDA GPU'):
        resolve("cuda")
    assert "driver" in str(gpu.examine()[0].advice)


def test_a_hypothetical_machine_can_be_planned_where_torch_sees_no_gpu(listed, tmp_path):
    listed(None, CARD)
    config = tools.write_config(tmp_path, "engine.devices=auto").config
    assert MachineFlags(gpus=2).machine(config).devices == 2
    assert MachineFlags().machine(config, (CARD,)).machine.card.name == "RTX 4090"


@pytest.fixture
def three_gpus(monkeypatch):
    uuids = ("8a1b2c3d-0000", "8A1B9999-0000", "90c2ffff-0000")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuids[index]))
    monkeypatch.delenv(gpus.VISIBLE, raising=False)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("cuda:2,0", ("cuda:2", "cuda:0")),
        ("cuda:GPU-90c2", ("cuda:2",)),
        ("cuda:GPU-90C2ffff-0000,GPU-8a1b2", ("cuda:2", "cuda:0")),
        ("cuda:MIG-8a1b9,0", ("cuda:1", "cuda:0")),
    ],
)
def test_gpus_are_named_by_index_or_uuid(three_gpus, text, names):
    assert Engine(devices=text).devices == text and resolve(text) == names


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cuda:GPU-8a1b", "several GPUs have a UUID that begins with GPU-8a1b: `nvidia-smi -L`"),
        ("cuda:GPU-77", r"none of 3 GPUs, cuda:0 to cuda:2 \(CUDA_VISIBLE_DEVICES = \"4,5,6\"\) has a UUID"),
        ("cuda:0,GPU-8a1b2", "names cuda:0 twice"),
        ("cuda:3", r"this machine has 3 GPUs, cuda:0 to cuda:2 \(CUDA_VISIBLE_DEVICES = \"4,5,6\"\)"),
    ],
)
def test_names_that_fit_no_gpu_or_several_are_refused(three_gpus, monkeypatch, text, message):
    monkeypatch.setenv(gpus.VISIBLE, "4,5,6")
    with pytest.raises(UserError, match=message):
        resolve(text)


@pytest.mark.parametrize("text", ["cuda:GPU-", "cuda:gpu-8a", "cuda:GPU-xyz", "GPU-8a1b", "cuda:GPU-8a,GPU-8a"])
def test_other_texts_are_not_names_of_gpus(text):
    with pytest.raises(ValueError, match="must"):
        Engine(devices=text)
