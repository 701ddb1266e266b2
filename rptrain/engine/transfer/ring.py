"""A device's buffers for activations, used in turn."""

from torch import Tensor

from rptrain.engine.devices.base import Event, Stream


class Ring:
    """Entries of buffers used in turn; an entry's next writer waits for its last reader."""

    def __init__(self, buffers: list[Tensor]) -> None:
        self._buffers = buffers
        self._free: list[Event | None] = [None] * len(buffers)

    def claim(self, entry: int, writer: Stream) -> Tensor:
        free = self._free[entry]
        if free is not None:
            writer.wait(free)
        return self._buffers[entry]

    def release(self, entry: int, read: Event) -> None:
        self._free[entry] = read
