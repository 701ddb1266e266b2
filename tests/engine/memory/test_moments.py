"""Moments in 16 and in 8 bits: a reference that looks codes up in tables, the means that rounding keeps, equal bits."""

import numpy as np
import pytest
import torch

from rptrain.engine.memory import moments
from rptrain.engine.memory.moments import CHUNK
from rptrain.engine.memory.store import ModelStore
from rptrain.engine.optim import adam
from rptrain.engine.optim.adam import join, split
from rptrain.models.families import registry
from rptrain.models.locate import locate, read_config
from tests.cases import UPDATES, grid

from ...layouts import layout_of
from .. import plain, runs
from ..optim.updates import BETAS, EPS, PATHS, assert_same_bits, instruction_sets, make_adam, values

pytestmark = pytest.mark.usefixtures("one_torch_thread")
SMALL = pytest.mark.parametrize("kind", ["bf16", "int8"])
DTYPES = pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
    ],
    ids=["bf16-bf16", "bf16-f32", "f16-f16", "f16-f32", "f32"],
)
PINNED = [3964924996, 2564193407]
F = np.float32
COUNT = CHUNK + 10 * moments.BLOCK


def empty(kind, count):
    return {name: torch.zeros(count // n, dtype=dtype) for name, dtype, n in moments.layout(kind, torch.float32)}


def gradients(count, seed, dtype=torch.float32):
    """Of sizes that differ within a block and between blocks; some are zero, and the last block is."""
    grad = values(count, seed, torch.float64) * 10 ** torch.linspace(-6, 1, count, dtype=torch.float64)
    grad[:: moments.BLOCK] *= 1e3
    grad[-moments.BLOCK :] = 0
    if dtype == torch.float16:
        grad.clamp_(-6e4, 6e4)
    return grad.to(dtype)


def start(kind, dtype, count):
    master = values(count, 1)
    states = {"source": master.clone(), "remainder": None, **empty(kind, count)}
    if dtype == torch.bfloat16:
        states |= {"source": master.to(dtype), "remainder": torch.empty(count, dtype=torch.int16)}
        split(master, states["source"], states["remainder"])
    elif dtype == torch.float16:
        states |= {"source": master.to(dtype), "masters": master.clone()}
    return states, master


def update(optimizer, states, grad, step=1, rate=1e-2, target=None, noise=None, part=slice(None)):
    """In place unless `target` is given."""
    noise = moments.noise(3, step, 5) if noise is None else noise
    options = {"lr": rate, "weight_decay": 0.1, "step": step, "grad_scale": 0.37, "noise": noise}
    optimizer.update(target=states["source"] if target is None else target, grad=grad, **states, **options)


def trained(optimizer, kind, dtype, grad_dtype, count, steps=4, in_place=True):
    states, _ = start(kind, dtype, count)
    for step in range(1, steps + 1):
        target = None if in_place else torch.full_like(states["source"], float("nan"))
        update(optimizer, states, gradients(count, 100 + step, grad_dtype), step, target=target)
        states["source"] = states["source"] if in_place else target
    return states


# The reference: one number after the other is read, updated and rounded, in float32. It looks up what lies below a
# number in a table, where the code takes roots.


def random_halves(noise, count):
    """MurmurHash3's last steps in Python's integers."""
    mask = 0xFFFFFFFF
    halves = []
    for i in range(count):
        x = (noise + i) & mask
        x = ((x ^ x >> 16) * 0x85EBCA6B) & mask
        x = ((x ^ x >> 13) * 0xC2B2AE35) & mask
        x ^= x >> 16
        halves.append((x & 0xFFFF, x >> 16))
    return np.array(halves, dtype=np.int64).T


class Bf16Reference:
    """Floats between whose neighbors in bfloat16 a 16-bit number decides."""

    def __init__(self, count):
        self.m, self.v = np.zeros(count, F), np.zeros(count, F)

    def store(self, m, v, random):
        self.m, self.v = (self._rounded(x, bits) for x, bits in ((m, random[0]), (v, random[1])))
        return v

    def _rounded(self, x, random):
        down = (x.view(np.uint32) & 0xFFFF0000).view(F)
        up = ((down.view(np.uint32).astype(np.int64) + 0x10000) & 0xFFFFFFFF).astype(np.uint32).view(F)
        part = x.view(np.uint32).astype(np.int64) & 0xFFFF  # of 65536, from down to up
        return np.where(random >= 0x10000 - part, up, down)


class CodeReference:
    """127 and 255 squares a block, and chances by the distance from the squares on both sides."""

    def __init__(self, count):
        self.m, self.v = np.zeros(count, F), np.zeros(count, F)

    def store(self, m, v, random):
        v = np.minimum(v, F(1e38))
        for first in range(0, len(m), 128):
            block = slice(first, first + 128)
            shares = (random[:, block].astype(F) + F(0.5)) / F(65536)
            self.m[block] = self._means(m[block], shares[0])
            self.v[block] = self._squares(np.sqrt(v[block]), shares[1])
        return v

    def _means(self, m, shares):
        squares = np.arange(128, dtype=F) ** 2
        top = max(np.abs(m).max(), F(1e-20))
        size = np.abs(m) * (squares[-1] / top)
        low = np.searchsorted(squares[:-1], size, side="right") - 1
        up = shares * (squares[low + 1] - squares[low]) < size - squares[low]
        return np.sign(m) * squares[low + up] * (top / squares[-1])

    def _squares(self, root, shares):
        squares = np.arange(256, dtype=F) ** 2
        top = max(root.max(), F(1e-20))
        size = root * (squares[-1] / top)
        low = np.maximum(np.searchsorted(squares[:-1], size, side="right") - 1, 1)
        gap = squares[low + 1] * squares[low + 1] - squares[low] * squares[low]
        up = shares * gap < size * size - squares[low] * squares[low]
        kept = np.where(root > 0, squares[low + up], F(0)) * (top / squares[-1])
        return kept * kept


REFERENCES = {"bf16": Bf16Reference, "int8": CodeReference}


def reference(kind, master, grads, rate=1e-2):
    """(master weights, exp_avg, exp_avg_sq as they are kept) after a step for each gradient."""
    kept, master = REFERENCES[kind](len(master)), master.numpy().copy()
    beta1, beta2 = BETAS
    for step, grad in enumerate(grads, 1):
        g = grad.float().numpy() * F(0.37)
        m = F(beta1) * kept.m + F(1 - beta1) * g
        with np.errstate(over="ignore"):
            v = F(beta2) * kept.v + F(1 - beta2) * (g * g)
        v = kept.store(m, v, random_halves(moments.noise(3, step, 5), len(master)))
        divisor = np.sqrt(v) * F((1 - beta2**step) ** -0.5) + F(EPS)
        master = master * F(1 - rate * 0.1) - F(rate / (1 - beta1**step)) * m / divisor
    return master, kept.m, kept.v


@pytest.mark.sample(10)
@SMALL
@DTYPES
@PATHS
def test_equals_the_reference_to_the_bit(kind, dtype, grad_dtype, fallback):
    count, steps = 40 * moments.BLOCK, 6
    _, master = start(kind, dtype, count)
    grads = [gradients(count, 100 + step, grad_dtype) for step in range(1, steps + 1)]
    expected = reference(kind, master, grads)
    with make_adam(fallback) as optimizer:
        states = trained(optimizer, kind, dtype, grad_dtype, count, steps)
    weights = states.get("masters", states["source"])
    weights = join(weights, states["remainder"]) if dtype == torch.bfloat16 else weights
    for name, ours, theirs in zip(
        ("weights", "exp_avg", "exp_avg_sq"), (weights, *moments.read(states)), expected, strict=True
    ):
        assert torch.equal(ours, torch.from_numpy(theirs)), name
    assert not torch.equal(weights, master)


# What rounding keeps


def rounded(kind, exp_avg, exp_avg_sq, noise):
    buffers = empty(kind, len(exp_avg))
    moments.write(buffers, exp_avg.clone(), exp_avg_sq.clone(), noise)
    return moments.read(buffers)


@SMALL
def test_the_mean_is_kept(kind):
    """Over many draws, of numbers from a millionth of the block's largest on, to five of the mean's own deviations."""
    draws = 4000
    size = 10 ** torch.linspace(-6, 0, moments.BLOCK, dtype=torch.float64)
    size[0] = 1
    m, v = (size * torch.tensor([1.0, -1.0]).repeat(moments.BLOCK // 2)).float(), size.float() * 3e-7
    found = [rounded(kind, m, v, moments.noise(0, draw, 0)) for draw in range(draws)]
    for name, exact, drawn in (("exp_avg", m, [a for a, _ in found]), ("exp_avg_sq", v, [b for _, b in found])):
        drawn = torch.stack(drawn).double()
        error = (drawn.mean(0) - exact.double()).abs()
        assert bool((error <= 5 * drawn.std(0) / draws**0.5 + 2e-5 * exact.abs()).all()), name
        assert len(drawn.unique(dim=0)) > 100, f"{name} must be drawn"


@SMALL
@PATHS
def test_the_second_moment_decays(kind, fallback):
    """With beta2 = 0.999 a step changes it by less than half of what can be told apart: to the nearest it would stay.

    In int8 the block's largest is exact, and the others keep their distance from it.
    """
    count, steps = 64 * moments.BLOCK, 150
    grad = torch.full((count,), 1e-3)
    grad[:: moments.BLOCK] = 1e-1
    states, _ = start(kind, torch.float32, count)
    with make_adam(fallback) as optimizer:
        optimizer.betas = (0.9, 0.999)
        for step in range(1, steps + 1):
            update(optimizer, states, grad if step == 1 else torch.zeros(count), step)
    _, v = moments.read(states)
    expected = 0.001 * (0.37 * grad) ** 2 * 0.999 ** (steps - 1)
    inner = torch.arange(count) % moments.BLOCK != 0
    assert v[inner].mean() == pytest.approx(expected[1].item(), rel=0.01)
    assert v[~inner].mean() == pytest.approx(expected[0].item(), rel=0.05)
    assert len(v[inner].unique()) > 1


@SMALL
def test_a_small_first_moment_is_learned_beside_a_large_one(kind):
    """Gradients of a hundred thousandth of the block's largest, whose share of 1 - beta1 is below its least code."""
    count, steps = 64 * moments.BLOCK, 60
    grad = torch.full((count,), 1e-5)
    grad[:: moments.BLOCK] = 1
    states, _ = start(kind, torch.float32, count)
    with make_adam() as optimizer:
        for step in range(1, steps + 1):
            update(optimizer, states, grad, step)
    m, _ = moments.read(states)
    inner = torch.arange(count) % moments.BLOCK != 0
    assert m[inner].mean() == pytest.approx(0.37e-5 * (1 - 0.9**steps), rel=0.1)


@pytest.mark.parametrize(
    ("kind", "decades", "most"), [("bf16", 0, 0.02), ("bf16", 2, 0.02), ("int8", 0, 0.05), ("int8", 2, 0.14)]
)
def test_how_far_updates_are_off(kind, decades, most):
    """Root mean square, of the update itself, once the noise has gathered; gradients in a block differ by `decades`."""
    count, steps, settled = 32 * moments.BLOCK, 1500, 1000
    generator = torch.Generator().manual_seed(0)
    size = 1e-3 * 10 ** (-decades * torch.rand(count, generator=generator))
    exact = {"source": torch.zeros(count), "remainder": None, **empty("fp32", count)}
    small = {"source": torch.zeros(count), "remainder": None, **empty(kind, count)}
    right, found = [], []
    with make_adam() as optimizer:
        optimizer.betas = (0.9, 0.999)
        for step in range(1, steps + 1):
            grad = torch.randn(count, generator=generator) * size
            for states, changes in ((exact, right), (small, found)):
                states["source"].zero_()
                update(optimizer, states, grad, step)
                if step > settled and step % 20 == 0:
                    changes.append(states["source"].double())
    right, found = torch.stack(right), torch.stack(found)
    assert most / 3 < (found - right).norm() / right.norm() < most
    assert (found * right).sum() / right.square().sum() == pytest.approx(1, abs=0.03)


def test_only_zero_becomes_the_divisor_zero():
    v = torch.zeros(2 * moments.BLOCK)
    v[0], v[1] = 1.0, 1e-30
    for draw in range(50):
        _, kept = rounded("int8", torch.zeros_like(v), v, draw)
        assert kept[0] == pytest.approx(1, rel=1e-6) and kept[1] == pytest.approx(255**-4, rel=1e-5)
        assert not kept[2:].any()


@PATHS
def test_what_overflows_stays_a_number(fallback):
    """In float32 a gradient of 1e30 has no square: such a weight does not move until its moment has decayed."""
    states, _ = start("int8", torch.float32, moments.BLOCK)
    grad = torch.full((moments.BLOCK,), 1e30)
    with make_adam(fallback) as optimizer:
        for step in (1, 2):
            update(optimizer, states, grad, step)
    assert all(bool(tensor.isfinite().all()) for tensor in (states["source"], *moments.read(states)))


def test_the_numbers_that_rounding_draws_are_the_same_for_ever():
    """They follow from seed, step, unit and element; a checkpoint goes on with them."""
    assert [moments.noise(0, 1, 0), moments.noise(7, 123, 45)] == PINNED
    several = {moments.noise(seed, step, unit) for seed in range(5) for step in range(5) for unit in range(5)}
    assert len(several) == 125


# Equal bits


@pytest.mark.sample(10)
@SMALL
@DTYPES
@pytest.mark.parametrize("count", [moments.BLOCK, CHUNK, 3 * CHUNK + 11 * moments.BLOCK])
def test_thread_counts_generations_and_paths_give_the_same_bits(kind, dtype, grad_dtype, count):
    results = []
    for threads, fallback, in_place in ((1, False, True), (2, False, False), (3, False, True), (2, True, False)):
        with make_adam(fallback, threads) as optimizer:
            results.append(trained(optimizer, kind, dtype, grad_dtype, count, in_place=in_place))
    for other in results[1:]:
        assert_same_bits(results[0], other)


@SMALL
def test_fallback_joins_its_chunks(kind):
    count = adam.FALLBACK_CHUNK + 33 * moments.BLOCK
    with make_adam() as native, make_adam(fallback=True) as fallback:
        results = [trained(path, kind, torch.bfloat16, torch.bfloat16, count, 2) for path in (native, fallback)]
    assert_same_bits(*results)


@SMALL
@PATHS
def test_ranges_draw_as_the_whole_does(kind, fallback):
    """A unit is updated in ranges of equal weight decay."""
    whole, _ = start(kind, torch.float32, COUNT)
    parts, _ = start(kind, torch.float32, COUNT)
    grad, cut = gradients(COUNT, 1), CHUNK // 2 + 3 * moments.BLOCK
    with make_adam(fallback) as optimizer:
        update(optimizer, whole, grad, noise=2**32 - 1000)
        for part in (slice(0, cut), slice(cut, COUNT)):
            views = {}
            for name, tensor in parts.items():
                shared = 1 if tensor is None else COUNT // len(tensor)
                views[name] = None if tensor is None else tensor[part.start // shared : part.stop // shared]
            update(optimizer, views, grad[part], noise=2**32 - 1000 + part.start)
    assert_same_bits(whole, parts)


@pytest.mark.long
@pytest.mark.parametrize("kind", [grid("bf16"), "int8"])
def test_every_instruction_set_gives_the_same_bits(kind, builds):
    results = []
    for _ in instruction_sets(builds):
        with make_adam() as optimizer:
            found = {}
            for dtype, grad_dtype in ((torch.bfloat16,) * 2, (torch.float16,) * 2, (torch.float32,) * 2):
                states = trained(optimizer, kind, dtype, grad_dtype, COUNT)
                found |= {f"{dtype} {name}": tensor for name, tensor in states.items()}
            results.append(found)
    for other in results[1:]:
        assert_same_bits(results[0], other)


# In the engine


STAGES = ["F0-1 F2-3 FB4-4 B2-3 B0-1", "FB0-4"]
FORMATS = pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])


def engine_run(plan, kind, *, asynchronous=True, seed=0, count=5, threads=None):
    """Losses, weights and moments."""
    cfg = plain.config(tie_word_embeddings=True)
    options = {"asynchronous": asynchronous, "max_grad_norm": 1.0, "weight_decay": 0.1, "seed": seed}
    with runs.make_store(cfg, torch.bfloat16, asynchronous=asynchronous, moments=kind) as store:
        losses, _, weights, _ = runs.run(None, plain.make_batches(count), plan, store=store, threads=threads, **options)
        kept = [tensor.clone() for state in store.units for tensor in state.moments.values()]
    return losses, [*weights.values(), *kept]


@SMALL
@UPDATES
def test_same_bits_on_any_number_of_workers_and_any_plan(kind, asynchronous):
    losses, state = engine_run(f"{STAGES[0]} | N=1 M=4 MR=4", kind, asynchronous=asynchronous)
    for plan, workers, threads in ((0, 2, 1), (0, 3, 2), (1, 2, 3)):
        got = engine_run(f"{STAGES[plan]} | N={workers} M=4 MR=4", kind, asynchronous=asynchronous, threads=threads)
        assert got[0] == losses
        assert all(torch.equal(a, b) for a, b in zip(got[1], state, strict=True))


@SMALL
def test_the_seed_decides_how_moments_are_rounded(kind):
    plan = f"{STAGES[0]} | N=1 M=4 MR=4"
    one, other = (engine_run(plan, kind, seed=seed, count=2)[1] for seed in (0, 1))
    assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("kind", [grid("bf16"), "int8"])
def test_follows_the_run_with_exact_moments(kind):
    plan = f"{STAGES[0]} | N=2 M=4 MR=4"
    exact, small = (engine_run(plan, name, asynchronous=False, count=20) for name in ("fp32", kind))
    assert small[0] != exact[0]
    assert small[0] == pytest.approx(exact[0], rel=2e-3)


# Memory


@pytest.mark.sample(6)
@FORMATS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("generations", [1, 2], ids=["sync", "async"])
def test_a_store_takes_the_bytes_that_are_counted(kind, dtype, generations):
    spec = registry.build(plain.config())
    with ModelStore(spec, layout_of(dtype, generations=generations, moments=kind)) as store:
        for state in store.units:
            buffers = [*state.params, state.grad, *state.moments.values()]
            buffers += [rest for rest in (state.remainder, state.masters) if rest is not None]
            wide = moments.bytes_each(kind, torch.float32)
            rest = {torch.bfloat16: 2, torch.float16: 4, torch.float32: 0}[dtype]
            each = dtype.itemsize * (generations + 1) + wide + rest
            assert sum(tensor.nbytes for tensor in buffers) == each * state.unit.numel


@pytest.mark.parametrize("name", ["qwen3-1.7b", "llama-3.1-8b", "qwen3-32b"])
@pytest.mark.parametrize(("kind", "most"), [("fp32", 14), ("bf16", 10), ("int8", 8.0625)])
def test_bytes_a_parameter_in_sync(name, kind, most):
    """Of models that exist: all buffers of all units with their pages, to a thousandth of a byte."""
    spec = registry.build(read_config(locate(name)))
    taken = sum(ModelStore.sizes(spec, layout_of(torch.bfloat16, generations=1, moments=kind)).values())
    assert taken / spec.num_parameters == pytest.approx(most, abs=1e-3)
