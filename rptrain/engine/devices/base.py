"""The interface of a device: five ordered streams and memory."""

import time
from collections.abc import Callable, Hashable
from typing import Protocol

import torch
from torch import Tensor

Probe = Callable[[str], None]  # called with the name of a place in the code; tests delay or fail there


class Mark(Protocol):
    """A time stamp in a stream."""

    def __call__(self) -> float:
        """Waits until the stream has passed it; seconds on the scale of `time.perf_counter`."""
        ...

    def passed(self) -> bool: ...


class Event(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Blocks the calling thread until the stream has passed the point."""
        ...


class Stream(Protocol):
    """An ordered queue of work. The only way to wait for work is an event."""

    def run(self, where: str, work: Callable[[], object]) -> None:
        """Appends work; `where` names it in errors."""
        ...

    def copy(self, where: str, target: Tensor, source: Tensor) -> None:
        """Appends a copy of contiguous elements of one dtype; `where` names it in errors.

        Host memory must be of an arena (engine/memory/arena.py): a device may require that it is page-locked.
        """
        ...

    def wait(self, event: Event) -> None:
        """Makes work that is appended later start after `event`, which may belong to any device."""
        ...

    def record(self) -> Event: ...

    def busy(self) -> bool:
        """Whether some of its work has not ended. Thread-safe."""
        ...

    def mark(self) -> Mark:
        """Appends a time stamp."""
        ...

    def stamp(self) -> Callable[[], float]:
        """The time stamp of a place inside work passed to `run`, between two of its operations."""
        ...


class Device(Protocol):
    """One worker's device. Only events may be used by other threads."""

    name: str

    @property
    def label(self) -> str:
        """The device as errors name it: a GPU with its model and the beginning of its UUID."""
        ...

    @property
    def compute(self) -> Stream: ...

    @property
    def param_upload(self) -> Stream: ...

    @property
    def grad_download(self) -> Stream: ...

    @property
    def activation_upload(self) -> Stream: ...

    @property
    def activation_download(self) -> Stream: ...

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def numa_node(self) -> int:
        """The NUMA node that the device is attached to; -1 if unknown, or for CPU workers."""
        ...

    def enter(self) -> None:
        """Makes the device current in the calling thread."""
        ...

    def replay(self, key: Hashable, buffer_slots: Hashable, where: str, work: Callable[[], object]) -> None:
        """Runs work in the compute stream, as a graph if the device supports graphs.

        Equal keys promise the same operations; equal `buffer_slots` promise that they act on the same memory. Works of
        one pass may follow one another, each with its key; nothing that allocates may run between them, because a graph
        leaves its results for the next one in memory that the allocator counts as free.
        """
        ...

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor: ...

    def finish(self) -> None:
        """Waits until memory that its streams use may be freed."""
        ...

    def close(self) -> None:
        """Waits for the streams to end, and ends their threads."""
        ...


STREAMS = ("compute", "param_upload", "grad_download", "activation_upload", "activation_download")


def stamp() -> Callable[[], float]:
    """A time stamp of the calling thread, like that of a stream."""
    now = time.perf_counter()
    return lambda: now
