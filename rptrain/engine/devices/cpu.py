"""A CPU worker that behaves like a GPU, with a thread for each stream."""

import queue
import threading
import time
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from rptrain.engine.devices.base import STREAMS, Event, Mark, Probe, stamp
from rptrain.engine.errors import Aborted


class CpuEvent:
    def __init__(self, aborted: Callable[[], bool]) -> None:
        self._passed = threading.Event()
        self._aborted = aborted

    def set(self) -> None:
        self._passed.set()

    def synchronize(self) -> None:
        while not self._passed.wait(0.1):  # a failed stream never reaches the event
            if self._aborted():
                raise Aborted


class CpuMark:
    def __init__(self) -> None:
        self._time: float | None = None

    def set(self) -> None:
        self._time = time.perf_counter()

    def __call__(self) -> float:
        assert self._time is not None
        return self._time

    def passed(self) -> bool:
        return self._time is not None


class CpuStream:
    """A thread that runs the work of a queue in order."""

    def __init__(
        self,
        name: str,
        aborted: Callable[[], bool],
        fail: Callable[[str, BaseException], None],
        probe: Probe | None,
    ) -> None:
        self._aborted, self._fail, self._probe = aborted, fail, probe
        self._queue: queue.SimpleQueue[tuple[str, Callable[[], object]] | None] = queue.SimpleQueue()
        self._working = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        while (item := self._queue.get()) is not None:
            where, work = item
            if self._aborted():
                continue
            self._working = True
            try:
                if self._probe is not None and where:
                    self._probe(where)
                work()
            except Aborted:
                continue
            except BaseException as error:  # noqa: BLE001 - handed to the caller's thread
                self._fail(where, error)
            finally:
                self._working = False

    def run(self, where: str, work: Callable[[], object]) -> None:
        self._queue.put((where, work))

    def copy(self, where: str, target: Tensor, source: Tensor) -> None:
        self.run(where, lambda: target.copy_(source))

    def wait(self, event: Event) -> None:
        self._queue.put(("", event.synchronize))

    def record(self) -> CpuEvent:
        event = CpuEvent(self._aborted)
        self._queue.put(("", event.set))
        return event

    def busy(self) -> bool:
        return self._working or not self._queue.empty()

    def mark(self) -> Mark:
        mark = CpuMark()
        self._queue.put(("", mark.set))
        return mark

    def stamp(self) -> Callable[[], float]:
        return stamp()

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()


class CpuDevice:
    """A CPU worker. Each operation uses one thread, because sums must not depend on the number of workers."""

    def __init__(
        self,
        name: str,
        aborted: Callable[[], bool],
        fail: Callable[[str, BaseException], None],
        probe: Probe | None = None,
    ) -> None:
        self.name = name
        streams = {s: CpuStream(f"{name} {s}", aborted, fail, probe) for s in STREAMS}
        self._streams = tuple(streams.values())
        self.compute = streams["compute"]
        self.param_upload = streams["param_upload"]
        self.grad_download = streams["grad_download"]
        self.activation_upload = streams["activation_upload"]
        self.activation_download = streams["activation_download"]

    @property
    def label(self) -> str:
        return self.name

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def numa_node(self) -> int:
        return -1

    def enter(self) -> None:
        """The CPU is always current."""

    def replay(self, key: Hashable, buffer_slots: Hashable, where: str, work: Callable[[], object]) -> None:
        self.compute.run(where, work)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype)

    def finish(self) -> None:
        """Returns at once: the threads' remaining work holds references to its memory."""

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
