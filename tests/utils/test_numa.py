"""The topology of a machine with two sockets, described in files; system calls on this machine, with one node."""

import ctypes
import mmap
import os
import platform
import threading
from pathlib import Path

import pytest
import torch

from rptrain.utils import numa
from rptrain.utils.numa import Node, Topology, bind, node_of, sockets, topology

SOCKETS = (frozenset({*range(5), *range(10, 15)}), frozenset({*range(5, 10), *range(15, 20)}))
MPOL_BIND, SET_MEMPOLICY = 2, {"x86_64": 238, "aarch64": 237}
BOTH = Topology((Node(0, SOCKETS[0]), Node(2, SOCKETS[1])))


@pytest.fixture
def sysfs(tmp_path, monkeypatch):
    """Sockets are nodes 0 and 2, a GPU's memory is node 1; GPUs hang on both sockets, and one somewhere."""
    files = {
        "devices/system/node/online": "0-2",
        "devices/system/node/node0/cpulist": "0-4,10-14",
        "devices/system/node/node1/cpulist": "",
        "devices/system/node/node2/cpulist": "5-9,15-19",
        "bus/pci/devices/0000:17:00.0/numa_node": "0",
        "bus/pci/devices/0000:ca:00.0/numa_node": "2",
        "bus/pci/devices/0001:00:00.0/numa_node": "-1",
    }
    ids = {f"devices/system/cpu/cpu{cpu}/topology/physical_package_id": cpu in SOCKETS[1] for cpu in range(20)}
    for name, text in (files | {name: str(int(second)) for name, second in ids.items()}).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    allow(monkeypatch, range(20))
    return tmp_path


def allow(monkeypatch, cpus):
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: set(cpus))


def test_nodes_are_those_with_cpus(sysfs):
    assert topology(sysfs) == BOTH


def test_the_cpu_mask_of_the_process_is_kept(sysfs, monkeypatch):
    allow(monkeypatch, {2, 3, 5, 99})
    assert topology(sysfs) == Topology((Node(0, frozenset({2, 3})), Node(2, frozenset({5}))))
    allow(monkeypatch, SOCKETS[1])
    assert topology(sysfs) == Topology(), "the process stays on the socket that it was given"
    allow(monkeypatch, {99})
    assert topology(sysfs) == Topology()


def test_sockets_are_those_with_cpus(sysfs, monkeypatch):
    assert sockets(sysfs) == 2
    allow(monkeypatch, SOCKETS[1])
    assert sockets(sysfs) == 1
    allow(monkeypatch, {5, 99})
    assert sockets(sysfs) == 1, "unknown: CPU 99 has no file"
    allow(monkeypatch, range(20))
    for cpu in range(20):
        (sysfs / f"devices/system/cpu/cpu{cpu}/topology/physical_package_id").write_text(f"{cpu}\n")
    assert sockets(sysfs) == 2, "at most one per node"


def test_there_is_nothing_to_choose_without_a_second_node(sysfs, tmp_path):
    (sysfs / "devices/system/node/online").write_text("0\n")
    assert topology(sysfs) == Topology()
    assert topology(tmp_path / "elsewhere") == Topology()


@pytest.mark.parametrize("text", ["0-3", "0,x", "-", ""])
def test_nothing_is_known_from_incomplete_or_damaged_files(sysfs, text):
    (sysfs / "devices/system/node/online").write_text(text + "\n")  # 3: its cpulist is missing
    assert topology(sysfs) == Topology()
    (sysfs / "bus/pci/devices/0000:17:00.0/numa_node").write_text(text + "\n")
    assert node_of("0000:17:00.0", sysfs) == -1


def test_a_device_is_near_the_cpus_of_its_node(sysfs):
    near = {address: node_of(address, sysfs) for address in ("0000:17:00.0", "0000:ca:00.0", "0001:00:00.0", "none")}
    assert near == {"0000:17:00.0": 0, "0000:ca:00.0": 2, "0001:00:00.0": -1, "none": -1}
    assert [BOTH.near(node) for node in near.values()] == [*SOCKETS, frozenset(), frozenset()]
    assert Topology().near(0) == frozenset()


def test_a_device_is_not_kept_on_a_node_where_adam_leaves_fewer_than_two_cpus():
    uneven = Topology((Node(0, frozenset(range(9))), Node(1, frozenset(range(9, 19)))))
    assert [node.free for node in uneven.nodes] == [1, 2]
    assert [uneven.near(number) for number in (0, 1)] == [frozenset(), frozenset(range(9, 19))]


def test_threads_are_spread_evenly():
    assert BOTH.spread(5) == [SOCKETS[0], SOCKETS[1], SOCKETS[0], SOCKETS[1], SOCKETS[0]]
    few, many = frozenset({0}), frozenset({1, 2, 3})
    uneven = Topology((Node(0, few), Node(1, many)))
    assert uneven.spread(2) == [many, many], "a CPU of each node stays free"
    assert uneven.spread(4) == [many, many, few, many]
    assert uneven.spread(6) == [many, many, few, many, many, many]
    assert Topology().spread(2) == [frozenset()] * 2


def test_memory_is_interleaved_over_the_nodes(monkeypatch):
    calls = []
    monkeypatch.setattr(numa, "_mbind", lambda *arguments: calls.append(arguments) or True)
    monkeypatch.setattr(numa, "_policy", lambda: numa.MPOL_DEFAULT)
    assert BOTH.interleave(0x7F0000000000, 1 << 21)
    assert not Topology().interleave(0x7F0000000000, 1 << 21)
    assert calls == [(0x7F0000000000, 1 << 21, 0b101)]


@pytest.mark.parametrize(("policy", "refusals"), [(numa.MPOL_DEFAULT, 2), (MPOL_BIND, 0)])
def test_memory_that_is_not_interleaved(monkeypatch, caplog, policy, refusals):
    """A refusal is logged once. A policy that the user chose is kept without a message."""
    calls = []
    monkeypatch.setattr(numa, "_mbind", lambda *arguments: calls.append(arguments) is not None)
    monkeypatch.setattr(numa, "_policy", lambda: policy)
    numa._warn_of_refusal.cache_clear()
    assert not Topology().interleave(0x7F0000000000, 1 << 21) and not caplog.messages
    assert not BOTH.interleave(0x7F0000000000, 1 << 21) and not BOTH.interleave(0x7F0000000000, 1 << 21)
    assert len(calls) == refusals
    assert [message.endswith("--cap-add SYS_NICE allows it") for message in caplog.messages] == [True] * (refusals > 0)


# ---- system calls on this machine


@pytest.fixture
def memory():
    area = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(area, dtype=torch.uint8)


def policy(address):
    """The kernel's record of a mapping, such as "interleave:0"."""
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    return next(line.split()[1] for line in lines if int(line.split()[0], 16) == address)


def test_the_kernel_interleaves_memory(memory):
    here = Topology((Node(0, frozenset({0})),))
    if not here.interleave(memory.data_ptr(), len(memory)):
        pytest.skip("this system forbids it")
    assert policy(memory.data_ptr()) == "interleave:0"
    assert not memory.any()


def test_a_memory_policy_of_the_user_is_kept(memory):
    """As numactl --membind sets it; in a thread of its own, whose policy ends with it."""
    here, got = Topology((Node(0, frozenset({0})),)), []

    def main():
        call, bits = SET_MEMPOLICY.get(platform.machine(), -1), ctypes.c_ulong(1)
        refused = ctypes.CDLL(None).syscall(call, MPOL_BIND, ctypes.byref(bits), ctypes.c_ulong(64))
        got.append(refused or (numa._policy(), here.interleave(memory.data_ptr(), len(memory))))

    thread = threading.Thread(target=main)
    thread.start()
    thread.join()
    if got == [-1]:
        pytest.skip("this system forbids it")
    assert got == [(MPOL_BIND, False)]
    assert numa._policy() == numa.MPOL_DEFAULT, "of this thread"


def test_the_kernel_refuses_a_node_that_does_not_exist(memory, monkeypatch):
    assert not Topology((Node(1023, frozenset({0})),)).interleave(memory.data_ptr(), len(memory))
    monkeypatch.setattr(platform, "machine", lambda: "of an unknown processor")
    assert not Topology((Node(0, frozenset({0})),)).interleave(memory.data_ptr(), len(memory))


def bound(cpus):
    """Binds a new thread. Returns whether that succeeded, and where the thread may run then."""
    got = []
    thread = threading.Thread(target=lambda: got.append((bind(cpus), os.sched_getaffinity(0))))
    thread.start()
    thread.join()
    return got[0]


def test_a_thread_is_bound_alone():
    before = os.sched_getaffinity(0)
    last = frozenset({max(before)})
    assert bound(last) == (True, last)
    assert os.sched_getaffinity(0) == before


def test_a_thread_that_may_not_be_bound_stays_where_it_is(monkeypatch):
    before = os.sched_getaffinity(0)
    assert bound(frozenset({1 << 14})) == (False, before), "a CPU that does not exist"
    assert bound(frozenset()) == (False, before)

    def forbidden(thread, cpus):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", forbidden)
    assert bound(frozenset(before)) == (False, before)


def test_this_machine_can_be_read():
    """Its CPUs that the process may use are those of the nodes, and of one node if there is nothing to choose from."""
    usable, nodes = os.sched_getaffinity(0), topology().nodes
    with_cpus = {link for cpu in usable for link in Path(f"/sys/devices/system/cpu/cpu{cpu}").glob("node[0-9]*")}
    numbers = {int(link.name.removeprefix("node")) for link in with_cpus}
    assert [node.number for node in nodes] == (sorted(numbers) if len(numbers) > 1 else [])
    assert not nodes or frozenset().union(*(node.cpus for node in nodes)) == usable
