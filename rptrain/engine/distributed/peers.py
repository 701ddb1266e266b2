"""The processes that train together: messages between their host memory, and errors that name a process.

torchrun starts the processes and tells them how to meet, by environment variables. Messages are those of gloo. Its own
errors come late, or never, if a process falls silent, so each process also writes a counter to the store of torchrun
every second, and reads the counters of the others.
"""

import json
import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Self

import torch
from torch import Tensor

from rptrain.engine.distributed.address import SETTING
from rptrain.engine.distributed.launch import Launch
from rptrain.engine.distributed.meeting import host_store, meet, open_store, place
from rptrain.engine.distributed.rendezvous import CONNECTING, bounded, connected, dist, leave, value, within
from rptrain.engine.failures import gpu_failure
from rptrain.utils.errors import TrainingError, UserError, describe

BEAT = 1.0  # seconds between two beats
SILENT = 20.0  # seconds without a beat, after which a process is lost
DIVIDED = 1 << 20  # bytes of a message from which it is divided among groups
FOREVER = timedelta(days=365)  # messages have no limit of time: the counters do
SOURCE = re.compile(r"\[\S+:\d+\] ")  # a file of gloo and a line, in its messages
FAILED = "failed"  # the key of the first process that was lost


class PeerLost(TrainingError):
    """Another process ended, or fell silent. The message names it."""


class Message:
    """A message on its way; the tensor must not be changed before `wait` returns."""

    def __init__(self, peers: "Peers", works: Sequence[Any], other: int, then: Callable[[], None] | None) -> None:
        self._peers, self._works, self._other, self._then = peers, works, other, then

    def wait(self) -> None:
        """Raises PeerLost."""
        try:
            for work in self._works:
                work.wait(FOREVER)
        except RuntimeError as error:
            raise self._peers.lost(self._other) from error
        if self._then is not None:
            self._then()


class Channel:
    """The messages of one thread. Both sides send and receive them in the same order; empty tensors are not sent.

    Each group has connections and a thread of its own, which copies at most about 4 GB/s. Large messages are divided
    among the groups.
    """

    def __init__(self, peers: "Peers", groups: Sequence[Any]) -> None:
        self._peers, self._groups = peers, groups

    def send(self, tensor: Tensor, to: int) -> Sequence[Message]:
        return self._begin(dist.ProcessGroupGloo.send, tensor, to)

    def receive(self, tensor: Tensor, source: int, then: Callable[[], None] | None = None) -> Sequence[Message]:
        """Fills the tensor. The thread that waits for the message calls `then` after it has arrived."""
        return self._begin(dist.ProcessGroupGloo.recv, tensor, source, then)

    def share(self, parts: Sequence[Tensor]) -> None:
        """Sends parts[rank] to every other process and fills the other parts with theirs."""
        messages: list[Message] = []
        for other in self._peers.others:
            messages += self.receive(parts[other], other)
            messages += self.send(parts[self._peers.rank], other)
        for message in messages:
            message.wait()

    def gather(self, value: Any) -> Sequence[Any]:
        """The values of all processes by rank, each a value for JSON. Waits until all processes have called this.

        Raises PeerLost as soon as a process is known to be lost, also if it is silent. The channel cannot be used then:
        a thread that nothing can interrupt may still wait for its message.
        """
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        parts = within(math.inf, lambda: self._gather(own), lambda: self._peers.loss)
        return [json.loads(part.numpy().tobytes()) for part in parts]

    def _gather(self, own: Tensor) -> Sequence[Tensor]:
        """The tensors of all processes, of any lengths."""
        rank, ranks = self._peers.rank, range(self._peers.world)
        sizes = [torch.tensor([len(own)]) for _ in ranks]
        self.share(sizes)
        parts = [own if each == rank else own.new_empty(int(size)) for each, size in zip(ranks, sizes, strict=True)]
        self.share(parts)
        return parts

    def _begin(
        self, call: Callable[..., Any], tensor: Tensor, other: int, then: Callable[[], None] | None = None
    ) -> Sequence[Message]:
        if not tensor.numel():
            return ()
        data = tensor.view(-1).view(torch.uint8)
        parts = data.chunk(len(self._groups)) if len(data) >= DIVIDED else (data,)
        try:
            works = [call(group, [part], other, 0) for group, part in zip(self._groups, parts, strict=False)]
        except RuntimeError as error:
            raise self._peers.lost(other) from error
        return (Message(self._peers, works, other, then),)


class Peers:
    """The connections of a process to the others. Context manager.

    The first process that is lost is known to all: later errors, of processes that end for that reason, name it too.
    """

    def __init__(self, launch: Launch) -> None:
        """Blocks until all processes are there. UserError as `meet`, or if this process cannot host the store."""
        self._launch, self.rank, self.world = launch, launch.rank, launch.world
        self.others = [rank for rank in range(launch.world) if rank != launch.rank]
        self._place = place(launch)
        self._lost: PeerLost | None = None
        self._on_loss: Callable[[PeerLost], None] | None = None
        self._lock = threading.Lock()  # of the loss, and of what it calls
        self._closed = threading.Event()
        self._hosted = host_store(launch) if launch.hosts and launch.rank == 0 else None
        self._met = meet(launch)
        # for heartbeats, channels, and reports at the end: a call that waits keeps its connection
        self._store, self._groups, self._told = (
            dist.PrefixStore(self._met.prefix, open_store(launch)) for _ in range(3)
        )
        self._opened = 0  # groups
        self._looked = time.monotonic()  # when the store last answered
        self._threads = [
            threading.Thread(target=main, name=name, daemon=True)
            for name, main in (("heartbeats", self._beat), ("watch of heartbeats", self._watch))
        ]
        for thread in self._threads:
            thread.start()

    def channel(self, parallel: int = 1) -> Channel:
        """A new channel of `parallel` groups. Every process opens its channels in the same order, in one thread."""
        try:
            return Channel(self, [self._group() for _ in range(parallel)])
        except PeerLost:
            raise
        except RuntimeError as error:
            why = SOURCE.sub("", describe(error))
            raise UserError(
                f"the processes cannot connect to each other, where {self._met.listening} ({why}). If the machines "
                f"reach each other through other interfaces, set {SETTING} on each; a firewall between them must allow "
                "all TCP ports"
            ) from error

    def _group(self) -> Any:
        self._opened += 1
        keys, gloo = dist.PrefixStore(f"group {self._opened}", self._groups), dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=address) for address in self._met.addresses]
        options._threads, options._timeout = 2 * len(options._devices), timedelta(seconds=CONNECTING)  # as torch has it
        return within(CONNECTING, lambda: gloo(keys, self.rank, self.world, options), lambda: self._lost)

    @property
    def loss(self) -> PeerLost | None:
        """The error for the first process that was lost, once the heartbeats show it."""
        return self._lost

    @property
    def place(self) -> str:
        """The address at which this process listens, and its interface."""
        return self._met.places[self.rank]

    def name(self, rank: int) -> str:
        return self._met.names[rank]

    def on_loss(self, call: Callable[[PeerLost], None] | None) -> None:
        """Calls it, in another thread, when the heartbeats show that a process is lost, or now if they have."""
        with self._lock:
            self._on_loss = call
            if call is not None and self._lost is not None:
                call(self._lost)

    def lost(self, rank: int) -> PeerLost:
        """The error for a process that does not answer."""
        return self._error(f"{self.name(rank)} has ended or cannot be reached")

    def fail(self, error: BaseException) -> None:
        """Tells the others that this process has failed."""
        if isinstance(error, KeyboardInterrupt):
            self._error(f"{self.name(self.rank)} was interrupted")
        elif not isinstance(error, PeerLost):
            gpu = gpu_failure(error)
            said = describe(error, with_type=True) if gpu is None else gpu.said.rstrip(".")
            self._error(f"{self.name(self.rank)} has failed: {said}")

    def _error(self, found: str) -> PeerLost:
        """The error for what was found, or for what another process has found before."""
        first = bounded(lambda: self._told.compare_set(FAILED, "", found))
        return PeerLost(f"{found if first is None else first.decode()}: the step cannot be completed")

    def _beat(self) -> None:
        """Writes the own counter and reads those of the others, until a process is lost."""
        seen: dict[int, tuple[str, float]] = dict.fromkeys(self.others, ("", time.monotonic()))
        beats = 0
        while not self._closed.wait(BEAT) and self._lost is None:
            beats += 1
            try:
                error = self._look(beats, seen)
            except RuntimeError as lost:
                error = self._unreachable(describe(lost))
            self._looked = time.monotonic()
            if error is not None:
                self._lose(error)

    def _watch(self) -> None:
        """A call of the store may never return."""
        last = time.monotonic()
        while not self._closed.wait(BEAT) and self._lost is None:
            now = time.monotonic()
            if now - last > SILENT / 2:  # this process was stopped
                self._looked = now
            elif now - self._looked > SILENT:
                self._lose(self._unreachable("no answer"))
            last = now

    def _unreachable(self, why: str) -> PeerLost:
        return PeerLost(f"{self._place}, where the processes meet, cannot be reached: {why}")

    def _lose(self, error: PeerLost) -> None:
        with self._lock:
            if self._lost is None and not self._closed.is_set():
                self._lost = error
                if self._on_loss is not None:
                    self._on_loss(error)

    def _look(self, beats: int, seen: dict[int, tuple[str, float]]) -> PeerLost | None:
        now = time.monotonic()
        if now - self._looked > SILENT / 2:  # this process was stopped: the others have as much time again
            seen |= {rank: (beat, now) for rank, (beat, _) in seen.items()}
        self._store.set(f"beat/{self.rank}", str(beats))
        if found := value(self._store, FAILED):
            return PeerLost(f"{found}: the step cannot be completed")
        for rank in self.others:
            beat = value(self._store, f"beat/{rank}")
            if beat != seen[rank][0]:
                seen[rank] = beat, now
            elif now - seen[rank][1] > SILENT and not value(self._store, f"done/{rank}"):
                return self.lost(rank)
        return None

    def close(self) -> None:
        """Ends the connections. The others know that this process has done its work."""
        self._closed.set()
        if self._lost is None:
            bounded(lambda: self._told.set(f"done/{self.rank}", "1"))
        for thread in self._threads:
            thread.join(2 * BEAT)  # it may wait for the store

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.fail(error)
            leave(self._told, self._launch)
        self.close()


class Kept:
    """Texts in the store of torchrun, which live on when it starts the processes again."""

    def __init__(self, launch: Launch) -> None:
        name = f"rptrain {launch.run}"
        self._store = None if launch.hosts else bounded(lambda: dist.PrefixStore(name, connected(launch)))

    def set(self, key: str, text: str) -> None:
        if (store := self._store) is not None:
            bounded(lambda: store.set(key, text))

    def get(self, key: str) -> str:
        """The text; "" without one, or without such a store."""
        return (self._store is not None and bounded(lambda: value(self._store, key))) or ""
