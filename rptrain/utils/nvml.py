"""The state of GPUs from NVML, which needs no CUDA context: memory, utilization, temperature, power and link."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import pynvml

# Errors of a machine without NVIDIA's driver: it is not installed, or installed without a GPU to load it for.
_WITHOUT_DRIVER = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)


@dataclass(frozen=True)
class GpuStatus:
    """The current state of a GPU; values that the driver does not report are None."""

    memory: int | None  # bytes in use by all processes
    utilization: int | None  # percentage of recent time in which a kernel ran
    temperature: int | None  # degrees Celsius
    power: float | None = None  # watts


@dataclass(frozen=True)
class Link:
    """Current PCIe generation and width, which an idle card may lower, and their maximum."""

    generation: int | None
    width: int | None
    max_generation: int | None
    max_width: int | None


@dataclass(frozen=True)
class ListedGpu:
    """A GPU that the driver lists, whether or not CUDA_VISIBLE_DEVICES hides it."""

    name: str
    capability: tuple[int, int]


class Driver:
    """The NVIDIA driver. Context manager; without a driver there are no GPUs, and `version` is None.

    `problem` is the error of a driver that is installed and cannot be used; otherwise None.
    """

    def __init__(self) -> None:
        self._open = False
        self.problem: str | None = None
        try:
            pynvml.nvmlInit()
            self._open = True
        except pynvml.NVMLError as raised:
            error: Any = raised
            if error.value not in _WITHOUT_DRIVER:
                self.problem = str(error)

    @property
    def version(self) -> str | None:
        return self._ask(pynvml.nvmlSystemGetDriverVersion) if self._open else None

    @property
    def cuda(self) -> tuple[int, int] | None:
        """The newest version of CUDA that the driver supports."""
        number = self._ask(pynvml.nvmlSystemGetCudaDriverVersion_v2) if self._open else None
        return number and (number // 1000, number % 1000 // 10)

    def gpus(self) -> list[ListedGpu]:
        """All GPUs of the machine, in the driver's order, which need not be torch's."""
        count = (self._ask(pynvml.nvmlDeviceGetCount) or 0) if self._open else 0
        handles = [self._ask(pynvml.nvmlDeviceGetHandleByIndex, index) for index in range(count)]
        found = [
            (self._ask(pynvml.nvmlDeviceGetName, gpu), self._ask(pynvml.nvmlDeviceGetCudaComputeCapability, gpu))
            for gpu in handles
            if gpu is not None
        ]
        return [ListedGpu(name, tuple(capability)) for name, capability in found if name and capability]

    def gpu(self, uuid: str) -> Any | None:
        """The handle of a GPU, or of an instance of one (MIG), by its identifier, as
        `torch.cuda.get_device_properties(i).uuid` gives it.
        """
        if not self._open:
            return None
        handles = (self._ask(pynvml.nvmlDeviceGetHandleByUUID, f"{kind}-{uuid}") for kind in ("GPU", "MIG"))
        return next(filter(None, handles), None)

    def free(self, gpu: Any) -> int | None:
        """Bytes that no process uses."""
        memory = self._ask(pynvml.nvmlDeviceGetMemoryInfo, gpu, pynvml.nvmlMemory_v2)
        return memory and int(memory.free)

    def own_memory(self, gpu: Any) -> int | None:
        """Bytes that this process uses, with its CUDA context; None where the driver does not tell, such as in a
        container or under WSL.
        """
        processes = self._ask(pynvml.nvmlDeviceGetComputeRunningProcesses, gpu) or ()
        return next((process.usedGpuMemory for process in processes if process.pid == os.getpid()), None)

    def status(self, gpu: Any) -> GpuStatus:
        memory = self._ask(pynvml.nvmlDeviceGetMemoryInfo, gpu, pynvml.nvmlMemory_v2)
        rates = self._ask(pynvml.nvmlDeviceGetUtilizationRates, gpu)
        temperature = self._ask(pynvml.nvmlDeviceGetTemperature, gpu, pynvml.NVML_TEMPERATURE_GPU)
        power = self._ask(pynvml.nvmlDeviceGetPowerUsage, gpu)  # milliwatts
        return GpuStatus(
            memory and int(memory.used), rates and int(rates.gpu), temperature, None if power is None else power / 1000
        )

    def link(self, gpu: Any) -> Link:
        return Link(
            self._ask(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, gpu),
            self._ask(pynvml.nvmlDeviceGetCurrPcieLinkWidth, gpu),
            self._ask(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, gpu),
            self._ask(pynvml.nvmlDeviceGetMaxPcieLinkWidth, gpu),
        )

    def close(self) -> None:
        if self._open:
            pynvml.nvmlShutdown()
            self._open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any | None:
        try:
            return function(*arguments)
        except pynvml.NVMLError:  # not supported by this card, or not permitted
            return None
