"""The processes that train a run together; usually there is only one."""

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from statistics import median
from typing import Any

from rptrain.checkpoint.processes import ALONE, Processes
from rptrain.config.schema import Config
from rptrain.engine.distributed.launch import Launch
from rptrain.engine.distributed.peers import Kept, Peers
from rptrain.engine.distributed.shared import Shared
from rptrain.engine.distributed.versions import differing
from rptrain.runs.folder.control import Commands
from rptrain.runs.records.events import Event, ProcessSlow
from rptrain.train.watchdog import Watchdog
from rptrain.utils.errors import UserError
from rptrain.utils.phases import phase

STEPS = 20  # steps whose times are compared
SLOW = 1.2  # times the median of all processes


@dataclass(frozen=True)
class Group:
    """The processes as one of them sees them. Without `peers` it is alone.

    `main` is for the main thread, `saving` for the thread that saves.
    """

    peers: Peers | None = None
    main: Processes = ALONE
    saving: Processes = ALONE
    kept: Kept | None = None  # of processes that torchrun started

    @property
    def rank(self) -> int:
        return self.main.rank

    @property
    def first(self) -> bool:
        """Whether this is the process that begins the run, obeys its commands and exports the model."""
        return self.main.first

    @property
    def size(self) -> int:
        return 1 if self.peers is None else self.peers.world

    def shared(self, config: Config) -> Shared | None:
        """The share in the engine's work of this process, if it is not alone. All call this, each when it is ready."""
        if self.peers is None:
            return None
        self.main.gather(None)  # some allocate memory for longer than `open` waits
        return Shared.open(self.peers, config.replicas, config.engine.reduce_dtype)

    def check_equal(self, own: Mapping[str, Any]) -> None:
        """UserError in all processes if one of them calls this with other values, which are for JSON."""
        hashes = {name: sha256(json.dumps(value, sort_keys=True).encode()).hexdigest() for name, value in own.items()}
        first, *others = self.main.gather(hashes)
        for rank, found in enumerate(others, 1):
            if different := [name for name in own if found[name] != first[name]]:
                raise UserError(
                    f"the {' and the '.join(different)} of {self.main.name(rank)} and of {self.main.name(0)} differ: "
                    "give all processes the same files"
                )

    def check_devices(self, kinds: Sequence[str]) -> None:
        """UserError in all processes if one of them has devices of other kinds: their products have other bits."""
        found = [{"have": ", ".join(kinds)} for kinds in self.main.gather(list(kinds))]
        if different := differing(found, [self.main.name(rank) for rank in range(len(found))]):
            raise UserError(
                f"the processes {different}. All machines need devices of one kind: choose them with engine.devices"
            )

    def agreed(self, own: Commands) -> Commands:
        """What any of the processes is asked to do. All of them call this after the same step."""
        found = self.main.gather([own.stops, own.pauses, own.saves])
        stops, pauses, saves = map(any, zip(*found, strict=True))
        return Commands(stops, pauses and not stops, saves)


class ShareTimes:
    """The seconds that each process computes for its share of a step, without those in which it waits for others.

    `emit` gets a ProcessSlow, in the first process, for each that takes more than SLOW times the median.
    """

    def __init__(self, group: Group, emit: Callable[[Event], None]) -> None:
        self._group, self._emit = group, emit
        self._seconds: deque[float] = deque(maxlen=STEPS)
        self._slow: set[int] = set()

    def add(self, seconds: float) -> None:
        """The time of this process for a step."""
        self._seconds.append(seconds)

    def compare(self, step: int) -> None:
        """After every STEPS steps, compare the medians of the last ones. All processes call this after each step."""
        if step % STEPS or self._group.size == 1:
            return
        found = self._group.main.gather(median(self._seconds) if self._seconds else None)
        middle = median(known) if (known := [each for each in found if each is not None]) else 0.0
        slow = {rank for rank, each in enumerate(found) if each is not None and each > SLOW * middle > 0}
        if self._group.first:
            for rank in sorted(slow - self._slow):
                self._emit(ProcessSlow(step, self._group.main.name(rank), found[rank], middle))
        self._slow = slow


@contextmanager
def joined(launch: Launch | None, watchdog: Watchdog) -> Iterator[Group]:
    """The group of the processes that torchrun started, once all are there; this one alone without a launch.

    UserError if they do not meet. After an error, threads may wait in native code for a process that was lost, and
    nothing ends them: the watchdog then ends a process of its own without them.
    """
    kept = None if launch is None else Kept(launch)
    if launch is None or launch.world == 1:
        yield Group(kept=kept)
        return
    lost = True
    try:
        with watchdog.doing("meeting the other processes"), phase("meeting the other processes", unit=""):
            peers = Peers(launch)
        with peers:
            yield Group(peers, Processes.of(peers), Processes.of(peers), kept)
        lost = peers.loss is not None
    finally:
        if lost:
            watchdog.abandon_threads()
