"""A device's thread: it takes the slots that the plan gives its device, and issues their transfers and computation."""

import queue
import threading
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor

from rptrain.engine.context import Context
from rptrain.engine.device_buffers import DeviceBuffers, Ring
from rptrain.engine.devices.base import Device, Event
from rptrain.engine.evaluate import Evaluator
from rptrain.engine.footprint import Footprint
from rptrain.engine.iteration import Evaluation, Iteration
from rptrain.engine.stage_pass import StagePass, StageTensors, StageWeights
from rptrain.engine.trace import Arrival
from rptrain.engine.transfer.copies import DeviceLink, Download, Upload
from rptrain.engine.transfer.inputs import DocumentShape
from rptrain.engine.transfer.layouts import Bound, GradLayout, ParamLayout
from rptrain.engine.transfer.staging import Staging
from rptrain.kernels.quant import make_tables
from rptrain.schedule.lower import RING, Access, StageIO
from rptrain.schedule.plan import Slot
from rptrain.utils import numa
from rptrain.utils.liveness import progressed

# The most micro-batches, and pieces of them, that are issued and not computed yet. With more operations in its queues
# the driver blocks launches, and those of the other devices with them.
MICRO_BATCHES_AHEAD = 2
PIECES_AHEAD = 4


@dataclass(frozen=True)
class _SlotRun:
    """A slot of an iteration with its buffers on the device."""

    iteration: Iteration
    slot: Slot
    io: StageIO
    parity: int  # the end of the parameters' buffer: 0 or 1
    end: int  # the end of the accumulators' buffer: 0 or 1; 0 in a forward stage
    params: list[Bound]  # by layer of the stage
    sums: list[dict[str, Tensor]]  # gradient accumulators by layer; none in a forward stage
    upload: Upload  # of the parameters


@dataclass
class _Summed:
    """The place of a backward stage's gradient accumulators, and the event after which they were downloaded.

    The event is None while some of the downloads are not issued.
    """

    start: int
    stop: int
    downloaded: Event | None = None


@dataclass(frozen=True)
class _Output:
    """An output of a micro-batch in an entry of the output ring."""

    access: Access
    entry: int
    tensor: Tensor


class Worker:
    """One thread and one device. `submit` hands it iterations in order, and None to end it."""

    def __init__(self, context: Context, index: int, device: Device, sizes: Footprint, staging: Staging | None) -> None:
        """`staging` is given if some units are file-backed, and is closed with the worker."""
        self._context, self._index, self._device, self._staging = context, index, device, staging
        self._recorder = context.recorder.devices[index]
        spec, layout = context.store.spec, context.store.layout
        self._spec = spec
        self._buffers = DeviceBuffers.allocate(device, spec, layout, sizes)
        self._link = DeviceLink(context, device, staging, self._buffers.rounded)
        if any(unit.quantized for unit in spec.units):
            make_tables(device.torch_device)
        self._param_read: list[Event | None] = [None, None]
        self._summed: dict[int, _Summed] = {}  # of the last backward stage at each end
        self._latest: _Summed | None = None  # of the last backward stage
        self._backward = 0  # backward stages so far; selects the end of the accumulators of the next one
        self._computed = 0  # micro-batches so far; selects the rings' entries
        self._ahead: deque[Event] = deque()  # ends of the last micro-batches that were issued
        self._pieces: deque[Event] = deque()  # ends of the last pieces of micro-batches that were issued
        self._losses_read: Event | None = None
        self._evaluator = Evaluator(context, index, device, self._buffers, staging)
        self._layouts = [ParamLayout(spec, stage, layout.dtype) for stage in context.plan.stages]
        self._grad_layouts = [GradLayout(spec, stage) for stage in context.plan.stages]
        self._params_of: dict[tuple[int, int], list[Bound]] = {}  # by stage and end of the parameters' buffer
        self._sums_of: dict[tuple[int, int], list[dict[str, Tensor]]] = {}  # by stage and end of the accumulators'
        self._download: Download | None = None
        self._turn = 0  # slots so far; selects the parameter slot of the next one
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
        """Submits the next iteration, or an evaluation between two. None ends the thread after its last work."""
        self._queue.put(iteration)

    def join(self) -> None:
        self._thread.join()
        if self._staging is not None:
            self._staging.close()

    # ---- the thread

    def _main(self) -> None:
        numa.bind(numa.topology().near(self._device.numa_node))
        self._device.enter()
        number, following = self._first_after(-1)
        upload = self._upload(number, following, 0)
        while (iteration := self._take(upload)) is not None:
            if iteration.number < number:  # this device has no slot in it
                continue
            slots = self._slots(iteration.number, iteration.micro_batches)
            if not slots or slots[0].index != following.index:  # the slot before was expected in vain
                self._drop(upload)
                upload = None
                self._overwrite_after(1 - self._turn % 2)
            number, following = self._first_after(iteration.number)
            program = [*((iteration.number, slot) for slot in slots), (number, following)]
            for (_, slot), then in pairwise(program):
                upload = upload or self._upload(iteration.number, slot, self._turn)
                following_upload = self._upload(*then, self._turn + 1, len(slot.micro_batches))
                self._where = str(slot)
                self._run(iteration, slot, self._turn % 2, upload, following_upload)
                self._turn += 1
                upload = following_upload
            upload = upload or self._upload(number, following, self._turn)

    def _slots(self, number: int, micro_batches: int | None = None) -> list[Slot]:
        """The slots of the device in an iteration with this many micro-batches, by default all of the plan."""
        return [slot for slot in self._context.plan.slots(number, micro_batches) if slot.device == self._index]

    def _first_after(self, number: int) -> tuple[int, Slot]:
        """The first slot of the device after an iteration, with its own, if the next iterations are not short."""
        while not (slots := self._slots(number + 1)):
            number += 1
        return number + 1, slots[0]

    def _drop(self, upload: Upload) -> None:
        """Leaves out the rest of an upload, except what is read from files, in the order of its requests."""
        if self._staging is not None:
            self._flush()
            upload.finish()

    def _take(self, upload: Upload) -> Iteration | None:
        """Returns the next iteration. Before it blocks, it sends pending gradients to the optimizer.

        `upload`: the next upload, whose file-backed units were requested before those that an evaluation reads.
        """
        if self._queue.empty():
            self._flush()
        while isinstance(iteration := self._queue.get(), Evaluation):
            if self._staging is not None:
                upload.finish()
            end = self._turn % 2  # holds the upload for the next slot
            self._evaluator.run(iteration, self._buffers.params.rest(end, upload.nbytes), self._param_read[1 - end])
        if iteration is None:
            self._flush()
            return None
        self._buffers.inputs.upload(iteration, self._device.activation_upload)
        return iteration

    def _upload(self, number: int, slot: Slot, turn: int, count: int = 1) -> Upload:
        """The upload for a slot, in `count` windows."""
        layout = self._layouts[slot.stage_index]
        target = self._buffers.params.part(turn % 2, layout.size)
        return Upload(self._link, layout, number, slot, target, count)

    def _flush(self) -> None:
        if self._download is not None:
            self._download.flush()
            assert self._latest is not None
            self._latest.downloaded = self._device.grad_download.record()
            self._download = None

    def _wait(self, key: Hashable, number: int) -> Any:
        """Waits for another thread. Sends pending gradients first, because that thread may wait for the optimizer."""
        if not self._context.board.ready(key, number):
            self._flush()
        return self._context.board.wait(key, number)

    def _run(self, iteration: Iteration, slot: Slot, parity: int, upload: Upload, following: Upload) -> None:
        device, stage, layout = self._device, slot.stage, self._grad_layouts[slot.stage_index]
        if upload.is_blocked():
            self._flush()
        end = self._backward % 2 if stage.backward else 0
        io, params = self._context.bounds.stages[slot.stage_index], self._bind_params(slot.stage_index, parity)
        sums = self._bind_sums(slot.stage_index, end) if stage.backward else []
        run = _SlotRun(iteration, slot, io, parity, end, params, sums, upload)
        if stage.backward:
            self._start_sums(iteration, slot, layout, end)
        if stage.kind == "FB" and self._losses_read is not None:
            device.compute.wait(self._losses_read)
        if not slot.micro_batches:
            self._drop(upload)
            self._overwrite_after(1 - parity)
        fit = self._buffers.params.fit(upload.nbytes, following.nbytes)  # always, unless the iteration is short
        for m in slot.micro_batches:
            self._where = f"{slot} micro-batch {m}"
            if len(self._ahead) == MICRO_BATCHES_AHEAD:
                self._ahead.popleft().synchronize()
                self._recorder.finish()
            self._recorder.begin(iteration.number, slot, m)
            arrived, done, left = self._micro_batch(run, m)
            self._ahead.append(done)
            if m == slot.micro_batches.start:
                self._overwrite_after(1 - parity)
            if fit:
                following.issue(arrived)
            if self._download is not None:
                self._download.issue(left)
            self._recorder.issued()
        if slot.micro_batches:
            self._param_read[parity] = self._ahead[-1]
        if not fit:
            self._overwrite_after(parity)
        if stage.backward:
            self._end_sums(iteration, slot, layout, end)
        if stage.kind == "FB":
            self._send_losses(iteration, slot)

    def _overwrite_after(self, end: int) -> None:
        """Lets uploads wait until the parameters at an end of the buffer, if any, are no longer read."""
        if (read := self._param_read[end]) is not None:
            self._device.param_upload.wait(read)

    def _bind_params(self, stage: int, end: int) -> list[Bound]:
        """The parameters of a stage at an end of the buffer: hundreds of views, made once because that takes long."""
        if (stage, end) not in self._params_of:
            layout = self._layouts[stage]
            self._params_of[stage, end] = layout.bind(
                self._buffers.params.part(end, layout.size), self._buffers.prepared
            )
        return self._params_of[stage, end]

    def _bind_sums(self, stage: int, end: int) -> list[dict[str, Tensor]]:
        """The gradient accumulators of a backward stage at an end of their buffer."""
        if (stage, end) not in self._sums_of:
            layout = self._grad_layouts[stage]
            self._sums_of[stage, end] = layout.bind(self._buffers.sums.part(end, layout.size))
        return self._sums_of[stage, end]

    def _micro_batch(self, run: _SlotRun, m: int) -> tuple[Event, Event, Event]:
        """Issues one micro-batch. Its events: inputs have arrived, computation has ended, outputs are on the host."""
        entry = self._computed % RING
        self._computed += 1
        progressed()
        x, dy, arrived = self._receive(run, m, entry)
        outputs = self._claim_outputs(run, entry)
        done = self._compute(run, m, entry, x, dy, outputs)
        left = self._send(run, m, outputs, done)
        return arrived, done, left

    # ---- receive

    def _receive(self, run: _SlotRun, m: int, entry: int) -> tuple[Tensor, Tensor | None, Event]:
        """Uploads the stage's input activations and, for a B stage, the gradient of its output."""
        io = run.io
        x = self._upload_input(self._buffers.x, entry, io.x_in, run.iteration.number, m)
        dy = self._upload_input(self._buffers.dy, entry, io.dy_in, run.iteration.number, m) if io.dy_in else None
        arrived = self._device.activation_upload.record()
        self._device.compute.wait(arrived)
        return x, dy, arrived

    def _upload_input(self, ring: Ring, entry: int, access: Access, iteration: int, m: int) -> Tensor:
        stream = self._device.activation_upload
        source, key, number = self._context.buffers.locate(access, iteration, m)
        written = self._wait(key, number - 1)
        if written is not None:
            stream.wait(written)
        target = ring.claim(entry, stream)
        with self._recorder.receiving(stream, source.nbytes):
            stream.copy(f"{self._where} input", target, source)
        self._context.board.publish(key, number, stream.record())
        return target

    # ---- compute

    def _claim_outputs(self, run: _SlotRun, entry: int) -> list[_Output]:
        """Claims entries of the output ring: for input entry i, these are i, i + RING, i + 2 RING, …"""
        written = run.io.x_out if run.io.dx_out is None else (run.io.dx_out,)
        entries = range(entry, entry + RING * len(written), RING)
        outputs = [
            _Output(access, at, self._buffers.out.claim(at, self._device.compute))
            for access, at in zip(written, entries, strict=True)
        ]
        self._recorder.claimed(entries, self._context.read_version(run.iteration.number))
        return outputs

    def _compute(
        self, run: _SlotRun, m: int, entry: int, x: Tensor, dy: Tensor | None, outputs: list[_Output]
    ) -> Event:
        iteration, stage, stream = run.iteration, run.slot.stage, self._device.compute
        self._buffers.inputs.select(iteration, m, stream)
        layout = DocumentShape.of(iteration.documents[m], iteration.length)
        timed = self._context.recorder.layer_timer(stream, iteration.number, run.slot)
        work = StagePass(
            self._spec,
            stage,
            partial(self._buffers.inputs.describe, iteration, layout),
            StageWeights([bound.params for bound in run.params], run.sums),
            StageTensors(x, dy, {output.access.boundary: output.tensor for output in outputs}),
            timed,
        )
        scale = self._scale(run)
        graph = (run.slot.stage_index, layout, scale if stage.kind == "FB" else None)
        self._launch(run, m, work, scale, None if timed else (graph, (run.parity, run.end, entry)))
        if stage.kind == "FB":
            stream.copy("", self._buffers.losses[m], self._buffers.loss)
        done = stream.record()
        self._buffers.x.release(entry, done)
        if dy is not None:
            self._buffers.dy.release(entry, done)
        return done

    def _scale(self, run: _SlotRun) -> float:
        """The factor of the loss. Stages that balance experts get their share of it as a tensor.

        The share is not a part of a graph's key, because it changes with the number of supervised tokens.
        """
        iteration, stage = run.iteration, run.slot.stage
        scale, balanced = iteration.scale, stage.backward and self._spec.router_aux_loss_coef > 0
        if stage.kind == "FB" or balanced:
            scale *= self._wait(("scale",), self._context.read_version(iteration.number))
        if balanced:
            share = scale * max(iteration.supervised, 1) / iteration.full
            self._device.compute.run("", lambda: self._buffers.inputs.balance.fill_(share))
        return scale

    def _launch(
        self, run: _SlotRun, m: int, work: StagePass, scale: float, graph: tuple[Hashable, Hashable] | None
    ) -> None:
        """Issues the stage's computation in pieces.

        Parameters are prepared (dequantized, quantized to FP8, or transposed) with the first micro-batch of a slot. If
        some of them are still to be uploaded then, it is issued layer by layer.

        `graph`: key and buffer slots, with which pieces are replayed (devices/base.py); None: they are launched.
        """
        stream, upload = self._device.compute, run.upload
        first, arrival = m == run.slot.micro_batches.start, None
        if first and not upload.is_issued:
            self._launch_by_layer(run, work, scale)
            return
        if first:
            stream.wait(upload.finish())
            arrival = upload.arrival()
        for steps in work.pieces():
            with self._issuing(arrival):
                for bound in run.params if first and steps.start == 0 else ():  # not between pieces: Device.replay
                    self._prepare(run.slot, bound)
                piece = partial(work.run, steps, scale, self._buffers.loss)
                if graph is None:
                    stream.run(self._where, piece)
                else:
                    key, buffer_slots = graph
                    self._device.replay((key, steps), buffer_slots, self._where, piece)

    def _launch_by_layer(self, run: _SlotRun, work: StagePass, scale: float) -> None:
        """Issues each layer once it is uploaded: the optimizer may still update the later ones meanwhile."""
        stream, layers, arrival = self._device.compute, run.slot.stage.layers, None
        for steps in work.pieces(by_layer=True):
            new = steps.start if steps.start < len(layers) else None  # the layer that is read for the first time
            if new is not None:
                units = self._spec.stack[layers[new]].units
                stream.wait(run.upload.finish(units))
                arrival = run.upload.arrival(units)
            with self._issuing(arrival):
                if new is not None:
                    self._prepare(run.slot, run.params[new])
                stream.run(self._where, partial(work.run, steps, scale, self._buffers.loss))

    @contextmanager
    def _issuing(self, arrival: Arrival | None) -> Iterator[None]:
        """Around the launch of a piece: waits for room in the driver's queue, and records the piece."""
        stream = self._device.compute
        if len(self._pieces) == PIECES_AHEAD:
            with self._recorder.waiting_for_room():
                self._pieces.popleft().synchronize()
        with self._recorder.computing(stream, arrival):
            yield
        self._pieces.append(stream.record())

    def _prepare(self, slot: Slot, bound: Bound) -> None:
        """Fills the buffer that all stages share; the stream has finished the previous stage by then."""
        if bound.prepared:
            self._device.compute.run(f"{slot} preparing parameters", bound.prepare)

    # ---- send

    def _send(self, run: _SlotRun, m: int, outputs: list[_Output], done: Event) -> Event:
        """Downloads the outputs into the boundary buffers; the event of the last of them, or `done` without any."""
        stream = self._device.activation_download
        stream.wait(done)
        sent = done
        for output in outputs:
            target, key, number = self._context.buffers.locate(output.access, run.iteration.number, m)
            read = self._wait(key, number - 1) if number else None
            if read is not None:
                stream.wait(read)
            stream.copy(f"{self._where} output", target, output.tensor)
            sent = stream.record()
            self._context.board.publish(key, number, sent)
            self._buffers.out.release(output.entry, sent)
            self._recorder.sent(output.entry, stream, target.nbytes)
        return sent

    # ---- gradients and losses

    def _start_sums(self, iteration: Iteration, slot: Slot, layout: GradLayout, end: int) -> None:
        """Sets gradient accumulators to zero or, in a later round of the group, to the sums of its previous rounds.

        These are uploaded while the device computes the last micro-batches of the slot before, in the stream of
        downloads: parameters do not wait for them.
        """
        sums, compute = self._buffers.sums.part(end, layout.size), self._device.compute
        start, stop = self._buffers.sums.range(end, layout.size)
        stream = compute if slot.turn == 0 else self._device.grad_download
        for before in self._summed.values():
            if start < before.stop and before.start < stop:
                if before.downloaded is None:
                    self._flush()
                assert before.downloaded is not None
                stream.wait(before.downloaded)
        if slot.turn == 0:
            with self._recorder.computing_gradients(compute, iteration.number, slot):
                compute.run(f"{slot} sums", lambda: sums.zero_())
            return
        previous = iteration.number * self._context.plan.turns + slot.turn - 1
        for unit in layout.units:
            stream.wait(self._wait(("grad", unit, slot.group), previous))
            source, offset = self._context.store.units[unit].grads[slot.group], layout.offsets[unit]
            target = sums[offset : offset + len(source)]
            stream.copy(f"{slot} partial sums", target, source)
        compute.wait(stream.record())

    def _end_sums(self, iteration: Iteration, slot: Slot, layout: GradLayout, end: int) -> None:
        """Begins the download of the accumulators. The next backward stage has its own at the other end."""
        self._backward += 1
        if not layout.size:  # all of its weights are frozen
            return
        self._flush()
        self._latest = self._summed[end] = _Summed(*self._buffers.sums.range(end, layout.size))
        sums, computed = self._buffers.sums.part(end, layout.size), self._device.compute.record()
        self._download = Download(self._link, layout, iteration.number, slot, sums, computed)

    def _send_losses(self, iteration: Iteration, slot: Slot) -> None:
        """Downloads the losses after the gradient of the last micro-batch, for which the stream has waited."""
        stream = self._device.activation_download
        part = slice(slot.micro_batches.start, slot.micro_batches.stop)
        target, source = iteration.losses[part], self._buffers.losses[part]
        stream.run(f"{slot} losses", lambda: target.copy_(source, non_blocking=True))
        self._losses_read = stream.record()
        iteration.losses_sent.append(self._losses_read)
        self._context.board.publish(("loss", slot.round), iteration.number)
