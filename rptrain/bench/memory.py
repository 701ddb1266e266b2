"""GPU memory while something runs: the most that the driver counted, and what the framework's allocator took."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

PAUSE = 0.02  # seconds between two looks


@dataclass(frozen=True)
class Peak:
    """Bytes: by the driver, with the CUDA context and all else that is on the card; and of the allocator."""

    driver: int
    allocator: int


class Sampler:
    """Looks at the GPUs among `devices` again and again. Context manager; without a GPU it does nothing."""

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
        """Up to now, of each GPU."""
        self._look()
        return [Peak(self._used[index], torch.cuda.max_memory_reserved(index)) for index in self._indices]


def driver_allocations(devices: Sequence[str]) -> tuple[int, ...]:
    """How often the allocator has asked the driver for memory so far, for each GPU among the devices."""
    gpus = [name for name in devices if name.startswith("cuda")]
    return tuple(torch.cuda.memory_stats(name)["num_device_alloc"] for name in gpus)
