"""What a device is: five ordered streams and memory."""

import time
from collections.abc import Callable, Hashable
from typing import Protocol

import torch
from torch import Tensor

Probe = Callable[[str], None]  # called with a place's name; tests delay or fail there


class Mark(Protocol):
    """A time stamp in a stream."""

    def __call__(self) -> float:
        """Once the stream has passed it: seconds on `time.perf_counter`'s scale."""
        ...

    def passed(self) -> bool: ...


class Event(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Blocks the calling thread until the stream has passed the point."""
        ...


class Stream(Protocol):
    """An ordered queue of work. Nothing that is passed to `run` may be waited for but through an event."""

    def run(self, where: str, work: Callable[[], object]) -> None:
        """Appends work; `where` names it in errors."""
        ...

    def wait(self, event: Event) -> None:
        """What is appended after this starts once `event`, of any device, has passed."""
        ...

    def record(self) -> Event: ...

    def busy(self) -> bool:
        """Whether work of it has not ended. For any thread."""
        ...

    def mark(self) -> Mark:
        """Appends a time stamp."""
        ...

    def stamp(self) -> Callable[[], float]:
        """The time stamp of a place inside work that `run` was given, between two of its operations."""
        ...


class Device(Protocol):
    """One worker's device. Used by one thread, but for events."""

    name: str

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

    def enter(self) -> None:
        """Makes the device current in the calling thread."""
        ...

    def replay(self, key: Hashable, buffer_slots: Hashable, where: str, work: Callable[[], object]) -> None:
        """Runs work in the compute stream, from a graph where the device has them (CUDA graphs).

        Equal keys promise the same operations; equal `buffer_slots` promise that they act on the same memory.
        """
        ...

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor: ...

    def finish(self) -> None:
        """Waits until memory that its streams use may be given back."""
        ...

    def close(self) -> None:
        """Waits for the streams to end and gives their threads back."""
        ...


STREAMS = ("compute", "param_upload", "grad_download", "activation_upload", "activation_download")


def stamp() -> Callable[[], float]:
    """The time of the calling thread, as a Stream's `stamp` gives it."""
    now = time.perf_counter()
    return lambda: now
