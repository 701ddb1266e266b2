"""The forward pass of an evaluation batch on one device, between two iterations."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rptrain.engine.context import Context
from rptrain.engine.device_buffers import DeviceBuffers
from rptrain.engine.devices.base import Device, Event
from rptrain.engine.iteration import Evaluation, Iteration
from rptrain.engine.transfer.copies import staged
from rptrain.engine.transfer.inputs import DocumentShape
from rptrain.engine.transfer.layouts import ParamLayout
from rptrain.engine.transfer.staging import Staging
from rptrain.models.params import Params
from rptrain.schedule.lower import CHUNK_BYTES, RING, Access, Chunk, windows
from rptrain.schedule.plan import Stage
from rptrain.utils.liveness import progressed


class Evaluator:
    """Computes losses with the buffers that its device has for training, and leaves them free.

    `where`: the current place, for error messages; None between evaluations.
    """

    def __init__(
        self, context: Context, index: int, device: Device, buffers: DeviceBuffers, staging: Staging | None
    ) -> None:
        self._context, self._index, self._device, self._buffers = context, index, device, buffers
        self._staging = staging
        self._sent: dict[int, Event] = {}  # downloads of the last layer's outputs, by micro-batch
        self.where: str | None = None

    def run(self, evaluation: Evaluation, slot: Tensor, read: Event | None) -> None:
        """Computes the losses of every N-th micro-batch of a round of all groups; a layer is uploaded once for them.

        `slot`: a buffer for parameters, free after `read`. Between layers, activations stay in the host buffers of
        boundary 0, which are not in use between iterations.
        """
        context, device, iteration = self._context, self._device, evaluation.iteration
        plan, spec, units = context.plan, context.store.spec, context.store.units
        table = units[0].views[units[0].current]["embed"]
        self._buffers.inputs.upload(iteration, device.activation_upload)
        at_once = plan.round_size * plan.replicas
        count = iteration.micro_batches
        for first in range(0, count, at_once):
            # every N-th of these, so that no two devices share host buffers
            mine = range(first + self._index, min(first + at_once, count), plan.devices)
            hidden = {m: context.buffers.locate(Access(0, 0), 0, m)[0] for m in mine}
            self._sent.clear()
            if self._staging is not None:
                file_backed = (
                    unit for layer in spec.stack for unit in layer.units if units[unit].file_backed is not None
                )
                self._staging.request(chunk for unit in file_backed for chunk in self._chunks(unit))
            for m in mine:
                torch.index_select(table, 0, iteration.input_ids[m], out=hidden[m])
            for index in range(len(spec.stack)):
                self.where = f"evaluation, layer {index}"
                layout = ParamLayout(spec, Stage("F", index, index + 1), context.store.dtype)
                if read is not None:
                    device.param_upload.wait(read)
                for chunk in (chunk for unit in layout.units for chunk in self._chunks(unit)):
                    state, target = units[chunk.unit], layout.of(chunk.unit, slot)[chunk.start : chunk.stop]
                    with staged(self._staging, state, device.param_upload, state.current, chunk) as source:
                        device.param_upload.copy("", target, source)
                device.compute.wait(device.param_upload.record())
                bound = layout.bind(slot, self._buffers.prepared)[0]
                if bound.prepared:
                    device.compute.run(f"{self.where} preparing parameters", bound.prepare)
                for turn, m in enumerate(mine):
                    self._forward(iteration, index, m, turn % RING, bound.params, hidden[m])
                    progressed()
                read = device.compute.record()
                read.synchronize()  # rounds share the buffers, and the driver's queues fill
        download = device.activation_download
        download.wait(device.compute.record())
        for m in (m for m in range(count) if m % at_once % plan.devices == self._index):
            target, source = iteration.losses[m], self._buffers.losses[m]
            download.run("", lambda t=target, s=source: t.copy_(s, non_blocking=True))
        download.record().synchronize()
        self.where = None
        context.board.publish(("evaluated", self._index), evaluation.number)

    def _chunks(self, unit: int) -> Sequence[Chunk]:
        store = self._context.store
        return windows([(unit, store.spec.units[unit].wire_bytes(store.dtype.itemsize))], 1, CHUNK_BYTES)[0]

    def _forward(self, iteration: Iteration, index: int, m: int, turn: int, params: Params, hidden: Tensor) -> None:
        """Runs one micro-batch through one layer. Replaces `hidden`, on the host; the head writes a loss instead."""
        device, spec = self._device, self._context.store.spec
        self.where = f"evaluation, layer {index} micro-batch {m}"
        x = self._buffers.x.claim(turn, device.activation_upload)
        if m in self._sent:
            device.activation_upload.wait(self._sent[m])
        device.activation_upload.copy(f"{self.where} input", x, hidden)
        device.compute.wait(device.activation_upload.record())
        self._buffers.inputs.select(iteration, m, device.compute)
        layout = DocumentShape.of(iteration.documents[m], iteration.length)
        head = index == len(spec.layers)
        out = self._buffers.losses[m] if head else self._buffers.out.claim(turn, device.compute)

        def compute() -> None:
            mb = replace(self._buffers.inputs.describe(iteration, layout), sample=None)  # no dropout
            if head:
                out.copy_(spec.head.loss(params, x, mb))
            else:
                out.copy_(spec.layers[index].forward(params, x, mb))

        device.compute.run(self.where, compute)
        done = device.compute.record()
        self._buffers.x.release(turn, done)
        if not head:
            download = device.activation_download
            download.wait(done)
            download.copy(f"{self.where} output", hidden, out)
            self._sent[m] = download.record()
            self._buffers.out.release(turn, self._sent[m])
