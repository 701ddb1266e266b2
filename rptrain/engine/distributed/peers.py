"""The processes that train together: messages between their host memory, and errors that name a process.

torchrun starts the processes and tells them how to meet, by environment variables. Messages are those of
torch.distributed with gloo. Its own errors come after half an hour if a process falls silent, so each process also
writes a counter to the store of torchrun every second, and reads those of the others.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed
from torch import Tensor

from rptrain.engine.distributed.share import Share
from rptrain.utils.errors import TrainingError, UserError, describe

dist: Any = torch.distributed

BEAT = 1.0  # seconds between two beats
SILENT = 20.0  # seconds without a beat, after which a process is lost
CONNECTING = 300.0  # seconds to wait for the other processes at the start; they may load libraries at different speeds
FOREVER = timedelta(days=365)  # messages have no limit of time: the beats do
ASKED = timedelta(seconds=10)  # for an answer of the store
FAILED = "failed"  # the key of the first process that was lost


class PeerLost(TrainingError):
    """Another process ended, or fell silent. The message names it."""


@dataclass(frozen=True)
class Launch:
    """What torchrun tells a process: its number, how many there are, the same on its machine, and where to meet."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    host: str
    port: int
    restarts: int

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Self | None:
        """None unless torchrun started this process together with others. UserError if its variables are incomplete."""
        if int(environment.get("WORLD_SIZE", "1")) == 1:
            return None
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if missing := [name for name in names if name not in environment]:
            raise UserError(f"WORLD_SIZE is set, but not {', '.join(missing)}: start several processes with torchrun")
        rank, world, local_rank, local_world = (int(environment[name]) for name in names[:4])
        restarts = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
        host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        return cls(rank, world, local_rank, local_world, host, port, restarts)


class Message:
    """A message on its way; the tensor must not be changed before `wait` returns."""

    def __init__(self, peers: "Peers", work: Any, other: int) -> None:
        self._peers, self._work, self._other = peers, work, other

    def wait(self) -> None:
        """Raises PeerLost."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._peers.lost(self._other) from error


class Channel:
    """Messages of one thread. Two processes send and receive theirs in the same order; empty ones are left out."""

    def __init__(self, peers: "Peers", group: Any) -> None:
        self._peers, self._group = peers, group

    def send(self, tensor: Tensor, to: int) -> Sequence[Message]:
        return self._begin(self._group.send, tensor, to)

    def receive(self, tensor: Tensor, source: int) -> Sequence[Message]:
        """Fills the tensor."""
        return self._begin(self._group.recv, tensor, source)

    def share(self, parts: Sequence[Tensor]) -> None:
        """Sends parts[rank] to every other process and fills the other parts with theirs."""
        messages: list[Message] = []
        for other in self._peers.others:
            messages += self.receive(parts[other], other)
            messages += self.send(parts[self._peers.rank], other)
        for message in messages:
            message.wait()

    def _begin(self, call: Callable[..., Any], tensor: Tensor, other: int) -> Sequence[Message]:
        if not tensor.numel():
            return ()
        try:
            work = call([tensor.view(torch.uint8)], other, 0)
        except RuntimeError as error:
            raise self._peers.lost(other) from error
        return (Message(self._peers, work, other),)


@dataclass(frozen=True)
class Shared:
    """The share of a process in the engine's work, and a channel for each of its threads that sends messages."""

    share: Share
    peers: "Peers"
    gradients: Channel
    weights: Channel
    main: Channel  # for the thread that calls the engine

    @classmethod
    def open(cls, peers: "Peers", replicas: int) -> Self:
        channels = [peers.channel() for _ in range(3)]
        return cls(Share(peers.rank, peers.world, replicas), peers, *channels)


class Peers:
    """The connections of a process to the others. Context manager.

    The first process that is lost is known to all: later errors, of processes that end for that reason, name it too.
    """

    def __init__(self, launch: Launch) -> None:
        """Blocks until all processes are there. UserError if they are not within five minutes."""
        self.rank, self.world = launch.rank, launch.world
        self.others = [rank for rank in range(launch.world) if rank != launch.rank]
        self._place = f"{launch.host}:{launch.port}"
        self._lost: PeerLost | None = None
        self._on_loss: Callable[[PeerLost], None] | None = None
        self._lock = threading.Lock()  # of these two
        self._closed = threading.Event()
        self._prefix = f"rptrain/{launch.restarts}"
        try:
            self._store, self._groups = (self._connected(launch) for _ in range(2))
            self._store.set(f"name/{self.rank}", socket.gethostname())
            self.names = [self._store.get(f"name/{rank}").decode() for rank in range(self.world)]
        except RuntimeError as error:
            raise UserError(
                f"{self.world} processes did not meet at {self._place} within {CONNECTING:g} s: check that all run and "
                "reach each other"
            ) from error
        self._channels = 0
        self._store.set_timeout(ASKED)
        self._thread = threading.Thread(target=self._beat, name="heartbeats", daemon=True)
        self._thread.start()

    def _connected(self, launch: Launch) -> Any:
        """A connection of its own to the store of torchrun: a call that waits keeps a connection."""
        timeout = timedelta(seconds=CONNECTING)
        return dist.PrefixStore(self._prefix, dist.TCPStore(launch.host, launch.port, is_master=False, timeout=timeout))

    def channel(self) -> Channel:
        """A new channel. Every process opens its channels in the same order, in one thread."""
        self._channels += 1
        store = dist.PrefixStore(f"channel {self._channels}", self._groups)
        return Channel(self, dist.ProcessGroupGloo(store, self.rank, self.world, FOREVER))

    def name(self, rank: int) -> str:
        return f"process {rank} on {self.names[rank]}"

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
        """Tells the others that this process cannot go on."""
        if not isinstance(error, PeerLost):
            self._error(f"{self.name(self.rank)} has failed: {describe(error, with_type=True)}")

    def _error(self, found: str) -> PeerLost:
        """The error for what was found, or for what another process has found before."""
        with suppress(RuntimeError):  # the store is lost, too
            found = self._store.compare_set(FAILED, "", found).decode()
        return PeerLost(f"{found}: the step cannot be completed")

    def _beat(self) -> None:
        """Beats, and looks for those of the others, until one of them is lost."""
        seen: dict[int, tuple[bytes, float]] = dict.fromkeys(self.others, (b"", time.monotonic()))
        beats = 0
        while not self._closed.wait(BEAT):
            beats += 1
            try:
                error = self._look(beats, seen)
            except RuntimeError as lost:
                error = PeerLost(f"{self._place}, where the processes meet, cannot be reached: {lost}")
            with self._lock:
                if self._closed.is_set():
                    return
                self._lost = error
                if error is not None and self._on_loss is not None:
                    self._on_loss(error)
            if error is not None:
                return

    def _look(self, beats: int, seen: dict[int, tuple[bytes, float]]) -> PeerLost | None:
        self._store.set(f"beat/{self.rank}", str(beats))
        now = time.monotonic()
        for rank in self.others:
            key = f"beat/{rank}"
            beat = self._store.get(key) if self._store.check([key]) else b""
            if beat != seen[rank][0]:
                seen[rank] = beat, now
            elif now - seen[rank][1] > SILENT:
                return self.lost(rank)
        return self._error("") if self._store.check([FAILED]) else None

    def close(self) -> None:
        self._closed.set()
        self._thread.join(2 * BEAT)  # it may wait for the store

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
