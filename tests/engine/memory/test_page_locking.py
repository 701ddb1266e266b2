"""Training where the system page-locks part of the memory, or none: with stand-ins for CUDA's runtime and GPUs."""

from types import SimpleNamespace

import pytest
import torch

from rptrain.engine import engine as engines
from rptrain.engine.devices import driver
from rptrain.engine.devices.cpu import CpuDevice
from rptrain.engine.devices.cuda import CudaStream
from rptrain.engine.memory import arena, page_locking
from rptrain.engine.memory.arena import Arena
from rptrain.engine.memory.boundary import BoundaryBuffers
from rptrain.engine.memory.page_locking import PageableRanges, page_locked
from rptrain.models.transforms.lora import LoRA
from tests.cases import grid

from .. import plain, runs
from .test_store import Runtime

PLAN = "F0-1 F2-3 FB4-4 B2-3 B0-1"
TIED = plain.config(tie_word_embeddings=True)


class Machine:
    """GPUs that run on the CPU. Copies of pageable memory block the thread that starts them, as CUDA's do; a copy of
    memory that is neither registered nor known as pageable fails, and so does one of memory that only the CPU uses.
    """

    def __init__(self, monkeypatch):
        self.runtime, self.taken, self.failed, self.blocked = Runtime(), {}, [], 0
        take = Arena.take

        def recorded(arena, numel, dtype, *, copied=True):
            tensor = take(arena, numel, dtype, copied=copied)
            self.taken[tensor.data_ptr()] = tensor.nbytes, copied
            return tensor

        monkeypatch.setattr(arena, "_cudart", lambda: self.runtime)
        monkeypatch.setattr(Arena, "take", recorded)
        monkeypatch.setattr(engines, "CudaDevice", self.gpu)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: self.pin_memory(tensor))
        monkeypatch.setattr(page_locking, "_clear_error", lambda: None)

    def pin_memory(self, tensor):
        left = self.runtime.limit - sum(self.runtime.registered.values())
        raise_if(left < tensor.nbytes, "CUDA error: out of memory")
        return tensor.clone()

    def gpu(self, index, limit, probe, pageable):
        device = CpuDevice(f"cuda:{index}", lambda: bool(self.failed), lambda *error: self.failed.append(error), probe)
        for stream in device._streams:
            stream.copy = self.copies(stream, pageable)
        return device

    def copies(self, stream, pageable):
        def copy(where, target, source):
            stream.run(where, lambda: target.copy_(source))
            for tensor in (target, source):
                address = tensor.data_ptr()
                for start, (nbytes, copied) in [*self.taken.items()]:
                    if start <= address < start + nbytes:
                        locked = start in self.runtime.registered
                        assert copied and locked != (pageable is not None and address in pageable), where
                        if not locked:
                            self.blocked += 1
                            stream.record().synchronize()

        return copy

    def train(self, limit, cfg, plan, **options):
        """The results, and what was locked."""
        self.runtime.limit, self.blocked = limit, 0
        self.taken.clear()  # what an earlier run took is free, and what GPUs hold may lie there now
        found = []
        lock = engines.Engine._lock

        def observed(engine, *buffers):
            found.append(lock(engine, *buffers))
            return found[-1]

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(engines.Engine, "_lock", observed)
            result = runs.run(cfg, plain.make_batches(3), plan, dtype=torch.bfloat16, device="cuda", **options)
        assert not self.failed and not self.runtime.registered
        return result[:3], found[0]


def raise_if(refused, message):
    if refused:
        raise RuntimeError(message)


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


@pytest.mark.parametrize(
    ("cfg", "plan", "options"),
    [
        (TIED, f"{PLAN} | N=2 M=4 MR=4", {"asynchronous": True}),
        (plain.CONFIG, f"{PLAN} | N=2 M=4 MR=2", {"asynchronous": False}),
        grid(plain.CONFIG, f"{PLAN} | N=2 M=4 MR=2 R=2", {"asynchronous": True, "fp8": True}),
        (plain.CONFIG, f"{PLAN} | N=1 M=4 MR=4", {"asynchronous": True, "lora": LoRA(r=2), "base": "nf4"}),
    ],
    ids=["tied", "rounds", "replicas-fp8", "lora-nf4"],
)
def test_the_same_bits_result_however_much_is_locked(machine, cfg, plan, options):
    """Nothing is refused, about a quarter is locked, nothing is."""
    whole, all_locked = machine.train(1 << 40, cfg, plan, **options)
    assert all_locked.copied == all_locked.locked > 0 and machine.blocked == 0
    for share in (0.25, 0):
        limit = int(all_locked.copied * share)
        found, locking = machine.train(limit, cfg, plan, **options)
        assert found[:2] == whole[:2] and all(torch.equal(found[2][name], tensor) for name, tensor in whole[2].items())
        assert locking.copied == all_locked.copied and locking.locked <= limit
        assert (locking.locked > 0) == (share > 0) and machine.blocked > 0


def test_activations_are_locked_before_weights(machine, monkeypatch):
    """With a limit at which the store has taken nearly all."""
    locked, close = [], BoundaryBuffers.close

    def recorded(buffers):
        locked.append(buffers.locking.missing)
        close(buffers)

    monkeypatch.setattr(BoundaryBuffers, "close", recorded)
    plan = f"{PLAN} | N=1 M=4 MR=4"
    _, locking = machine.train(1 << 40, TIED, plan, asynchronous=False)
    _, locking = machine.train(locking.copied // 2, TIED, plan, asynchronous=False)
    assert locking.missing > 0 and locked == [0, 0]


def test_copies_of_pageable_memory_leave_the_interpreter_lock(monkeypatch):
    """Those of other memory are calls of the driver, which keep it."""
    host, other, device = (torch.zeros(8, dtype=torch.uint8) for _ in range(3))
    start = host.data_ptr()
    calls, stream = [], object.__new__(CudaStream)
    stream._device = SimpleNamespace(probe=None, pageable=PageableRanges([range(start, start + 8)]))
    stream._handle = 7
    monkeypatch.setattr(CudaStream, "run", lambda stream, where, work: (calls.append(where), work()))
    monkeypatch.setattr(driver, "copy", lambda *given: calls.append(given))
    device.fill_(3)
    stream.copy("download", host[2:6], device[:4])
    stream.copy("upload", device, host)
    stream.copy("other", device, other)
    assert calls == ["download", "upload", (device.data_ptr(), other.data_ptr(), 8, 7)]
    assert host.tolist() == device.tolist() == [0, 0, 3, 3, 3, 3, 0, 0]
    stream._device.pageable = None
    stream.copy("upload", device, host)
    assert calls[3:] == [(device.data_ptr(), start, 8, 7)]


def test_a_tensor_that_cannot_be_locked_stays_and_leaves_no_error(monkeypatch):
    cleared = []
    monkeypatch.setattr(page_locking, "_clear_error", lambda: cleared.append(True))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: raise_if(len(tensor) > 4, "out of memory"))
    tensor = torch.zeros(5)
    assert page_locked(tensor) is tensor and cleared == [True]
