"""The state of GPUs from NVML, which needs no CUDA context: memory, utilization, temperature, power and link."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import pynvml


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


class Driver:
    """The NVIDIA driver. Context manager; without a driver there are no GPUs, and `version` is None."""

    def __init__(self) -> None:
        self._open = False
        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            self._open = True

    @property
    def version(self) -> str | None:
        return self._ask(pynvml.nvmlSystemGetDriverVersion) if self._open else None

    def gpu(self, uuid: str) -> Any | None:
        """The handle of a GPU by its identifier, as `torch.cuda.get_device_properties(i).uuid` gives it."""
        return self._ask(pynvml.nvmlDeviceGetHandleByUUID, f"GPU-{uuid}") if self._open else None

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
