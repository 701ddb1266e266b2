"""NUMA nodes of a Linux host: memory is interleaved over them, and threads are bound to the CPUs of one.

Placement changes how long accesses to memory take, and never a result. So nothing is placed, and nothing fails, on a
host with one node, on other systems, and in a container that forbids the system calls.
"""

import ctypes
import os
import platform
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

SYSFS = Path("/sys")
MBIND = {"x86_64": 237, "aarch64": 235}  # the number of the system call, by processor
MPOL_INTERLEAVE = 3  # linux/mempolicy.h
MAX_NODES = 1024  # of any Linux kernel


@dataclass(frozen=True)
class Node:
    """A node, and those of its CPUs that the process may use; there is at least one."""

    number: int
    cpus: frozenset[int]


@dataclass(frozen=True)
class Topology:
    """The nodes over which memory and threads are spread; empty if there is nothing to choose from.

    Nodes without a CPU that the process may use are left out, such as memory of GPUs, and nodes that a CPU mask keeps
    the process off.
    """

    nodes: tuple[Node, ...] = ()

    def cpus(self, node: int) -> frozenset[int]:
        """The CPUs of a node; empty if the node is left out or unknown (-1)."""
        return next((found.cpus for found in self.nodes if found.number == node), frozenset())

    def spread(self, threads: int) -> list[frozenset[int]]:
        """The CPUs for each of several threads: the nodes in turn, and all CPUs of a node for each of its threads.

        A node gets no more threads than it has CPUs, unless there are more threads than CPUs. Without nodes to choose
        from, the sets are empty.
        """
        turns = range(max((len(node.cpus) for node in self.nodes), default=0))
        places = [node.cpus for turn in turns for node in self.nodes if turn < len(node.cpus)]
        return list(islice(cycle(places or [frozenset()]), threads))

    def interleave(self, address: int, nbytes: int) -> bool:
        """Interleaves the pages of mapped memory, which nothing has touched yet, over the nodes.

        Pages go to another node if theirs is full. Returns False, and the memory stays as it is, if there are no nodes
        to choose from or the system refuses.
        """
        return bool(self.nodes) and _mbind(address, nbytes, sum(1 << node.number for node in self.nodes))


def topology(root: Path = SYSFS) -> Topology:
    """This machine's nodes, for the calling thread's CPU mask, from the sysfs mounted at `root`."""
    folder = root / "devices/system/node"
    if not (folder / "online").exists():
        return Topology()
    usable = os.sched_getaffinity(0)
    found = ((number, _numbers(folder / f"node{number}/cpulist") & usable) for number in _numbers(folder / "online"))
    nodes = tuple(Node(number, frozenset(cpus)) for number, cpus in sorted(found) if cpus)
    return Topology(nodes if len(nodes) > 1 else ())


def node_of(pci_address: str, root: Path = SYSFS) -> int:
    """The node that a PCI device, such as "0000:17:00.0", is attached to; -1 if unknown."""
    path = root / "bus/pci/devices" / pci_address / "numa_node"
    return int(path.read_text()) if path.exists() else -1


def bind(cpus: frozenset[int]) -> bool:
    """Binds the calling thread, and threads that it starts, to CPUs.

    Returns False, and the thread stays where it may run, if the set is empty or the system refuses.
    """
    if not cpus:
        return False
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:  # forbidden in this container, or the CPUs were taken away meanwhile
        return False
    return True


def _numbers(path: Path) -> set[int]:
    """The numbers in a list such as "0-3,8"."""
    ranges = [part.partition("-") for part in path.read_text().strip().split(",") if part]
    return {number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)}


def _mbind(address: int, nbytes: int, nodes: int) -> bool:
    """Interleaves pages over the nodes whose bits are set; those without memory are ignored. False if it is refused."""
    call = MBIND.get(platform.machine())
    if call is None:
        return False
    syscall = ctypes.CDLL(None).syscall
    region = (ctypes.c_void_p, ctypes.c_size_t)
    mask = (ctypes.c_char_p, ctypes.c_ulong)
    syscall.argtypes = (ctypes.c_long, *region, ctypes.c_int, *mask, ctypes.c_uint)
    bits = nodes.to_bytes(MAX_NODES // 8, "little")
    return syscall(call, address, nbytes, MPOL_INTERLEAVE, bits, MAX_NODES + 1, 0) == 0  # the kernel takes 1 off
