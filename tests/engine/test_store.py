"""Page-locked memory, with a stand-in for CUDA's runtime that knows what is registered and what was in memory."""

import ctypes
import mmap
import threading
import weakref

import pytest
import torch

from rptrain.engine import store as memory
from rptrain.engine.distributed.share import Share
from rptrain.engine.store import Arena, ModelStore, aligned
from rptrain.utils.parallel import cores, in_parallel

from ..run_tools import PATIENCE
from . import plain, runs

PAGE = mmap.PAGESIZE


class Runtime:
    """Registers ranges as CUDA does: none twice, and refuses the call of number `refused`, from 0."""

    def __init__(self, refused=None):
        self.refused = refused
        self.calls = 0
        self.registered, self.resident = {}, []
        self.refuser = None  # the thread whose call was refused
        self.known = threading.Event()  # set: that thread has taken note of it
        self._lock = threading.Lock()

    def cudaHostRegister(self, address, nbytes, flags):
        assert flags == 1
        pages = (ctypes.c_ubyte * (nbytes // PAGE))()
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), pages) == 0
        with self._lock:
            self.calls += 1
            late = self.refuser is not None
            if self.calls - 1 == self.refused:
                self.refuser = threading.get_ident()
                return 2
            assert all(at + size <= address or address + nbytes <= at for at, size in self.registered.items())
            self.registered[address] = nbytes
            self.resident.append(all(page & 1 for page in pages))
        if late:
            assert self.known.wait(PATIENCE)
        return 0

    def cudaHostUnregister(self, address):
        with self._lock:
            del self.registered[address]


@pytest.fixture
def runtime(monkeypatch):
    made = Runtime()
    monkeypatch.setattr(memory, "_cudart", lambda: made)
    return made


def tensors(store):
    for state in store.units:
        yield from [*state.params, *state.wire, state.grad, *state.moments.values(), state.remainder]


@pytest.mark.parametrize("fp8", [False, True])
def test_each_tensor_is_locked_by_itself_in_whole_pages_that_are_there(runtime, fp8):
    with runs.make_store(plain.config(), torch.bfloat16, asynchronous=True, lock=True, fp8=fp8) as store:
        assert store.locked
        assert runtime.registered == {t.data_ptr(): -(-t.nbytes // PAGE) * PAGE for t in tensors(store)}
        assert all(runtime.resident)
    assert not runtime.registered


def test_memory_is_zero_locked_or_not(runtime):
    with Arena(5 * PAGE) as locked, Arena(5 * PAGE) as free:
        taken = [(arena.take(3 * PAGE // 2, torch.int16), arena.take(7, torch.int64)) for arena in (locked, free)]
        locked.lock()
        assert locked.locked and not free.locked
        assert not any(tensor.any() for pair in taken for tensor in pair)


@pytest.mark.parametrize("refused", [0, 7, 23])
def test_where_one_is_refused_none_stays_locked(runtime, refused, monkeypatch):
    """Each of the other threads may make one more call, which it had decided on before the refusal was known."""

    def noted(function, items, **more):
        def call(item):
            function(item)
            if runtime.refuser == threading.get_ident():
                runtime.known.set()

        in_parallel(call, items, **more)

    monkeypatch.setattr(memory, "in_parallel", noted)
    runtime.refused = refused
    with runs.make_store(plain.config(), torch.bfloat16, asynchronous=False, lock=True) as store:
        assert not store.locked
        assert not runtime.registered
        assert runtime.calls <= refused + cores()


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
        sizes = ModelStore.sizes(store.spec, torch.bfloat16, generations=1 + asynchronous, **kind)
        assert sum(sizes.values()) == held == len(store._arena._map)


def test_replicas_need_gradients_that_can_be_added():
    with pytest.raises(AssertionError):
        runs.make_store(plain.config(), torch.bfloat16, asynchronous=True, replicas=2)


def test_each_gradient_of_a_group_is_locked(runtime):
    kind = {"lock": True, "wide_grad": True, "replicas": 3}
    with runs.make_store(plain.config(), torch.bfloat16, asynchronous=True, **kind) as store:
        assert store.locked
        assert {grad.data_ptr() for state in store.units for grad in state.grads} <= runtime.registered.keys()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_without_a_part_of_a_unit_locks_what_it_has(runtime, rank):
    """CUDA does not register empty memory."""
    kind = {"lock": True, "wide_grad": True, "share": Share(rank, 2, 2)}
    with runs.make_store(plain.config(), torch.bfloat16, asynchronous=True, **kind) as store:
        assert any(not len(state.remainder) for state in store.units)
        assert store.locked and all(runtime.registered.values())
        assert {t.data_ptr() for t in tensors(store) if len(t)} == runtime.registered.keys()
