"""What the driver says of GPUs, with a library that answers in its place."""

from types import SimpleNamespace

import pynvml
import pytest

from rptrain.utils.nvml import Driver


@pytest.fixture(autouse=True)
def driver(monkeypatch):
    def handle(name):
        if name not in ("GPU-1a", "MIG-2b"):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return name

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", handle)


@pytest.mark.parametrize(("uuid", "found"), [("1a", "GPU-1a"), ("2b", "MIG-2b"), ("3c", None)])
def test_a_gpu_and_an_instance_of_one_are_found_by_uuid(uuid, found):
    with Driver() as driver:
        assert driver.gpu(uuid) == found


def test_memory_of_a_process_that_the_driver_does_not_tell(monkeypatch):
    """In a container it has other numbers, and under WSL no memory."""
    for processes in ([], [SimpleNamespace(pid=0, usedGpuMemory=5)]):
        monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda gpu, found=processes: found)
        with Driver() as driver:
            assert driver.own_memory("GPU-1a") is None
