"""How processes meet: they find each other in the store, compare their versions and exchange their addresses."""

import json
import os
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rptrain.engine.distributed import rendezvous
from rptrain.engine.distributed.address import (
    SETTING,
    Addresses,
    common,
    own_addresses,
    reachable,
    resolved,
    with_interface,
)
from rptrain.engine.distributed.launch import Launch
from rptrain.engine.distributed.rendezvous import ANSWER, POLL, connected, dist, hosted, leave, value, within
from rptrain.engine.distributed.versions import differing, versions
from rptrain.utils.errors import UserError, describe

START_ALIKE = "Start all processes with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE, and each with its own RANK"


@dataclass(frozen=True)
class Met:
    """Processes that have met, by rank: `names` for messages, and the `places` at which they listen, also with the
    names of the interfaces. `prefix`: of all their keys in the store. `addresses`: at which this process listens.
    """

    prefix: str
    names: Sequence[str]
    places: Sequence[str]
    addresses: Sequence[str]

    @property
    def listening(self) -> str:
        """Where each process listens, in words."""
        return _each("listens at", self.names, self.places)


def host_store(launch: Launch) -> Any:
    """The store, in the first process if torchrun has none. UserError if it cannot be there."""
    try:
        return within(rendezvous.CONNECTING + ANSWER, lambda: hosted(launch))
    except RuntimeError as error:
        raise UserError(
            f"process {launch.rank} on {socket.gethostname()} cannot listen at {place(launch)} ({describe(error)}): "
            "MASTER_ADDR must be an address of its machine, and MASTER_PORT a free port"
        ) from error


def open_store(launch: Launch) -> Any:
    """A connection to the store. UserError if it cannot be reached within CONNECTING seconds."""
    try:
        return within(rendezvous.CONNECTING + ANSWER, lambda: connected(launch))
    except RuntimeError as error:
        raise UserError(
            f"process {launch.rank} on {socket.gethostname()} cannot reach {place(launch)}, where the processes meet "
            f"({describe(error)}): check that process 0 runs, that this is an address of its machine (if not, start "
            "torchrun there with --local-addr), and that no firewall is in between"
        ) from error


def meet(launch: Launch) -> Met:
    """Blocks until all processes are there. UserError if they are not within CONNECTING seconds, if their versions
    differ, or if they have no addresses of one family.
    """
    connection = open_store(launch)
    try:
        return within(2 * rendezvous.CONNECTING, _Meeting(launch, connection, versions()).meet)
    except RuntimeError as error:
        raise UserError(
            f"another process left {place(launch)} while the processes met ({describe(error)}): see what it says"
        ) from error


def place(launch: Launch) -> str:
    """The address of the store, as it was given and as it is here."""
    found = resolved(launch.host)
    return f"{launch.host}:{launch.port}" + (f" ({found})" if found else "")


class _Meeting:
    def __init__(self, launch: Launch, connection: Any, own_versions: Mapping[str, str]) -> None:
        self._launch, self._rank, self._ranks = launch, launch.rank, range(launch.world)
        self._versions = own_versions
        self._connection, self._joining = connection, dist.PrefixStore("rptrain", connection)

    def meet(self) -> Met:
        prefix = self._agree()
        keys = dist.PrefixStore(prefix, self._connection)
        facts = self._facts(keys)
        names = [f"process {rank} on {each['host']}" for rank, each in enumerate(facts)]
        if wrong := _wrong(facts, names):
            leave(keys, self._launch)
            raise UserError(wrong)
        own: Addresses = facts[self._rank]["addresses"]
        if not os.environ.get(SETTING):
            own = reachable(own, [each["addresses"] for each in facts])
        listening = {family: [each, ", ".join(map(with_interface, each))] for family, each in own.items()}
        everyone = self._exchange(keys, "listening", listening)
        if not (family := common(everyone)):
            where = [", ".join(place for _, place in each.values()) for each in everyone]
            leave(keys, self._launch)
            raise UserError(
                "the processes have no address of the same family (IPv4 or IPv6): "
                f"{_each('has', names, where)}. Set {SETTING} on each machine to the interface that reaches the others"
            )
        return Met(prefix, names, [each[family][1] for each in everyone], own[family])

    def _agree(self) -> str:
        """A name that exactly these processes know. Keys of processes that were restarted may be in the store, too.

        Each process writes a name of its own. The first one lists the names, again while they change, until each
        process has found itself in the list.
        """
        own, look, problem = uuid.uuid4().hex, self._follow if self._rank else self._lead, ""
        until = time.monotonic() + rendezvous.CONNECTING
        try:
            self._joining.set(f"join/{self._rank}", own)
            while time.monotonic() < until:
                prefix, problem = look(own)
                if prefix:
                    return prefix
                time.sleep(POLL)
        except RuntimeError as error:  # the first process, which waits as long, may have left with the store
            if problem:
                raise UserError(f"{problem} ({describe(error)})") from error
            raise
        raise UserError(problem)

    def _lead(self, own: str) -> tuple[str, str]:
        """The name, once all know it; otherwise what is wrong if nothing changes."""
        roster = [value(self._joining, f"join/{rank}") for rank in self._ranks]
        self._joining.set("roster", json.dumps(roster))
        absent = [rank for rank in self._ranks if not roster[rank]]
        absent = absent or [rank for rank in self._ranks[1:] if value(self._joining, f"found/{rank}") != own]
        return ("", self._absent(absent)) if absent else (own, "")

    def _follow(self, own: str) -> tuple[str, str]:
        """As `_lead`, in the other processes."""
        world, rank = self._launch.world, self._rank
        roster: list[str] = json.loads(value(self._joining, "roster") or "[]")
        if absent := [each for each, name in enumerate(roster or [""]) if not name]:
            return "", self._absent(absent)
        if len(roster) != world:
            return "", f"WORLD_SIZE is {len(roster)} for process 0, but {world} for process {rank}. {START_ALIKE}"
        if roster[rank] != own:
            return "", f"another process has RANK={rank}, too. {START_ALIKE}"
        self._joining.set(f"found/{rank}", roster[0])
        return roster[0], ""

    def _absent(self, ranks: Sequence[int]) -> str:
        one, number = len(ranks) == 1, ", ".join(map(str, ranks))
        return (
            f"{'process' if one else 'processes'} {number} of {self._launch.world} {'has' if one else 'have'} not come "
            f"to {place(self._launch)}: check that {'it runs' if one else 'they run'}. {START_ALIKE}"
        )

    def _facts(self, keys: Any) -> Sequence[Mapping[str, Any]]:
        """What each process says of itself."""
        own: dict[str, Any] = {"host": socket.gethostname(), "versions": self._versions, "addresses": {}, "problem": ""}
        try:
            own["addresses"] = own_addresses(self._launch.host, os.environ.get(SETTING, ""))
        except UserError as error:
            own["problem"] = str(error)
        keys.set(f"facts/{self._rank}", json.dumps(own))
        return [self._facts_of(keys, rank) for rank in self._ranks]

    def _facts_of(self, keys: Any, rank: int) -> Mapping[str, Any]:
        while not (facts := value(keys, f"facts/{rank}")):
            if host := value(keys, f"name/{rank}"):  # a version of rptrain that says nothing else
                return {"host": host, "versions": {}, "addresses": {}, "problem": ""}
            time.sleep(POLL)
        return json.loads(facts)

    def _exchange(self, keys: Any, key: str, own: Any) -> Sequence[Any]:
        """The values of all processes, which are for JSON."""
        keys.set(f"{key}/{self._rank}", json.dumps(own))
        return [json.loads(keys.get(f"{key}/{rank}")) for rank in self._ranks]


def _wrong(facts: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Why processes that say this of themselves cannot train together; "" if they can."""
    if found := differing([each["versions"] for each in facts], names):
        return f"the processes need equal versions, but have {found}. Install the same versions on all machines"
    return "; ".join(f"{name}: {each['problem']}" for each, name in zip(facts, names, strict=True) if each["problem"])


def _each(verb: str, names: Sequence[str], places: Sequence[str]) -> str:
    return ", ".join(f"{name} {verb} {place or 'none'}" for name, place in zip(names, places, strict=True))
