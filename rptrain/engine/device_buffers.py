"""The buffers of a device, allocated once."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from rptrain.engine.devices.base import Device
from rptrain.engine.footprint import Footprint
from rptrain.engine.memory.step_layout import StepLayout
from rptrain.engine.transfer.inputs import Inputs
from rptrain.engine.transfer.ring import Ring
from rptrain.engine.transfer.two_ended import TwoEnded
from rptrain.models.spec import ModelSpec
from rptrain.schedule.lower import RING


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
