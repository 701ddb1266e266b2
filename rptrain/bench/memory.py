"""Peak GPU memory, by the driver and by torch's allocator."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

PAUSE = 0.02  # seconds between two samples


@dataclass(frozen=True)
class Peak:
    """Peak bytes by the driver, with the CUDA context and other processes, and by the allocator."""

    driver: int
    allocator: int


class Sampler:
    """Samples the memory of the GPUs among `devices`. Context manager; does nothing without GPUs."""

    def __init__(self, devices: Sequence[str]) -> None:
        self._indices = [int(name.partition(":")[2]) for name in devices if name.startswith("cuda")]
        self._used = dict.fromkeys(self._indices, 0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main, name="memory", daemon=True)

    def __enter__(self) -> Self:
        for index in self._indices:
            torch.cuda.reset_peak_memory_stats(index)
        if self._indices:
            self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._indices:
            self._stop.set()
            self._thread.join()

    def _main(self) -> None:
        while not self._stop.wait(PAUSE):
            self._look()

    def _look(self) -> None:
        for index in self._indices:
            free, total = torch.cuda.mem_get_info(index)
            self._used[index] = max(self._used[index], total - free)

    def peaks(self) -> list[Peak]:
        """The peaks so far, for each GPU."""
        self._look()
        return [Peak(self._used[index], torch.cuda.max_memory_reserved(index)) for index in self._indices]


def driver_allocations(devices: Sequence[str]) -> tuple[int, ...]:
    """The number of memory requests of the allocator to the driver so far, for each GPU among the devices."""
    gpus = [name for name in devices if name.startswith("cuda")]
    return tuple(torch.cuda.memory_stats(name)["num_device_alloc"] for name in gpus)
