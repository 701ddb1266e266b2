"""A batch's index tensors on a device, and what is computed from them for each micro-batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log
from typing import Self

import torch
from torch import Tensor

from rptrain.engine.devices.base import Device, Stream
from rptrain.engine.iteration import Iteration
from rptrain.engine.memory.step_layout import StepLayout
from rptrain.kernels.batch import MicroBatch
from rptrain.models.layers.rope import RotaryTables
from rptrain.models.spec import ModelSpec
from rptrain.models.transforms.balance import balance_of


@dataclass(frozen=True)
class DocumentShape:
    """The properties of a micro-batch's documents that kernel launches depend on."""

    max_seqlen: int
    uniform: bool
    documents: int  # the number of documents, rounded up

    @classmethod
    def of(cls, lengths: Sequence[int], row: int) -> Self:
        if min(lengths) == max(lengths):
            return cls(lengths[0], True, len(lengths))
        return cls(row, False, 16 ** ceil(log(len(lengths), 16)))  # few layouts: each has its own graph


def index_bytes(layout: StepLayout) -> int:
    """Bytes of a device's index tensors: two batches, and the micro-batch that is computed."""
    tokens = layout.tokens
    return (2 * layout.micro_batches + 1) * (tokens * (8 + 8) + (tokens + 1) * 4 + 3 * 8)


class Inputs:
    """Index tensors on the device: those of two iterations, of which there are never more (ITERATIONS_AHEAD), and those
    of the micro-batch that is computed, which are always at the same addresses.
    """

    def __init__(self, device: Device, spec: ModelSpec, layout: StepLayout) -> None:
        micro_batches, tokens, wide = layout.micro_batches, layout.tokens, layout.wide

        def empty(width: int, dtype: torch.dtype) -> list[Tensor]:
            return [device.empty(micro_batches * width, dtype).view(micro_batches, width) for _ in range(2)]

        widths = ((tokens, torch.int64), (tokens, torch.int64), (tokens + 1, torch.int32), (3, torch.int64))
        self._batches = [empty(width, dtype) for width, dtype in widths]
        self._positions = device.empty(tokens, torch.int64)
        self._labels = device.empty(tokens, torch.int64)
        self._cu_seqlens = device.empty(tokens + 1, torch.int32)
        self._sample = device.empty(3, torch.int64)
        self.balance = device.empty(1, wide)[0]  # factor of the gradients of the routers' auxiliary loss
        self._balanced = spec.router_aux_loss_coef > 0
        self._rotaries = RotaryTables(spec.rotaries, wide, device.torch_device)

    def upload(self, iteration: Iteration, stream: Stream) -> None:
        sources = (iteration.positions, iteration.labels, iteration.cu_seqlens, iteration.samples)
        for batches, source in zip(self._batches, sources, strict=True):
            target = batches[iteration.number % 2][: len(source)]
            stream.run("batch upload", lambda t=target, s=source: t.copy_(s, non_blocking=True))

    def select(self, iteration: Iteration, m: int, stream: Stream) -> None:
        """Selects the micro-batch that is computed next."""
        targets = (self._positions, self._labels, self._cu_seqlens, self._sample)
        for target, batches in zip(targets, self._batches, strict=True):
            stream.copy("", target, batches[iteration.number % 2][m])

    def describe(self, iteration: Iteration, layout: DocumentShape) -> MicroBatch:
        """The selected micro-batch. It computes, so call it in work that a stream runs."""
        cu_seqlens = self._cu_seqlens[: layout.documents + 1]
        return MicroBatch(
            sequences=iteration.sequences,
            length=iteration.length,
            positions=self._positions,
            labels=self._labels,
            cu_seqlens=cu_seqlens,
            max_seqlen=layout.max_seqlen,
            uniform=layout.uniform,
            rotations=self._rotaries.at(self._positions),
            sample=self._sample,
            balance=balance_of(self._labels, cu_seqlens, self.balance) if self._balanced else None,
        )
