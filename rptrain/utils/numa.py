"""NUMA nodes of a Linux host: memory is interleaved over them, and threads are bound to the CPUs of one.

Placement changes how long accesses to memory take, and never a result. So nothing is placed, and nothing fails, on a
host with one node and on other systems. A container may forbid either system call or both: memory is not interleaved
then, or threads are not bound.
"""

import ctypes
import logging
import os
import platform
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice
from pathlib import Path

log = logging.getLogger(__name__)

SYSFS = Path("/sys")
MBIND = {"x86_64": 237, "aarch64": 235}  # the number of the system call, by processor
GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
MPOL_DEFAULT, MPOL_INTERLEAVE = 0, 3  # linux/mempolicy.h
MAX_NODES = 1024  # of any Linux kernel
MIN_FREE = 2  # CPUs: with one, threads of several GPUs and of file readers would wait for AdamW's


@dataclass(frozen=True)
class Node:
    """A node, and those of its CPUs that the process may use; there is at least one."""

    number: int
    cpus: frozenset[int]

    @property
    def free(self) -> int:
        """The number of CPUs that AdamW leaves to other threads by default: a fifth, at least one."""
        return max(1, len(self.cpus) // 5)

    @property
    def share(self) -> int:
        """The number of AdamW's threads for which the node has CPUs; 0 if it has a single CPU."""
        return len(self.cpus) - self.free


@dataclass(frozen=True)
class Topology:
    """The nodes over which memory and threads are spread; empty if there is nothing to choose from.

    Nodes without a CPU that the process may use are left out, such as memory of GPUs, and nodes that a CPU mask keeps
    the process off.
    """

    nodes: tuple[Node, ...] = ()

    def near(self, node: int) -> frozenset[int]:
        """The CPUs for the thread of a device that is attached to a node.

        The set is empty if the node is left out or unknown (-1), or if AdamW by default leaves fewer than MIN_FREE
        of its CPUs free: the thread then finds a free CPU on another node.
        """
        roomy = (found for found in self.nodes if found.free >= MIN_FREE)
        return next((found.cpus for found in roomy if found.number == node), frozenset())

    def spread(self, threads: int) -> list[frozenset[int]]:
        """The CPUs for each of AdamW's threads: the nodes in turn, and all CPUs of a node for each of its threads.

        A node gets no more threads than its share, unless all shares are used, and no more than it has CPUs, unless
        there are more threads than CPUs. Without nodes to choose from, the sets are empty.
        """
        most = max((len(node.cpus) for node in self.nodes), default=0)
        turns = [(turn, node) for turn in range(most) for node in self.nodes if turn < len(node.cpus)]
        places = [node.cpus for turn, node in sorted(turns, key=lambda place: place[0] >= place[1].share)]
        return list(islice(cycle(places or [frozenset()]), threads))

    def interleave(self, address: int, nbytes: int) -> bool:
        """Interleaves the pages of mapped memory, which nothing has touched yet, over the nodes.

        Pages go to another node if theirs is full. Returns False, and the memory stays as it is, if there are no nodes
        to choose from, if the thread has a memory policy (such as that of numactl), or if the system refuses, which is
        logged once.
        """
        if not self.nodes:
            return False
        if _policy() != MPOL_DEFAULT:
            return False
        interleaved = _mbind(address, nbytes, sum(1 << node.number for node in self.nodes))
        if not interleaved:
            _warn_of_refusal()
        return interleaved


def topology(root: Path = SYSFS) -> Topology:
    """This machine's nodes, for the calling thread's CPU mask, from the sysfs mounted at `root`."""
    folder = root / "devices/system/node"
    try:
        online = sorted(_numbers(folder / "online"))
        cpus = {number: _numbers(folder / f"node{number}/cpulist") for number in online}
    except (OSError, ValueError):  # another system, or a sandbox with a part of sysfs
        return Topology()
    usable = os.sched_getaffinity(0)
    nodes = tuple(Node(number, frozenset(found & usable)) for number, found in cpus.items() if found & usable)
    return Topology(nodes if len(nodes) > 1 else ())


def sockets(root: Path = SYSFS) -> int:
    """The number of processors whose CPUs the process may use; 1 if it is unknown.

    It is at most the number of nodes, because a virtual machine may show each CPU as a processor.
    """
    nodes = len(topology(root).nodes)
    if not nodes:
        return 1
    paths = (root / f"devices/system/cpu/cpu{cpu}/topology/physical_package_id" for cpu in os.sched_getaffinity(0))
    try:
        return min(len({path.read_text().strip() for path in paths}), nodes)
    except OSError:
        return 1


def node_of(pci_address: str, root: Path = SYSFS) -> int:
    """The node that a PCI device, such as "0000:17:00.0", is attached to; -1 if unknown."""
    path = root / "bus/pci/devices" / pci_address / "numa_node"
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return -1


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


@cache
def _warn_of_refusal() -> None:
    log.warning(
        "host memory is not interleaved over NUMA nodes: the system refuses mbind; in Docker, --cap-add SYS_NICE "
        "allows it"
    )


def _policy() -> int:
    """The memory policy of the calling thread; MPOL_DEFAULT if the system does not tell."""
    call = GET_MEMPOLICY.get(platform.machine())
    if call is None:
        return MPOL_DEFAULT
    syscall = ctypes.CDLL(None).syscall
    syscall.argtypes = (ctypes.c_long, ctypes.c_void_p, *(ctypes.c_void_p, ctypes.c_ulong) * 2)
    mode = ctypes.c_int(MPOL_DEFAULT)
    return mode.value if syscall(call, ctypes.addressof(mode), None, 0, None, 0) == 0 else MPOL_DEFAULT


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
