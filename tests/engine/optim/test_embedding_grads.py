"""The embedding's gradient rows, summed: every path and number of threads adds the same in the same order."""

import ctypes
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rptrain.engine.memory.arena import Arena
from rptrain.engine.memory.step_layout import accumulate_dtype
from rptrain.engine.optim import embedding_grads, row_gradients
from rptrain.engine.optim.embedding_grads import LINE, ROWS, CpuRows, columns_each, row_stride
from rptrain.engine.optim.row_gradients import RowGradients
from tests.cases import grid

from ...layouts import layout_of
from .. import plain, runs

TOKENS = 700
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
KINDS = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "f16", "f32", "f64"])
PATHS = pytest.mark.parametrize("fallback", [False, True], ids=["native", "fallback"])
WIDTHS = pytest.mark.parametrize("columns", [1, 7, 130])
IDS = {
    "repeated": lambda generator: torch.randint(40, (TOKENS,), generator=generator) * 3,
    "one": lambda generator: torch.full((TOKENS,), 11),
    "distinct": lambda generator: torch.randperm(TOKENS, generator=generator),
}


@pytest.fixture(autouse=True)
def one_torch_thread():
    """As the engine sets it: the pool's threads are the only ones."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pool():
    with ThreadPoolExecutor(5) as executor:
        yield executor


def make(pool, *, fallback=False, threads=3):
    if not fallback and embedding_grads._library() is None:
        pytest.skip("installed without a compiler")
    return CpuRows(pool, threads, force_fallback=fallback)


def values(shape, dtype, generator):
    """Of many sizes, so that the order of a sum shows in its bits."""
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (x * 10 ** torch.randint(-3, 4, shape, generator=generator).double()).to(dtype)


def bits(tensor):
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def case(name, columns, dtype, seed=0):
    """Rows that occur, each token's place among them, the gradient, and a table's gradient that is there before."""
    generator = torch.Generator().manual_seed(seed)
    occurring, places = torch.unique(IDS[name](generator), return_inverse=True)
    gradient = values((TOKENS, columns), dtype, generator)
    return occurring, places, gradient, values((TOKENS + 5, columns), dtype, generator)


def summed(cpu, occurring, places, gradient, table, parts=2):
    """Sums and applies with `cpu`; the sums with their padding, and the table."""
    wide = accumulate_dtype(gradient.dtype)
    sums = torch.full((len(occurring), row_stride(gradient.shape[1], wide)), float("nan"), dtype=wide)
    cpu.zero(sums)
    for at, part in zip(places.chunk(parts), gradient.chunk(parts), strict=True):
        cpu.add(sums, at, part)
    table = table.clone()
    cpu.apply(sums, torch.arange(len(sums)), occurring, table)
    return sums, table


def looped(occurring, places, gradient, table):
    """The same, token by token."""
    sums = torch.zeros(len(occurring), gradient.shape[1], dtype=accumulate_dtype(gradient.dtype))
    for place, row in zip(places.tolist(), gradient, strict=True):
        sums[place] = sums[place] + row.to(sums.dtype)
    table = table.clone()
    for row, total in zip(occurring.tolist(), sums, strict=True):
        table[row] = (table[row].to(sums.dtype) + total).to(table.dtype)
    return sums, table


@pytest.mark.sample(12)
@KINDS
@PATHS
@WIDTHS
@pytest.mark.parametrize("ids", IDS)
def test_adds_token_by_token_on_any_number_of_threads(pool, ids, columns, fallback, dtype):
    given = case(ids, columns, dtype)
    sums, table = looped(*given)
    absent = torch.ones(len(table), dtype=torch.bool)
    absent[given[0]] = False
    for threads in range(1, 6):
        got, got_table = summed(make(pool, fallback=fallback, threads=threads), *given)
        assert torch.equal(bits(got[:, :columns]), bits(sums))
        assert not got[:, columns:].any(), "padding"
        assert torch.equal(bits(got_table), bits(table))
        assert torch.equal(bits(got_table[absent]), bits(given[3][absent]))


@pytest.mark.sample(6)
@KINDS
@PATHS
@pytest.mark.parametrize("ids", IDS)
def test_sums_are_exact_where_they_can_be(pool, ids, fallback, dtype):
    """Of whole numbers, in float64; the table's rows are the sums rounded once."""
    occurring, places, _, _ = case(ids, 1, dtype)
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randint(-200, 200, (TOKENS, 37), generator=generator).to(dtype)
    exact = torch.zeros(len(occurring), 37, dtype=torch.float64).index_add_(0, places, gradient.double())
    sums, table = summed(make(pool, fallback=fallback), occurring, places, gradient, torch.zeros(TOKENS, 37).to(dtype))
    assert torch.equal(sums[:, :37].double(), exact)
    assert torch.equal(table[occurring], exact.to(dtype))


@PATHS
def test_a_float32_gradient_takes_sums_of_bfloat16_rows(pool, fallback):
    """The table's gradient where it is summed over rounds."""
    occurring, places, gradient, table = case("repeated", 70, torch.bfloat16)
    sums, got = summed(make(pool, fallback=fallback), occurring, places, gradient, table.float())
    expected = table.float()
    expected[occurring] += sums[:, :70]
    assert torch.equal(got, expected)
    assert not torch.equal(got, got.bfloat16().float())


@PATHS
def test_rounds_to_the_nearest_and_ties_to_even(pool, fallback):
    """Every bfloat16 with the low halves of float32 around the ties: as torch rounds; what is not a number stays so."""
    high = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    lows = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    sums = (high[:, None] | lows).view(torch.float32)
    sums = torch.cat([sums, torch.zeros(len(sums), 10)], 1)  # to whole cache lines
    table = torch.zeros(len(sums), 6, dtype=torch.bfloat16)
    make(pool, fallback=fallback).apply(sums, torch.arange(len(sums)), torch.arange(len(sums)), table)
    expected = (sums[:, :6] + 0.0).bfloat16()
    nan = sums[:, :6].isnan()
    assert torch.equal(table.isnan(), nan)
    assert torch.equal(bits(table)[~nan], bits(expected)[~nan])


@KINDS
@PATHS
def test_clears_the_rows_it_is_given(pool, fallback, dtype):
    table = values((5 * ROWS, 7), dtype, torch.Generator().manual_seed(0))
    given = torch.arange(3, 4 * ROWS, 2)
    expected = table.clone()
    expected[given] = 0
    cpu = make(pool, fallback=fallback)
    cpu.clear(table, given[:0])
    assert table[given].any()
    cpu.clear(table, given)
    assert torch.equal(table, expected)


@pytest.mark.sample(6)
@KINDS
@pytest.mark.parametrize("columns", [1, 7, 130, 2048])
def test_threads_share_no_cache_line_of_the_sums(columns, dtype):
    wide = accumulate_dtype(dtype).itemsize
    stride = row_stride(columns, accumulate_dtype(dtype))
    assert stride >= columns and stride * wide % LINE == 0
    for threads in (1, 2, 3, 5, 16):
        width = columns_each(columns, dtype, threads)
        assert width * wide % LINE == 0
        assert width * threads >= columns
    assert columns_each(2048, dtype, 16) == 128


def test_every_instruction_set_gives_the_same_bits(pool, builds, monkeypatch):
    for name, library in builds(Path(embedding_grads.__file__).with_name("embedding_grads.c")).items():
        monkeypatch.setattr(embedding_grads, "_library", lambda library=library: ctypes.CDLL(str(library)))
        for dtype in DTYPES:
            given = case("repeated", 130, dtype)
            for got, expected in zip(summed(make(pool), *given), looped(*given), strict=True):
                assert torch.equal(bits(got[:, :130].contiguous()), bits(expected)), name


def test_an_error_in_a_pool_thread_surfaces(pool, monkeypatch):
    class Broken:
        def rows_clear(self, job):
            raise RuntimeError("broken")

    monkeypatch.setattr(embedding_grads, "_library", Broken)
    with pytest.raises(RuntimeError, match="broken"):
        make(pool).clear(torch.ones(200, 3), torch.arange(200))


def test_without_the_compiled_library_torch_runs(pool, monkeypatch):
    monkeypatch.setattr(embedding_grads, "_library", lambda: None)
    cpu = CpuRows(pool, 2)
    assert not cpu.native
    assert torch.equal(summed(cpu, *(given := case("one", 3, torch.float32)))[1], looped(*given)[1])


# An iteration's sums


def iterations(count):
    """Ids [M, T]; each iteration has others, and some ids never come."""
    generator = torch.Generator().manual_seed(3)
    for i in range(count):
        yield torch.randint(i, 61 - 7 * i, (4, 50), generator=generator), generator


@pytest.mark.sample(6)
@pytest.mark.parametrize("native", [True, False], ids=["native", "fallback"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@KINDS
def test_an_iteration_is_one_sum_in_token_order(pool, tied, native, dtype, monkeypatch):
    """As index_add_ over all tokens of all micro-batches; the table is rounded once."""
    make(pool, fallback=not native)
    if not native:
        monkeypatch.setattr(embedding_grads, "_library", lambda: None)
    wide = accumulate_dtype(dtype)
    with runs.make_store(plain.config(hidden_size=160), dtype, asynchronous=False) as store:
        state = store.units[0]
        table = state.unit.views(state.grad)["embed"]
        table.fill_(7.0)  # what another engine left
        spec = SimpleNamespace(tied=tied, padding_row=None)
        gradients = RowGradients(state, spec, layout_of(dtype, tokens=200), CpuRows(pool, 3))
        places = set()
        for early, (ids, generator) in enumerate(iterations(4)):
            gradient = values((4, 50, 160), dtype, generator)
            head = values(table.shape, dtype, generator) if tied else torch.zeros_like(table)
            gradients.begin(ids, range(len(ids)), [0] * len(ids))
            if tied:  # the head's gradient comes whenever it comes
                table.copy_(head)
            for m in range(4):
                gradients.add(m, gradient[m])
                if m == early or m == 3:
                    gradients.apply()
            places.add(gradients._sums.data_ptr())
            sums = torch.zeros(61, 160, dtype=wide)
            for row, total in zip(ids.flatten().tolist(), gradient.flatten(0, 1), strict=True):
                sums[row] += total.to(wide)
            assert torch.equal(bits(table), bits((head.to(wide) + sums).to(dtype)))
        assert len(places) == 1, "the buffer is kept"


@PATHS
def test_rows_of_the_sums_are_added_to_each_other(pool, fallback):
    for dtype in (torch.float32, torch.float64):
        sums = values((3 * ROWS, row_stride(7, dtype)), dtype, torch.Generator().manual_seed(0))
        to, source = torch.arange(0, 3 * ROWS, 3), torch.arange(2, 3 * ROWS, 3)
        expected = sums.clone()
        expected[to] += sums[source]
        make(pool, fallback=fallback).merge(sums, to, source)
        assert torch.equal(sums, expected)


@pytest.mark.sample(8)
@pytest.mark.parametrize("native", [True, False], ids=["native", "fallback"])
@pytest.mark.parametrize("replicas", [2, 3, 4])
@KINDS
def test_groups_of_replicas_are_summed_as_a_tree(pool, replicas, native, dtype, monkeypatch):
    """Each group in token order; then the groups that have the row. Groups take turns, and rows are applied early."""
    make(pool, fallback=not native)
    if not native:
        monkeypatch.setattr(embedding_grads, "_library", lambda: None)
    wide, generator = accumulate_dtype(dtype), torch.Generator().manual_seed(replicas)
    ids = torch.randint(61, (2 * replicas, 30), generator=generator)
    gradient = values((*ids.shape, 96), dtype, generator)
    groups = [m % replicas for m in range(len(ids))]
    with runs.make_store(plain.config(hidden_size=96), dtype, asynchronous=False) as store:
        state = store.units[0]
        layout = layout_of(dtype, tokens=ids.numel() // replicas, wide_grad=True, replicas=replicas)
        gradients = RowGradients(state, store.spec, layout, CpuRows(pool, 3))
        gradients.begin(ids, range(len(ids)), groups)
        for m in range(len(ids)):
            gradients.add(m, gradient[m])
            gradients.apply()
        sums = {}  # by row and group
        for m, (tokens, rows) in enumerate(zip(ids.tolist(), gradient.to(wide), strict=True)):
            for token, row in zip(tokens, rows, strict=True):
                sums[token, groups[m]] = sums.get((token, groups[m]), 0) + row
        expected = torch.zeros(61, 96, dtype=dtype)
        for token in ids.unique().tolist():
            parts = [sums.get((token, group)) for group in range(replicas)]
            expected[token] = tree_sum(parts).to(dtype)
        assert torch.equal(state.unit.views(state.grad)["embed"], expected)


def tree_sum(parts):
    """Of a power of two of parts, the halves are added up and then both; None adds nothing."""
    if len(parts) == 1:
        return parts[0]
    half = 1 << (len(parts) - 1).bit_length() - 1
    left, right = tree_sum(parts[:half]), tree_sum(parts[half:])
    return left if right is None else right if left is None else left + right


@pytest.mark.sample(8)
@KINDS
@pytest.mark.parametrize("tokens", [8, 200])
@pytest.mark.parametrize("hidden", [32, 130])
@pytest.mark.parametrize("replicas", [1, 2])
def test_takes_what_is_planned(pool, replicas, tokens, hidden, dtype):
    """Also where every token differs; and a buffer that is not used any more is given back."""
    with runs.make_store(plain.config(hidden_size=hidden), dtype, asynchronous=False) as store:
        layout = layout_of(dtype, tokens=tokens // replicas, wide_grad=replicas > 1, replicas=replicas)
        gradients = RowGradients(store.units[0], store.spec, layout, CpuRows(pool, 2))
        gradients.begin(torch.arange(tokens).view(2, -1) % 61, range(2), [0, replicas - 1])
        taken = (gradients._buffer, gradients._rows, gradients._places, gradients._sources)
        assert sum(t.nbytes for t in taken) == RowGradients.nbytes(store.spec, layout)
        assert len(gradients._sums) == len(gradients._buffer)


def test_the_buffer_is_given_back_with_the_engines_threads(monkeypatch):
    maps = []

    class Watched(Arena):
        def __init__(self, nbytes):
            super().__init__(nbytes)
            maps.append(weakref.ref(self._map))

    monkeypatch.setattr(row_gradients, "Arena", Watched)
    batch = plain.make_batches(1)[0]
    with runs.make_store(plain.config(), torch.float32, asynchronous=False) as store:
        engine = runs.engine_of(store, "FB0-4 | N=1 M=4 MR=4", tokens=32, asynchronous=False)
        with engine:
            engine.forward_backward(batch)
            engine.step(1e-3)
            assert maps[0]() is not None
        assert maps[0]() is None
        assert engine.applied == 1


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("size", [grid(4, id="one-round"), pytest.param(2, id="two-rounds")])
def test_a_run_has_the_same_bits_on_any_number_of_threads_and_without_a_compiler(pool, tied, size, monkeypatch):
    make(pool)
    cfg = plain.config(hidden_size=96, tie_word_embeddings=tied)
    batches = plain.make_batches(3)
    plan = f"F0-1 F2-3 FB4-4 B2-3 B0-1 | N=2 M=4 MR={size}"

    def go(threads):
        options = {"dtype": torch.bfloat16, "asynchronous": True, "max_grad_norm": 1.0}
        return runs.run(cfg, batches, plan, threads=threads, **options)[:3]

    results = [go(1), go(3)]
    monkeypatch.setattr(embedding_grads, "_library", lambda: None)
    results.append(go(2))
    for losses, norms, weights in results[1:]:
        assert losses == results[0][0]
        assert norms == results[0][1]
        assert all(torch.equal(weights[name], results[0][2][name]) for name in weights)
