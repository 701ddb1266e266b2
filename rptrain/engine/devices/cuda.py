"""A GPU as a device: five CUDA streams, CUDA graphs, and memory from torch's allocator under a limit."""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor

from rptrain.engine.devices import driver
from rptrain.engine.devices.base import STREAMS, Event, Mark, Probe
from rptrain.engine.memory.page_locking import PageableRanges
from rptrain.kernels.toolchain_errors import explained
from rptrain.utils import numa
from rptrain.utils.nvml import Driver


class CudaEvent:
    """A recorded event. Its CUDA event is reused once nothing refers to this object, because creating one is slow."""

    def __init__(self, event: torch.cuda.Event, unused: list[torch.cuda.Event]) -> None:
        self.event, self._unused = event, unused

    def __del__(self) -> None:
        self._unused.append(self.event)

    def synchronize(self) -> None:
        self.event.synchronize()


class CudaStream:
    """Runs work at once; its launches are asynchronous and ordered by the stream.

    Work allocates from `pool`, if there is one.
    """

    def __init__(self, device: "CudaDevice", pool: torch.cuda.MemPool | None = None, priority: int = 0) -> None:
        """Kernels of a stream with a lower `priority` number start first."""
        self._device, self._pool = device, pool
        self._stream = torch.cuda.Stream(device.torch_device, priority=priority)
        self._handle = self._stream.cuda_stream
        self._unused_events: list[torch.cuda.Event] = []
        self._unused_marks: list[torch.cuda.Event] = []
        self._capturing = threading.Lock()  # held during a capture

    def run(self, where: str, work: Callable[[], object]) -> None:
        if self._device.probe is not None:
            self._device.probe(where)
        with ExitStack() as stack:
            stack.enter_context(torch.cuda.stream(self._stream))
            if self._pool is not None:
                stack.enter_context(torch.cuda.use_mem_pool(self._pool))
            work()

    def copy(self, where: str, target: Tensor, source: Tensor) -> None:
        pageable = self._device.pageable
        if pageable is not None and (target.data_ptr() in pageable or source.data_ptr() in pageable):
            # It may wait for the stream; PyTorch releases the interpreter lock meanwhile.
            self.run(where, lambda: target.copy_(source, non_blocking=True))
            return
        if self._device.probe is not None:
            self._device.probe(where)
        assert target.nbytes == source.nbytes, (target.shape, source.shape)
        driver.copy(target.data_ptr(), source.data_ptr(), target.nbytes, self._handle)

    def launch(self, where: str, graph: int) -> None:
        """Launches the instantiated graph with this handle. It must not draw random numbers."""
        if self._device.probe is not None:
            self._device.probe(where)
        driver.launch(graph, self._handle)

    def capture(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """Captures the operations of `work` as a graph that allocates from the stream's pool. None of them runs.

        Other threads may continue: their operations are neither captured nor forbidden.
        """
        assert self._pool is not None
        pool: Any = self._pool.id
        graph = torch.cuda.CUDAGraph()
        with self._capturing, torch.cuda.stream(self._stream):
            graph.capture_begin(pool=pool, capture_error_mode="relaxed")
            with ExitStack() as failed:
                failed.callback(_abandon, graph)
                work()
                failed.pop_all()
            graph.capture_end()
        return graph

    def close(self) -> None:
        """Frees the pool. Nothing may run, and its graphs must have been deleted."""
        self._pool = None

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        driver.wait(self._handle, event.event.cuda_event)

    def record(self) -> CudaEvent:
        event = self._record(self._unused_events, blocking=True)  # waiting threads leave their core to others
        return CudaEvent(event, self._unused_events)

    def _record(self, unused: list[torch.cuda.Event], **kind: bool) -> torch.cuda.Event:
        try:
            event = unused.pop()
        except IndexError:
            event = torch.cuda.Event(**kind)
            event.record(self._stream)  # makes it
            return event
        driver.record(event.cuda_event, self._handle)
        return event

    def busy(self) -> bool:
        """Whether work has not ended; False during a capture, which a query would break."""
        if not self._capturing.acquire(blocking=False):
            return False
        try:
            return not self._stream.query()
        finally:
            self._capturing.release()

    def mark(self) -> Mark:
        return self._device.mark(self._record(self._unused_marks, enable_timing=True), self._unused_marks)

    def stamp(self) -> Callable[[], float]:
        return self.mark()  # work is run as it is appended


class CudaMark:
    """A time stamp; a call waits until the stream has passed it.

    Later, the worker's thread replaces the event with its time (`CudaDevice.mark`): the event can be used again.
    """

    def __init__(self, device: "CudaDevice", event: torch.cuda.Event, unused: list[torch.cuda.Event]) -> None:
        self._device, self._event, self._unused = device, event, unused
        self._seconds: float | None = None

    def __call__(self) -> float:
        if self._seconds is None:
            try:
                found = self._device.seconds(self._event)
            except RuntimeError:  # also if the event was recorded again after `resolve`
                if self._seconds is None:
                    raise
            else:
                if self._seconds is None:
                    return found
        return self._seconds

    def passed(self) -> bool:
        return self._seconds is not None or self._event.query() or self._seconds is not None

    def resolve(self) -> bool:
        """Replaces the event with its time if it has passed."""
        if not driver.passed(self._event.cuda_event):
            return False
        since = driver.elapsed(self._device.origin.cuda_event, self._event.cuda_event)
        self._seconds = self._device.origin_seconds + since
        self._unused.append(self._event)
        return True


def _abandon(graph: torch.cuda.CUDAGraph) -> None:
    """Ends the capture of failed work, unless the failure has ended it already."""
    with suppress(RuntimeError):
        graph.capture_end()


class CudaDevice:
    """One GPU. `limit` caps the memory of torch's allocator, in bytes, without the CUDA context.

    `pageable`: the host memory used in copies that is not page-locked, whose copies block; None if all of it is.

    `replay` launches work operation by operation the first time, which compiles kernels and fills the libraries'
    caches, and then captures a CUDA graph for each set of buffer slots: from then on the work costs the host one
    launch. All graphs share one pool of memory: the computations of a stream follow one another, so a graph may reuse
    the memory of another one.
    """

    def __init__(
        self,
        index: int,
        limit: int | None = None,
        probe: Probe | None = None,
        pageable: PageableRanges | None = None,
    ) -> None:
        self.name = f"cuda:{index}"
        self.probe, self.pageable = probe, pageable
        self._device = torch.device("cuda", index)
        properties: Any = torch.cuda.get_device_properties(index)
        self.label = f"{self.name} ({properties.name}, GPU-{str(properties.uuid)[:8]})"
        total = properties.total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total) if limit else 1.0, index)
        with torch.cuda.device(index):
            pool = torch.cuda.MemPool()
            # Gradients are rounded in their download's stream: a short kernel that does not wait for computation.
            pools, priorities = {"compute": pool}, {"grad_download": -1}
            streams = {name: CudaStream(self, pools.get(name), priorities.get(name, 0)) for name in STREAMS}
            self.origin = torch.cuda.Event(enable_timing=True)
            self.origin.record()
            self.origin.synchronize()
            self.origin_seconds = time.perf_counter()
        self.compute = streams["compute"]
        self.param_upload = streams["param_upload"]
        self.grad_download = streams["grad_download"]
        self.activation_upload = streams["activation_upload"]
        self.activation_download = streams["activation_download"]
        self._marks: deque[CudaMark] = deque()  # that have not been resolved, in order
        self._launched: set[Hashable] = set()
        self._graphs: dict[tuple[Hashable, Hashable], tuple[torch.cuda.CUDAGraph, int]] = {}  # with their handles

    @property
    def torch_device(self) -> torch.device:
        return self._device

    @property
    def numa_node(self) -> int:
        found: Any = torch.cuda.get_device_properties(self._device)
        return numa.node_of(f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0")

    def enter(self) -> None:
        torch.cuda.set_device(self._device)
        self.compute.busy()  # a call of the runtime: it makes the device's context current, which the driver requires

    def replay(self, key: Hashable, buffer_slots: Hashable, where: str, work: Callable[[], object]) -> None:
        if key not in self._launched:
            self._launched.add(key)
            self.compute.run(where, work)
            return
        if (key, buffer_slots) not in self._graphs:
            graph = self.compute.capture(work)
            self._graphs[key, buffer_slots] = graph, graph.raw_cuda_graph_exec()
        self.compute.launch(where, self._graphs[key, buffer_slots][1])

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self._device)

    def seconds(self, event: torch.cuda.Event) -> float:
        """The time of a timing event on the scale of `time.perf_counter`; waits for it."""
        event.synchronize()
        return self.origin_seconds + self.origin.elapsed_time(event) / 1e3

    def mark(self, event: torch.cuda.Event, unused: list[torch.cuda.Event]) -> CudaMark:
        """A mark of a recorded event, which goes to `unused` later. Resolves older marks.

        Call it from the worker's thread.
        """
        while self._marks and self._marks[0].resolve():
            self._marks.popleft()
        mark = CudaMark(self, event, unused)
        self._marks.append(mark)
        return mark

    def finish(self) -> None:
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        self.finish()
        for graph, _ in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        torch._C._cuda_clearCublasWorkspaces()  # the compute stream's memory is in its pool
        self.compute.close()
        torch.cuda.set_per_process_memory_fraction(1.0, self._device)
        with torch.cuda.device(self._device):
            torch.cuda.empty_cache()


def context_bytes(index: int) -> int | None:
    """Bytes that this process takes of a GPU besides torch's allocator: context and libraries, which are loaded.

    As the driver counts them. Where it does not count processes (in containers, under WSL), the free memory that
    disappeared while the context was created; None if there was one before. Raises ToolchainError if torch has no
    kernels for the GPU.
    """
    inner: Any = torch._C
    with Driver() as driver:
        gpu = driver.gpu(str(torch.cuda.get_device_properties(index).uuid))
        is_new = gpu is not None and not inner._cuda_hasPrimaryContext(index)
        before = driver.free(gpu) if is_new else None
        _load_libraries(index)
        reserved = torch.cuda.memory_reserved(index)
        if gpu is not None and (own := driver.own_memory(gpu)) is not None:
            return own - reserved
        return None if before is None else before - torch.cuda.mem_get_info(index)[0] - reserved


def _load_libraries(index: int) -> None:
    with torch.cuda.device(index), explained():
        a = torch.ones(256, 256, dtype=torch.bfloat16, device=f"cuda:{index}")
        torch.mm(a, a)  # loads cuBLAS, whose workspace the allocator counts
        torch.cuda.synchronize()
