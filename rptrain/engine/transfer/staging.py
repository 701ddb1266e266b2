"""Page-locked buffers that reader threads fill with file-backed weights ahead of their upload."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from rptrain.engine.context import Context
from rptrain.engine.devices.base import Event
from rptrain.engine.memory.arena import Arena, aligned
from rptrain.engine.memory.page_locking import Locking
from rptrain.models.spec import ModelShape
from rptrain.models.weights.file_backed import file_backed_units
from rptrain.models.weights.safetensors_io import as_bytes
from rptrain.schedule.lower import CHUNK_BYTES, Chunk

BUFFERS = 6  # buffers of a chunk each: 384 MiB, which takes longer to read than a micro-batch to compute
READERS = 4  # threads: a single one copies less from the page cache than a fast disk reads


def buffer_bytes(spec: ModelShape, dtype: torch.dtype) -> int:
    """Bytes of one buffer: a chunk, or the largest file-backed unit."""
    return aligned(min(CHUNK_BYTES, max(spec.units[index].nbytes(dtype.itemsize) for index in file_backed_units(spec))))


def staging_bytes(spec: ModelShape, dtype: torch.dtype, devices: int) -> int:
    """Bytes of all devices' buffers."""
    return devices * BUFFERS * buffer_bytes(spec, dtype)


class StagingBuffers:
    """The buffers of all devices; to be page-locked for CUDA."""

    def __init__(self, spec: ModelShape, dtype: torch.dtype, devices: int) -> None:
        size = buffer_bytes(spec, dtype)
        self._arena = Arena(staging_bytes(spec, dtype, devices))
        self.of = [[self._arena.take(size, torch.uint8) for _ in range(BUFFERS)] for _ in range(devices)]

    def lock(self) -> None:
        """Page-locks what is not locked yet (Arena.lock); before an engine uses it."""
        self._arena.lock()

    @property
    def locking(self) -> Locking:
        return self._arena.locking

    def close(self) -> None:
        """Frees the memory; an engine may be kept for longer than it is used."""
        self._arena.close()
        self.of.clear()


class Staging:
    """A device's buffers. Chunks are read in the order in which they were requested, and taken in the same order.

    Board keys: ("staged", device, buffer) when it was filled, ("emptied", device, buffer) when its copy was issued,
    with the copy's event. Used by the device's thread, and closed when that thread has ended.
    """

    def __init__(self, context: Context, index: int, buffers: list[Tensor]) -> None:
        self._context, self._index, self._buffers = context, index, buffers
        self._requested = self._taken = 0
        self._pool = ThreadPoolExecutor(READERS, f"device {index} reader")

    def request(self, chunks: Iterable[Chunk]) -> None:
        """Requests chunks, which are read as buffers become free. They must be taken in the order of their requests."""
        for chunk in chunks:
            # The pool starts a reader in the calling thread, whose binding to a NUMA node the reader inherits.
            self._pool.submit(self._read, self._requested, chunk)
            self._requested += 1

    def ready(self) -> bool:
        """Whether the next chunk was read."""
        buffer, turn = self._place(self._taken)
        return self._context.board.ready(("staged", self._index, buffer), turn)

    def take(self) -> tuple[int, Tensor]:
        """Returns the next chunk's number, for `emptied`, and its buffer. Blocks until the chunk was read."""
        number = self._taken
        buffer, turn = self._place(number)
        self._context.board.wait(("staged", self._index, buffer), turn)
        self._taken += 1
        return number, self._buffers[buffer]

    def emptied(self, number: int, copied: Event | None) -> None:
        """Allows the buffer to be filled again once the event has passed."""
        buffer, turn = self._place(number)
        self._context.board.publish(("emptied", self._index, buffer), turn, copied)

    def close(self) -> None:
        """Ends the threads, and drops chunks that were not taken."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for number in range(self._taken, self._requested):
            self.emptied(number, None)
        self._pool.shutdown()

    def _place(self, number: int) -> tuple[int, int]:
        """The buffer of the chunk with this number, and the number of its earlier uses."""
        turn, buffer = divmod(number, len(self._buffers))
        return buffer, turn

    def _read(self, number: int, chunk: Chunk) -> None:
        context, (buffer, turn) = self._context, self._place(number)
        state = context.store.units[chunk.unit]
        where = f"reading {state.unit.name}"

        def read() -> None:
            if turn:
                copied = context.board.wait(("emptied", self._index, buffer), turn - 1)
                if copied is not None:
                    copied.synchronize()
            if context.probe is not None:
                context.probe(where)
            assert state.file_backed is not None
            state.file_backed.read(chunk.start, as_bytes(self._buffers[buffer][: chunk.stop - chunk.start]))
            context.board.publish(("staged", self._index, buffer), turn)

        context.guard(lambda: where, read)
