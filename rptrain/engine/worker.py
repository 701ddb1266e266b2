"""A device's thread: takes the slots that the plan gives its device and issues their transfers and computation."""

import queue
import threading
import time
from collections import deque
from collections.abc import Hashable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rptrain.engine import meter
from rptrain.engine.context import Context
from rptrain.engine.devices.base import Device, Event
from rptrain.engine.evaluate import Evaluator
from rptrain.engine.footprint import RING, Footprint
from rptrain.engine.iteration import Evaluation, Iteration
from rptrain.engine.stage_pass import StagePass
from rptrain.engine.store import accumulate_dtype
from rptrain.engine.trace import Span, Work, computing, copying
from rptrain.engine.transfer.copies import Bound, Download, GradLayout, ParamLayout, Upload
from rptrain.engine.transfer.inputs import DocumentShape, Inputs
from rptrain.engine.transfer.ring import Ring
from rptrain.engine.transfer.staging import Staging
from rptrain.kernels.quant import prepare
from rptrain.models.spec import ModelSpec
from rptrain.schedule.lower import Access
from rptrain.schedule.plan import Slot

MICRO_BATCHES_AHEAD = (
    2  # micro-batches issued and not computed: were there more, the driver's queues would fill, and block it
)


class Worker:
    """One thread and one device. `submit` hands it iterations in order, and None to end it."""

    def __init__(
        self, context: Context, index: int, device: Device, sizes: Footprint, tokens: int, staging: Staging | None
    ) -> None:
        """With `staging`, which ends with it, some units are file-backed."""
        self._context, self._index, self._device, self._staging = context, index, device, staging
        self._lane = context.lanes[index]
        spec: ModelSpec = context.store.spec
        dtype, wide = context.store.dtype, accumulate_dtype(context.store.dtype)
        self._spec = spec
        self._params = [device.empty(sizes.param_bytes, torch.uint8) for _ in range(2)]
        self._dequantized = device.empty(sizes.dequantized_numel, dtype)  # of the stage that is computed
        if sizes.dequantized_numel:
            prepare(device.torch_device)
        self._param_read: list[Event | None] = [None, None]
        self._sums = device.empty(sizes.grad_numel, wide)
        self._grads = device.empty(sizes.grad_numel, context.store.grad_dtype)
        self._grads_read: Event | None = None

        def ring(entries: int) -> Ring:
            boundary = (tokens, spec.hidden_size)
            return Ring([device.empty(tokens * spec.hidden_size, dtype).view(boundary) for _ in range(entries)])

        self._x, self._dy, self._out = ring(RING), ring(RING), ring(sizes.outputs)
        self._computed = 0  # micro-batches: the rings' entries go by it
        self._ahead: deque[Event] = deque()  # the ends of the last micro-batches that were issued
        self._inputs = Inputs(device, spec, context.plan.micro_batches, tokens, wide)
        self._losses = device.empty(context.plan.micro_batches, wide)
        self._loss = device.empty(1, wide)[0]  # of the micro-batch that is computed
        self._losses_read: Event | None = None
        self._evaluator = Evaluator(
            context, index, device, self._inputs, self._x, self._out, self._losses, self._dequantized, staging
        )
        self._layouts = [ParamLayout(spec, stage, dtype) for stage in context.plan.stages]
        self._grad_layouts = [GradLayout(spec, stage) for stage in context.plan.stages]
        self._download: Download | None = None
        self._span: Span | None = None  # that is being issued, where the engine is traced
        self._left: dict[int, meter.Stamp] = {}  # there, when what an entry of the output ring held was with the host
        self._turn = 0  # slots that were run: the parameters of the next one go by it
        self._where = "waiting"
        self._queue: queue.SimpleQueue[Iteration | Evaluation | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=context.guard,
            args=(lambda: self._evaluator.where or self._where, self._main),
            name=device.name,
            daemon=True,
        )
        self._thread.start()

    def submit(self, iteration: Iteration | Evaluation | None) -> None:
        """The next iteration, or an evaluation between two; None ends the thread once it has issued what it has."""
        self._queue.put(iteration)

    def join(self) -> None:
        self._thread.join()
        if self._staging is not None:
            self._staging.close()

    # ---- the thread

    def _main(self) -> None:
        self._device.enter()
        program = self._program()
        number, slot = next(program)
        upload = self._upload(number, slot, 0)
        iteration = self._take(upload)
        while iteration is not None:
            while iteration.number < number:  # iterations in which this device has no slot
                iteration = self._take(upload)
                if iteration is None:
                    return
            following_number, following = next(program)
            following_upload = self._upload(following_number, following, self._turn + 1)
            self._where = str(slot)
            self._run(iteration, slot, self._turn % 2, upload, following_upload)
            self._turn += 1
            slot, upload = following, following_upload
            if following_number != number:
                number = following_number
                iteration = self._take(upload)

    def _program(self) -> Iterator[tuple[int, Slot]]:
        number = 0
        while True:
            for slot in self._context.plan.slots(number):
                if slot.device == self._index:
                    yield number, slot
            number += 1

    def _take(self, upload: Upload) -> Iteration | None:
        """The next iteration; gradients that still wait for a window are not kept from the optimizer meanwhile.

        `upload`: the next one, whose file-backed units were requested before those that an evaluation reads.
        """
        if self._queue.empty():
            self._flush()
        while isinstance(iteration := self._queue.get(), Evaluation):
            if self._staging is not None:
                upload.finish()
            free = (self._turn + 1) % 2  # the other holds what was uploaded for the next slot
            self._evaluator.run(iteration, self._params[free], self._param_read[free])
        if iteration is None:
            self._flush()
            return None
        self._inputs.upload(iteration, self._device.activation_upload)
        return iteration

    def _upload(self, number: int, slot: Slot, turn: int) -> Upload:
        layout = self._layouts[slot.stage_index]
        target = self._params[turn % 2]
        return Upload(self._context, self._device, layout, number, slot, target, self._staging)

    def _flush(self) -> None:
        if self._download is not None:
            self._download.flush()
            self._grads_read = self._device.grad_download.record()
            self._download = None

    def _wait(self, key: Hashable, number: int) -> Any:
        """A wait on another thread: never with gradients in hand, as the other may wait for the optimizer."""
        if not self._context.board.ready(key, number):
            self._flush()
        return self._context.board.wait(key, number)

    def _run(self, iteration: Iteration, slot: Slot, parity: int, upload: Upload, following: Upload) -> None:
        device, stage = self._device, slot.stage
        layout = self._grad_layouts[slot.stage_index]
        if upload.is_blocked():
            self._flush()
        params = self._layouts[slot.stage_index].bind(self._params[parity], self._dequantized)
        sums = layout.bind(self._sums) if stage.backward else []
        if stage.backward:
            self._start_sums(iteration, slot, layout)
        if stage.kind == "FB" and self._losses_read is not None:
            device.compute.wait(self._losses_read)
        done: Event | None = None
        other = self._param_read[1 - parity]
        for m in slot.micro_batches:
            self._where = f"{slot} micro-batch {m}"
            if len(self._ahead) == MICRO_BATCHES_AHEAD:
                self._ahead.popleft().synchronize()
                self._lane.finish()
            first = m == slot.micro_batches.start
            self._span = self._traced(iteration, slot, m)
            self._lane.begin(iteration.number, slot, m)
            arrived, done, left = self._micro_batch(iteration, slot, m, parity, params, sums, upload if first else None)
            self._ahead.append(done)
            if first and other is not None:
                device.param_upload.wait(other)
            following.issue(arrived)
            if self._download is not None:
                self._download.issue(left)
            if self._span is not None:
                self._span.issued = time.perf_counter()
        assert done is not None
        self._param_read[parity] = done
        if stage.backward:
            self._end_sums(iteration, slot, layout)
        if stage.kind == "FB":
            self._send_losses(iteration, slot)

    def _micro_batch(
        self,
        iteration: Iteration,
        slot: Slot,
        m: int,
        parity: int,
        params: list[Bound],
        sums: list[dict[str, Tensor]],
        upload: Upload | None,
    ) -> tuple[Event, Event, Event]:
        """Issues one micro-batch; returns the events of its inputs' arrival, its computation, its outputs' leaving.

        `parity`: of the parameters' slot. The first one waits for the `upload` of the parameters.
        """
        device, context = self._device, self._context
        io = context.bounds.stages[slot.stage_index]
        pass_index = iteration.number * context.plan.rounds + slot.round
        turn = self._computed % RING
        self._computed += 1
        x = self._receive(self._x, turn, io.x_in, pass_index, m)
        dy = self._receive(self._dy, turn, io.dy_in, pass_index, m) if io.dy_in else None
        arrived = device.activation_upload.record()
        device.compute.wait(arrived)
        accesses = io.x_out if io.dx_out is None else (io.dx_out,)
        entries = range(turn, turn + RING * len(accesses), RING)
        outputs = {
            a.boundary: self._out.claim(entry, device.compute) for a, entry in zip(accesses, entries, strict=True)
        }
        if self._span is not None and context.trace is not None:
            self._span.freed = [self._left[entry] for entry in entries if entry in self._left]
            self._span.embedded = context.trace.board.published(("version", 0), context.read_version(iteration.number))
        self._inputs.select(iteration, m, device.compute)
        layout = DocumentShape.of(iteration.documents[m], iteration.length)
        metered = context.meter
        layers = metered if metered is not None and metered.layers else None
        timed = partial(meter.timed, layers, device.compute.stamp, iteration.number)
        describe, read = partial(self._inputs.describe, iteration, layout), [bound.params for bound in params]
        work = StagePass(self._spec, slot.stage, describe, read, sums, x, dy, outputs, timed)
        scale, balanced = iteration.scale, slot.stage.backward and self._spec.router_aux_loss_coef > 0
        if slot.stage.kind == "FB" or balanced:
            scale *= self._wait(("scale",), context.read_version(iteration.number))
        if balanced:  # not a part of the graph's key: it changes with the number of supervised tokens
            share = scale * max(iteration.supervised, 1) / context.plan.micro_batches
            device.compute.run("", lambda: self._inputs.balance.fill_(share))
        key = (slot.stage_index, layout, scale if slot.stage.kind == "FB" else None)
        places = None if layers is not None else (parity, turn)
        self._compute(work, params, slot, m, scale, key, places, upload)
        if slot.stage.kind == "FB":
            device.compute.run("", lambda: self._losses[m].copy_(self._loss))
        done = device.compute.record()
        self._x.release(turn, done)
        if dy is not None:
            self._dy.release(turn, done)
        device.activation_download.wait(done)
        left = done
        for access, entry in zip(accesses, entries, strict=True):
            left = self._send(access, pass_index, m, outputs[access.boundary])
            self._out.release(entry, left)
            if self._span is not None:
                self._left[entry] = device.activation_download.mark()
        return arrived, done, left

    def _compute(
        self,
        work: StagePass,
        params: list[Bound],
        slot: Slot,
        m: int,
        scale: float,
        key: Hashable,
        places: Hashable | None,
        upload: Upload | None,
    ) -> None:
        """Layer by layer where parameters are still on their way, so that the optimizer may be at the later ones.

        With the upload of a slot its quantized parameters are dequantized, once for all micro-batches.
        `key` and `places` are those of Device.repeat; without places there are time stamps inside, and it is not used.
        """
        compute, where = self._device.compute, f"{slot} micro-batch {m}"
        if upload is None or upload.is_issued:
            if upload is not None:
                compute.wait(upload.finish())
            with computing(self._span, compute, upload and upload.arrival()), self._lane.computing(compute):
                for bound in params if upload is not None else ():
                    self._dequantize(slot, bound)
                if places is None:
                    compute.run(where, lambda: work.run(scale, self._loss))
                else:
                    self._device.repeat(key, places, where, lambda: work.run(scale, self._loss))
            return
        for i, layer in enumerate(slot.stage.layers):
            units = self._spec.stack[layer].units
            compute.wait(upload.finish(units))
            with computing(self._span, compute, upload.arrival(units)), self._lane.computing(compute):
                self._dequantize(slot, params[i])
                compute.run(where, lambda i=i: work.step(i, scale, self._loss))

    def _dequantize(self, slot: Slot, bound: Bound) -> None:
        """Into one buffer for all stages: the stream has computed the stage before by then."""
        if bound.quantized:
            self._device.compute.run(f"{slot} dequantizing", bound.dequantize)

    def _traced(self, iteration: Iteration, slot: Slot, work: Work) -> Span | None:
        trace = self._context.trace
        return None if trace is None else trace.begin(iteration.number, slot, work)

    def _receive(self, ring: Ring, entry: int, access: Access, pass_index: int, m: int) -> Tensor:
        stream = self._device.activation_upload
        source, key, number = self._context.buffers.locate(access, pass_index, m)
        written = self._wait(key, number - 1)
        if written is not None:
            stream.wait(written)
        target = ring.claim(entry, stream)
        self._lane.up += source.nbytes
        with copying(self._span, stream):
            stream.run(f"{self._where} input", lambda: target.copy_(source, non_blocking=True))
        self._context.board.publish(key, number, stream.record())
        return target

    def _send(self, access: Access, pass_index: int, m: int, source: Tensor) -> Event:
        stream = self._device.activation_download
        target, key, number = self._context.buffers.locate(access, pass_index, m)
        read = self._wait(key, number - 1) if number else None
        if read is not None:
            stream.wait(read)
        self._lane.down += source.nbytes
        stream.run(f"{self._where} output", lambda: target.copy_(source, non_blocking=True))
        sent = stream.record()
        self._context.board.publish(key, number, sent)
        return sent

    def _start_sums(self, iteration: Iteration, slot: Slot, layout: GradLayout) -> None:
        """Gradient sums start at zero, or in a later round at the partial sums that the round before left."""
        sums, compute = self._sums[: layout.size], self._device.compute
        if slot.round == 0:
            with computing(self._traced(iteration, slot, "zeroing"), compute):
                compute.run(f"{slot} sums", lambda: sums.zero_())
            return
        previous = iteration.number * self._context.plan.rounds + slot.round - 1
        for unit in layout.units:
            compute.wait(self._wait(("grad", unit), previous))
            source, offset = self._context.store.units[unit].grad, layout.offsets[unit]
            target = sums[offset : offset + len(source)]
            compute.run(f"{slot} partial sums", lambda t=target, s=source: t.copy_(s, non_blocking=True))

    def _end_sums(self, iteration: Iteration, slot: Slot, layout: GradLayout) -> None:
        """Rounds the sums once into the slot that is downloaded, which frees them for the next stage."""
        self._flush()
        compute = self._device.compute
        if self._grads_read is not None:
            compute.wait(self._grads_read)
        sums, grads = self._sums[: layout.size], self._grads[: layout.size]
        with computing(self._traced(iteration, slot, "rounding"), compute):
            compute.run(f"{slot} rounding", lambda: grads.copy_(sums))
        self._device.grad_download.wait(compute.record())
        self._download = Download(self._context, self._device, layout, iteration.number, slot, grads)

    def _send_losses(self, iteration: Iteration, slot: Slot) -> None:
        """Behind the gradient of the last micro-batch, for which the stream has waited."""
        stream = self._device.activation_download
        part = slice(slot.micro_batches.start, slot.micro_batches.stop)
        target, source = iteration.losses[part], self._losses[part]
        stream.run(f"{slot} losses", lambda: target.copy_(source, non_blocking=True))
        self._losses_read = stream.record()
        iteration.losses_sent.append(self._losses_read)
        self._context.board.publish(("loss", slot.round), iteration.number)
