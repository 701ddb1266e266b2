"""Page-locked memory, with a stand-in for CUDA's runtime that knows what is registered and what was in memory."""

import ctypes
import errno
import mmap
import threading
import weakref

import pytest
import torch

from rptrain.engine.memory import arena
from rptrain.engine.memory import store as memory
from rptrain.engine.memory.arena import ALIGNMENT, Arena, aligned
from rptrain.engine.memory.page_locking import Locking, PageableRanges
from rptrain.engine.memory.share import Share
from rptrain.engine.memory.store import ModelStore
from rptrain.utils.parallel import cores

from ...layouts import layout_of
from ...refusals import refuse
from .. import plain, runs

PAGE = mmap.PAGESIZE
TIED = plain.config(tie_word_embeddings=True)


class Runtime:
    """Registers ranges as CUDA does: none twice, and `limit` bytes in total."""

    def __init__(self, limit=1 << 40):
        self.limit = limit
        self.calls = 0
        self.registered, self.resident = {}, []
        self._lock = threading.Lock()

    def cudaHostRegister(self, address, nbytes, flags):
        assert flags == 1
        pages = (ctypes.c_ubyte * (nbytes // PAGE))()
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), pages) == 0
        with self._lock:
            self.calls += 1
            if sum(self.registered.values()) + nbytes > self.limit:
                return 2
            assert all(at + size <= address or address + nbytes <= at for at, size in self.registered.items())
            self.registered[address] = nbytes
            self.resident.append(all(page & 1 for page in pages))
        return 0

    def cudaHostUnregister(self, address):
        with self._lock:
            del self.registered[address]
        return 0


@pytest.fixture
def runtime(monkeypatch):
    made = Runtime()
    monkeypatch.setattr(arena, "_cudart", lambda: made)
    return made


def tensors(store):
    for state in store.units:
        yield from [*state.params, *state.wire, state.grad, *state.moments.values(), state.remainder]


@pytest.mark.parametrize("fp8", [False, True])
def test_each_tensor_is_locked_by_itself_in_whole_pages_that_are_there(runtime, fp8):
    with runs.make_store(plain.config(), torch.bfloat16, asynchronous=True, lock=True, fp8=fp8) as store:
        assert not store.locking.missing
        assert runtime.registered == {t.data_ptr(): -(-t.nbytes // PAGE) * PAGE for t in tensors(store)}
        assert all(runtime.resident)
    assert not runtime.registered


def test_memory_is_zero_locked_or_not(runtime):
    with Arena(5 * PAGE) as locked, Arena(5 * PAGE) as free:
        taken = [(arena.take(3 * PAGE // 2, torch.int16), arena.take(7, torch.int64)) for arena in (locked, free)]
        locked.lock()
        assert (locked.locking.missing, free.locking.missing) == (0, 4 * PAGE)
        assert not any(tensor.any() for pair in taken for tensor in pair)


def copied(store):
    """The tensors that GPUs copy if the embedding is tied."""
    for state in store.units:
        yield from [*(state.wire or state.params), *state.grads]


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_limit_leaves_out_what_only_the_cpu_uses(runtime, tied, fp8):
    """All of it, so that there is room for the buffers of an engine."""
    cfg, options = plain.config(tie_word_embeddings=tied), {"asynchronous": True, "fp8": fp8}
    with runs.make_store(cfg, torch.bfloat16, **options) as store:
        wanted = [*copied(store)][0 if tied else len([*store.units[0].params, *store.units[0].grads]) :]
        needed = sum(aligned(tensor.nbytes) for tensor in wanted)
        assert needed == sum(
            ModelStore.sizes(store.spec, layout_of(torch.bfloat16, generations=2), copied=True).values()
        )
    runtime.limit = needed + 10 * PAGE
    with runs.make_store(cfg, torch.bfloat16, lock=True, **options) as store:
        assert store.locking == Locking(needed)
        assert sum(runtime.registered.values()) == needed
        assert runtime.registered.keys() <= {tensor.data_ptr() for tensor in copied(store)}
    assert not runtime.registered


@pytest.mark.parametrize("share", [0, 0.25, 0.8])
def test_as_much_is_locked_as_a_limit_allows(runtime, share):
    """Less a part that is left to others; tensors of a size that was refused are not tried again."""
    with runs.make_store(TIED, torch.bfloat16, asynchronous=False) as store:
        needed = store.locking.copied
        sizes = sorted((aligned(tensor.nbytes) for tensor in copied(store)), reverse=True)
    runtime.limit = int(needed * share)
    with runs.make_store(TIED, torch.bfloat16, asynchronous=False, lock=True) as store:
        locking, registered = store.locking, sum(runtime.registered.values())
        assert locking.copied == needed and locking.locked == registered
        assert runtime.limit * 7 / 8 - 2 * sizes[0] <= registered <= runtime.limit * 7 / 8
        pageable = {at.start: len(at) for at in locking.pageable}
        assert pageable | runtime.registered == {t.data_ptr(): aligned(t.nbytes) for t in copied(store)}
        assert runtime.calls <= len(runtime.registered) + len({*sizes}) * cores() + len(sizes) / 8 + 1
        ranges = PageableRanges(locking.pageable)
        assert all(at.start in ranges and at.stop - 1 in ranges for at in locking.pageable)
        assert not any(at in ranges or at + size - 1 in ranges for at, size in runtime.registered.items())
    assert not runtime.registered


def test_smaller_tensors_are_locked_after_a_refusal(runtime):
    runtime.limit = 3 * PAGE
    with Arena(8 * PAGE) as arena:
        for pages in (2, 5, 1):
            arena.take(pages * PAGE, torch.uint8)
        arena.lock()
        assert 0 < arena.locking.locked < runtime.limit and len(runtime.registered) == 1


def test_memory_that_is_unlocked_for_others_stays_pageable(runtime):
    """What only the CPU uses is unlocked first."""
    with runs.make_store(plain.config(), torch.bfloat16, asynchronous=False, lock=True) as store:
        rest = sum(runtime.registered.values()) - store.locking.copied
        assert rest <= store.unlock(rest) < rest + 1 and not store.locking.missing
        done = store.unlock(3 * PAGE)
        assert done == store.locking.missing >= 3 * PAGE
        assert store.unlock(1 << 40) == store.locking.copied - done and not runtime.registered
    assert not runtime.registered


def test_hints_that_the_kernel_refuses(runtime, monkeypatch):
    class Refusing(mmap.mmap):
        def madvise(self, *_: int) -> None:
            refuse(errno.EINVAL)

    monkeypatch.setattr(mmap, "mmap", Refusing)
    with Arena(2 * ALIGNMENT) as arena:
        assert arena.take(ALIGNMENT, torch.uint8).sum() == 0


def test_memory_is_unlocked_before_it_is_unmapped(runtime):
    """Also where nobody closes it."""
    store = runs.make_store(plain.config(), torch.float32, asynchronous=True, lock=True)
    mapping = weakref.ref(store._arena._map)
    left = []
    weakref.finalize(mapping(), lambda: left.append(len(runtime.registered)))
    assert runtime.registered
    del store
    assert mapping() is None and left == [0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("generations", [1, 2])
def test_both_generations_and_masters_hold_what_was_loaded(generations, dtype, monkeypatch):
    """Where the pieces that are copied do not divide a buffer."""
    monkeypatch.setattr(memory, "COPIED", 100)
    with runs.make_store(plain.config(), dtype, asynchronous=generations == 2) as store:
        for state in store.units:
            assert len(state.params) == generations
            assert state.params[0].any()
            assert all(torch.equal(flat, state.params[0]) for flat in state.params)
            assert (state.masters is None) == (dtype == torch.bfloat16)
            assert state.masters is None or torch.equal(state.masters, state.params[0].float())


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_each_group_has_a_gradient_except_of_an_embedding_that_the_host_computes(tied, asynchronous, replicas):
    """Bytes per parameter: 4 for bfloat16 and its remainder, 8 for moments, 2 for a second generation, 4 per group."""
    cfg, kind = plain.config(tie_word_embeddings=tied), {"wide_grad": True, "replicas": replicas}
    with runs.make_store(cfg, torch.bfloat16, asynchronous=asynchronous, **kind) as store:
        held = 0
        for index, state in enumerate(store.units):
            groups = replicas if index or tied else 1
            assert [grad.dtype for grad in state.grads] == [torch.float32] * groups
            assert len({grad.data_ptr() for grad in state.grads}) == groups and state.grad is state.grads[0]
            buffers = [*state.params, *state.grads, *state.moments.values(), state.remainder]
            each = sum(buffer.nbytes for buffer in buffers)
            assert each == (12 + 2 * asynchronous + 4 * groups) * state.unit.numel
            held += sum(aligned(buffer.nbytes) for buffer in buffers)
        sizes = ModelStore.sizes(store.spec, layout_of(torch.bfloat16, generations=1 + asynchronous, **kind))
        assert sum(sizes.values()) == held == len(store._arena._map)


def test_replicas_need_gradients_that_can_be_added():
    with pytest.raises(AssertionError):
        runs.make_store(plain.config(), torch.bfloat16, asynchronous=True, replicas=2)


def test_each_gradient_of_a_group_is_locked(runtime):
    kind = {"lock": True, "wide_grad": True, "replicas": 3}
    with runs.make_store(plain.config(), torch.bfloat16, asynchronous=True, **kind) as store:
        assert not store.locking.missing
        assert {grad.data_ptr() for state in store.units for grad in state.grads} <= runtime.registered.keys()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_without_a_part_of_a_unit_locks_what_it_has(runtime, rank):
    """CUDA does not register empty memory."""
    kind = {"lock": True, "wide_grad": True, "share": Share(rank, 2, 2)}
    with runs.make_store(plain.config(), torch.bfloat16, asynchronous=True, **kind) as store:
        assert any(not len(state.remainder) for state in store.units)
        assert not store.locking.missing and all(runtime.registered.values())
        assert {t.data_ptr() for t in tensors(store) if len(t)} == runtime.registered.keys()
