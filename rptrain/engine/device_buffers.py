"""The buffers of a device, allocated once, and how they are used in turn."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from rptrain.engine.devices.base import Device, Event, Stream
from rptrain.engine.footprint import ALIGNMENT, Footprint
from rptrain.engine.memory.step_layout import StepLayout
from rptrain.engine.transfer.inputs import Inputs
from rptrain.models.spec import ModelSpec
from rptrain.schedule.lower import RING


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


class TwoEnded:
    """A flat buffer. A stage takes a part at one end, and the next stage a part at the other end."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer, self._aligned = buffer, ALIGNMENT // buffer.itemsize

    def range(self, end: int, size: int) -> tuple[int, int]:
        """The place of `size` elements at an end, 0 or 1: start and stop."""
        if end == 0:
            return 0, size
        start = len(self._buffer) - self._whole(size)
        return start, start + size

    def part(self, end: int, size: int) -> Tensor:
        """`size` elements at an end."""
        start, stop = self.range(end, size)
        return self._buffer[start:stop]

    def rest(self, end: int, size: int) -> Tensor:
        """What is left beside `size` elements at an end."""
        whole = self._whole(size)
        return self._buffer[whole:] if end == 0 else self._buffer[: len(self._buffer) - whole]

    def fit(self, size: int, other: int) -> bool:
        """Whether `size` elements at one end and `other` ones at the other end do not overlap."""
        return self._whole(size) + self._whole(other) <= len(self._buffer)

    def _whole(self, size: int) -> int:
        return -(-size // self._aligned) * self._aligned


@dataclass(frozen=True)
class DeviceBuffers:
    """What a device's thread computes with; an evaluation uses the same between two iterations.

    T tokens of a micro-batch, M micro-batches, hidden size D.
    """

    params: TwoEnded  # bytes: those of a stage and of the next one
    prepared: Tensor  # bytes, for the stage that is computed
    sums: TwoEnded  # gradient accumulators, of a stage and of the one before
    rounded: Tensor | None  # a chunk of gradients in the dtype in which they are downloaded
    x: Ring  # [T, D], inputs of a stage
    dy: Ring  # [T, D], gradients of outputs
    out: Ring  # [T, D], outputs
    inputs: Inputs
    losses: Tensor  # [M]
    loss: Tensor  # [], of the micro-batch that is computed

    @classmethod
    def allocate(cls, device: Device, spec: ModelSpec, layout: StepLayout, sizes: Footprint) -> Self:
        grad = layout.grad_dtype

        def ring(entries: int) -> Ring:
            shape = (layout.tokens, spec.hidden_size)
            return Ring([device.empty(shape[0] * shape[1], layout.dtype).view(shape) for _ in range(entries)])

        return cls(
            params=TwoEnded(device.empty(sizes.params, torch.uint8)),
            prepared=device.empty(sizes.prepared, torch.uint8),
            sums=TwoEnded(device.empty(sizes.sums // layout.wide.itemsize, layout.wide)),
            rounded=device.empty(sizes.rounded // grad.itemsize, grad) if sizes.rounded else None,
            x=ring(RING),
            dy=ring(RING),
            out=ring(sizes.outputs),
            inputs=Inputs(device, spec, layout),
            losses=device.empty(layout.micro_batches, layout.wide),
            loss=device.empty(1, layout.wide)[0],
        )
