"""The topology of a machine with two sockets, described in files; system calls on this machine, with one node."""

import mmap
import os
import platform
import threading
from pathlib import Path

import pytest
import torch

from rptrain.utils import numa
from rptrain.utils.numa import Node, Topology, bind, node_of, topology

SOCKETS = (frozenset({0, 1, 2, 3, 8, 9, 10, 11}), frozenset({4, 5, 6, 7, 12, 13, 14, 15}))
BOTH = Topology((Node(0, SOCKETS[0]), Node(2, SOCKETS[1])))


@pytest.fixture
def sysfs(tmp_path, monkeypatch):
    """Sockets are nodes 0 and 2, a GPU's memory is node 1; GPUs hang on both sockets, and one somewhere."""
    files = {
        "devices/system/node/online": "0-2",
        "devices/system/node/node0/cpulist": "0-3,8-11",
        "devices/system/node/node1/cpulist": "",
        "devices/system/node/node2/cpulist": "4-7,12-15",
        "bus/pci/devices/0000:17:00.0/numa_node": "0",
        "bus/pci/devices/0000:ca:00.0/numa_node": "2",
        "bus/pci/devices/0001:00:00.0/numa_node": "-1",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    allow(monkeypatch, range(16))
    return tmp_path


def allow(monkeypatch, cpus):
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: set(cpus))


def test_nodes_are_those_with_cpus(sysfs):
    assert topology(sysfs) == BOTH


def test_the_cpu_mask_of_the_process_is_kept(sysfs, monkeypatch):
    allow(monkeypatch, {2, 3, 4, 99})
    assert topology(sysfs) == Topology((Node(0, frozenset({2, 3})), Node(2, frozenset({4}))))
    allow(monkeypatch, SOCKETS[1])
    assert topology(sysfs) == Topology(), "the process stays on the socket that it was given"
    allow(monkeypatch, {99})
    assert topology(sysfs) == Topology()


def test_there_is_nothing_to_choose_without_a_second_node(sysfs, tmp_path):
    (sysfs / "devices/system/node/online").write_text("0\n")
    assert topology(sysfs) == Topology()
    assert topology(tmp_path / "elsewhere") == Topology()


def test_a_device_is_near_the_cpus_of_its_node(sysfs):
    near = {address: node_of(address, sysfs) for address in ("0000:17:00.0", "0000:ca:00.0", "0001:00:00.0", "none")}
    assert near == {"0000:17:00.0": 0, "0000:ca:00.0": 2, "0001:00:00.0": -1, "none": -1}
    assert [BOTH.cpus(node) for node in near.values()] == [*SOCKETS, frozenset(), frozenset()]
    assert Topology().cpus(0) == frozenset()


def test_threads_are_spread_evenly():
    assert BOTH.spread(5) == [SOCKETS[0], SOCKETS[1], SOCKETS[0], SOCKETS[1], SOCKETS[0]]
    few, many = frozenset({0}), frozenset({1, 2, 3})
    uneven = Topology((Node(0, few), Node(1, many)))
    assert uneven.spread(4) == [few, many, many, many]
    assert uneven.spread(6) == [few, many, many, many, few, many]
    assert Topology().spread(2) == [frozenset()] * 2


def test_memory_is_interleaved_over_the_nodes(monkeypatch):
    calls = []
    monkeypatch.setattr(numa, "_mbind", lambda *arguments: calls.append(arguments) or True)
    assert BOTH.interleave(0x7F0000000000, 1 << 21)
    assert not Topology().interleave(0x7F0000000000, 1 << 21)
    assert calls == [(0x7F0000000000, 1 << 21, 0b101)]


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
    nodes = topology().nodes
    assert len(nodes) != 1 and all(node.cpus <= os.sched_getaffinity(0) for node in nodes)
