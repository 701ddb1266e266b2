"""Where memory and threads of an engine are on a host with several simulated NUMA nodes."""

import ctypes
import mmap
import os
import threading
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch

from rptrain.engine.devices.cpu import CpuDevice
from rptrain.engine.devices.cuda import CudaDevice
from rptrain.engine.memory.arena import Arena
from rptrain.engine.optim import adam
from rptrain.engine.optim.adam import CpuAdam
from rptrain.models.transforms.lora import LoRA
from rptrain.utils import numa
from rptrain.utils.numa import Node, Topology

from . import plain, runs
from .transfer.test_staging import mapped_store

NAMES = ("cpu:0", "cpu:1", "adam_0", "adam_1", "optimizer", "embedding", "MainThread")
READERS = ("device 0 reader_0", "device 1 reader_0")
MISSING = 1 << 10  # the first of CPUs that no machine of ours has, and that the kernel leaves out of a mask
PLAN = "F0-1 F2-3 FB4-4 B2-3 B0-1 | N=2 M=4 MR=4"


def two_nodes(monkeypatch):
    """Makes every other of this machine's CPUs node 0, and the rest node 1. Returns the CPUs of both.

    Each node also has ten CPUs that do not exist, so that threads of devices are bound to it.
    """
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        pytest.skip("needs two CPUs")
    cpus = frozenset(usable[::2]), frozenset(usable[1::2])
    extra = frozenset(range(MISSING, MISSING + 10)), frozenset(range(MISSING + 10, MISSING + 20))
    made = Topology((Node(0, cpus[0] | extra[0]), Node(1, cpus[1] | extra[1])))
    monkeypatch.setattr(numa, "topology", lambda: made)
    return cpus


def trained(batches):
    """Losses, weights, and where threads may run, by their names."""
    both = threading.Barrier(2, timeout=60)
    with runs.make_store(plain.CONFIG, torch.bfloat16, asynchronous=True) as store:
        with runs.engine_of(store, PLAN, tokens=32, threads=2) as engine:
            losses = []
            for batch in batches:
                losses.append(engine.forward_backward(batch).result())
                engine.step(1e-3)
            engine.synchronize()
            for begun in [engine._optimizer._adam.pool.submit(both.wait) for _ in range(2)]:
                begun.result()  # a pool starts a thread when there is work for it, and the thread binds itself then
            threads = {thread.name: thread.native_id for thread in threading.enumerate()}
            places = {name: frozenset(os.sched_getaffinity(threads[name])) for name in NAMES}
        return losses, runs.checkpoint_tensors(store), places


def test_threads_are_bound_and_the_bits_stay(monkeypatch):
    batches, usable = plain.make_batches(3), os.sched_getaffinity(0)
    losses, weights, free = trained(batches)
    if not numa.topology().nodes:
        assert all(cpus == usable for cpus in free.values()), "nothing is bound on a machine with one node"
    cpus = two_nodes(monkeypatch)
    monkeypatch.setattr(CpuDevice, "numa_node", property(lambda device: 1 - int(device.name[-1])))
    got_losses, got, places = trained(batches)
    assert (places["cpu:0"], places["cpu:1"]) == (cpus[1], cpus[0])
    assert {places["adam_0"], places["adam_1"]} == {*map(frozenset, cpus)}, "one on each node"
    assert places["MainThread"] == places["optimizer"] == places["embedding"] == usable
    assert got_losses == losses
    assert all(torch.equal(got[name], weights[name]) for name in weights)


def test_readers_of_files_are_bound_with_the_thread_of_their_device(monkeypatch, tmp_path):
    cpus = two_nodes(monkeypatch)
    monkeypatch.setattr(CpuDevice, "numa_node", property(lambda device: 1 - int(device.name[-1])))
    lora = mapped_store(tmp_path, plain.CONFIG, {"lora": LoRA(r=3)})
    with lora as store, runs.engine_of(store, PLAN, tokens=32, threads=2) as engine:
        engine.forward_backward(plain.make_batches(1)[0]).result()
        threads = {thread.name: thread.native_id for thread in threading.enumerate()}
        places = [os.sched_getaffinity(threads[name]) for name in READERS]
    assert places == [cpus[1], cpus[0]]


def test_threads_of_adam_are_spread_over_the_nodes(monkeypatch):
    cpus = two_nodes(monkeypatch)
    barrier = threading.Barrier(4, timeout=60)

    def place():
        barrier.wait()
        return os.sched_getaffinity(0)

    with CpuAdam((0.9, 0.95), 1e-8, 4) as optimizer:
        places = [begun.result() for begun in [optimizer.pool.submit(place) for _ in range(4)]]
    assert sorted(map(sorted, places)) == sorted(map(sorted, [*cpus, *cpus]))


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (4, 4), (8, 7), (64, 32)])
def test_threads_of_adam_without_nodes(cores, threads, monkeypatch):
    monkeypatch.setattr(adam, "cores", lambda: cores)
    monkeypatch.setattr(numa, "topology", Topology)
    with CpuAdam((0.9, 0.95), 1e-8) as optimizer:
        assert optimizer.threads == threads


@pytest.mark.parametrize(
    ("cpus", "threads"),
    [
        ([48, 48], [32, 32]),
        ([12, 12], [10, 10]),
        ([32] * 8, [26] * 8),
        ([4, 4], [3, 3]),
        ([2, 14], [1, 12]),
        ([1, 15], [0, 12]),
        ([64, 10], [32, 8]),
        ([1, 1], [1, 0]),
    ],
)
def test_threads_of_adam_leave_cpus_of_each_node_free(cpus, threads, monkeypatch):
    ends = list(accumulate(cpus))
    nodes = [frozenset(range(end - count, end)) for end, count in zip(ends, cpus, strict=True)]
    made = Topology(tuple(Node(index, node) for index, node in enumerate(nodes)))
    monkeypatch.setattr(numa, "topology", lambda: made)
    with CpuAdam((0.9, 0.95), 1e-8) as optimizer:
        places = made.spread(optimizer.threads)
    assert [places.count(node) for node in nodes] == threads


def test_a_gpu_is_found_by_its_place_on_the_bus(monkeypatch):
    found = SimpleNamespace(pci_domain_id=0x1, pci_bus_id=0xCA, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {torch.device("cuda", 1): found}.__getitem__)
    monkeypatch.setattr(numa, "node_of", {"0001:ca:00.0": 1}.__getitem__)
    device = CudaDevice.__new__(CudaDevice)
    device._device = torch.device("cuda", 1)
    assert device.numa_node == 1


def test_all_memory_is_interleaved_before_it_is_touched(monkeypatch):
    two_nodes(monkeypatch)
    areas = []

    def mbind(address, nbytes, nodes):
        pages = (ctypes.c_ubyte * (nbytes // mmap.PAGESIZE))()
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), pages) == 0
        assert not any(page & 1 for page in pages) and nodes == 0b11
        areas.append((address, address + nbytes))
        return True

    monkeypatch.setattr(numa, "_mbind", mbind)
    monkeypatch.setattr(numa, "_policy", lambda: numa.MPOL_DEFAULT)
    with runs.make_store(plain.CONFIG, torch.bfloat16, asynchronous=True) as store, Arena(1) as small:
        assert len(areas) == 2
        start, stop = areas[0]
        for state in store.units:
            for tensor in (*state.params, state.grad, *state.moments.values(), state.remainder):
                assert start <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= stop
        assert areas[1][0] == small.take(1, torch.uint8).data_ptr()
