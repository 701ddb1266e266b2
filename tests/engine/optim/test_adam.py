import itertools
import math
import threading
from concurrent.futures import FIRST_COMPLETED, wait

import pytest
import torch

from benchmarks import adam as bench_adam
from rptrain.engine.memory.moments import CHUNK
from rptrain.engine.optim import adam
from rptrain.engine.optim.adam import CpuAdam, UpdateArgs, join, split
from rptrain.utils.native import ended

from ...run_tools import PATIENCE
from .updates import BETAS, EPS, PATHS, assert_same_bits, instruction_sets, make_adam, values

pytestmark = pytest.mark.usefixtures("one_torch_thread")
LENGTHS = (1, 7, CHUNK, 3 * CHUNK + 1357)
KINDS = pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
    ids=["bf16-bf16", "bf16-f32", "f16-f16", "f16-f32", "f32", "f64"],
)


def square_sum(optimizer, *grads):
    return math.fsum(optimizer.squares(*grads).tolist())


def make_states(count, dtype):
    master = values(count, 0, torch.float64 if dtype == torch.float64 else torch.float32)
    states = {
        "source": torch.full((count,), float("nan"), dtype=dtype),
        "remainder": torch.empty(count, dtype=torch.int16) if dtype == torch.bfloat16 else None,
        "exp_avg": torch.zeros_like(master),
        "exp_avg_sq": torch.zeros_like(master),
    }
    if dtype == torch.float16:
        states["masters"] = master.clone()
    if dtype == torch.bfloat16:
        split(master, states["source"], states["remainder"])
    else:
        states["source"].copy_(master)
    return states, master


def run(optimizer, states, grad_dtype, steps=5, in_place=True):
    states = {name: t if t is None else t.clone() for name, t in states.items()}
    for step in range(1, steps + 1):
        grad = values(len(states["source"]), 100 + step, grad_dtype)
        target = states["source"] if in_place else torch.full_like(states["source"], float("nan"))
        optimizer.update(
            **states, target=target, grad=grad, lr=1e-2 / step, weight_decay=0.1, step=step, grad_scale=0.37
        )
        states["source"] = target
    return states


def reference(master, grad_dtype):
    """torch.optim.AdamW in the master's type, on the same gradients."""
    param = torch.nn.Parameter(master.clone())
    optimizer = torch.optim.AdamW([param], betas=BETAS, eps=EPS, weight_decay=0.1)
    for step in range(1, 6):
        optimizer.param_groups[0]["lr"] = 1e-2 / step
        param.grad = values(len(master), 100 + step, grad_dtype).to(master.dtype) * 0.37
        optimizer.step()
    state = optimizer.state[param]
    return param.detach(), state["exp_avg"], state["exp_avg_sq"]


def assert_follows_torch(result, master, grad_dtype, tolerance):
    """Within `tolerance` of the largest term of each element's sums: signs differ, so sums cancel."""
    param, exp_avg, exp_avg_sq = reference(master, grad_dtype)
    largest = torch.stack([values(len(master), 100 + step, grad_dtype).to(master.dtype) for step in range(1, 6)])
    largest = largest.abs().amax(0) + 1e-36  # among denormal numbers an absolute error remains
    if (ours := result.get("masters")) is None:
        ours = result["source"]
        ours = join(ours, result["remainder"]) if ours.dtype == torch.bfloat16 else ours
    for name, mine, theirs, scale in (
        ("parameter", ours, param, master.abs() + 1e-2),
        ("exp_avg", result["exp_avg"], exp_avg, largest),
        ("exp_avg_sq", result["exp_avg_sq"], exp_avg_sq, exp_avg_sq + 1e-36),
    ):
        assert bool(((mine == theirs) | ((mine - theirs).abs() <= tolerance * scale)).all()), name


@PATHS
def test_float64_equals_torch(fallback):
    states, master = make_states(70_001, torch.float64)
    with make_adam(fallback) as optimizer:
        result = run(optimizer, states, torch.float64)
    assert_follows_torch(result, master, torch.float64, 1e-12)


@PATHS
@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
        (torch.float16, torch.float32),
    ],
)
def test_master_weights_follow_torch_in_float32(fallback, dtype, grad_dtype):
    states, master = make_states(70_001, dtype)
    with make_adam(fallback) as optimizer:
        result = run(optimizer, states, grad_dtype)
    assert_follows_torch(result, master, grad_dtype, 1e-6)


@PATHS
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
def test_bfloat16_with_remainder_is_an_exact_float32_master(fallback, grad_dtype):
    """The float32 variant on the reconstructed master gives the same bits; the parameter is it rounded."""
    states, master = make_states(70_001, torch.bfloat16)
    with make_adam(fallback) as optimizer:
        result = run(optimizer, states, grad_dtype, steps=30)
        reference = {"source": master.clone(), "remainder": None, "exp_avg": None, "exp_avg_sq": None}
        reference |= {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
        for step in range(1, 31):
            grad = values(len(master), 100 + step, grad_dtype).float()
            optimizer.update(
                **reference,
                target=reference["source"],
                grad=grad,
                lr=1e-2 / step,
                weight_decay=0.1,
                step=step,
                grad_scale=0.37,
            )
    bits = reference["source"].view(torch.int32)
    assert torch.equal(join(result["source"], result["remainder"]).view(torch.int32), bits)
    assert torch.equal(result["source"].view(torch.int16), ((bits + 0x8000) >> 16).short())
    assert torch.equal(result["exp_avg"], reference["exp_avg"])
    assert torch.equal(result["exp_avg_sq"], reference["exp_avg_sq"])


@PATHS
@pytest.mark.parametrize("count", [70_001])
def test_float16_is_the_rounded_copy_of_a_float32_master(fallback, count):
    """The float32 variant on the master gives the same bits; parameters are it as torch rounds it."""
    states, master = make_states(count, torch.float16)
    reference, _ = make_states(count, torch.float32)
    with make_adam(fallback) as optimizer:
        result = run(optimizer, states, torch.float16)
        for step in range(1, 6):
            grad = values(count, 100 + step, torch.float16).float()
            options = {"lr": 1e-2 / step, "weight_decay": 0.1, "step": step, "grad_scale": 0.37}
            optimizer.update(**reference, target=reference["source"], grad=grad, **options)
    assert torch.equal(result["masters"], reference["source"])
    assert not torch.equal(result["masters"], master)
    assert torch.equal(result["source"], reference["source"].half())


def halves():
    """Every float16."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).short().view(torch.float16)


def around(numbers):
    """Float32 numbers: these, their middles with the next larger, and the neighbors of both."""
    ends = numbers[torch.isfinite(numbers)].float().unique()
    ends = torch.cat([ends, (ends[1:] + ends[:-1]) / 2, torch.tensor([65519.0, 65520.0, 65536.0, 1e30, -1e30])])
    bits = ends.view(torch.int32)
    near = torch.cat([bits + offset for offset in (-1, 0, 1)]).view(torch.float32)
    return torch.cat([near[near.isfinite()], torch.tensor([torch.inf, -torch.inf, 1e-40, -1e-40, 2.0**-25])])


def test_native_code_rounds_to_float16_as_torch_does():
    """With nothing to learn from an update writes the rounded master."""
    masters = around(halves())
    before, zeros, target = masters.clone(), torch.zeros(len(masters)), torch.empty(len(masters), dtype=torch.float16)
    with make_adam() as optimizer:
        optimizer.update(
            source=target,
            target=target,
            remainder=None,
            masters=masters,
            grad=zeros.half(),
            exp_avg=zeros.clone(),
            exp_avg_sq=zeros.clone(),
            lr=1.0,
            weight_decay=0.0,
            step=1,
            grad_scale=1.0,
        )
    assert torch.equal(masters, before)
    assert torch.equal(target.view(torch.int16), before.half().view(torch.int16))


def test_native_code_reads_every_float16_as_torch_does():
    """With betas of 0 the moment is the gradient."""
    grad = halves()
    grad = grad[torch.isfinite(grad)]
    zeros = torch.zeros(len(grad))
    with CpuAdam((0.0, 0.0), EPS, 1) as optimizer:
        if not optimizer.native:
            pytest.skip("installed without a compiler")
        source, exp_avg = zeros.half(), zeros.clone()
        optimizer.update(
            source=source,
            target=source,
            remainder=None,
            masters=zeros.clone(),
            grad=grad,
            exp_avg=exp_avg,
            exp_avg_sq=zeros.clone(),
            lr=1.0,
            weight_decay=0.0,
            step=1,
            grad_scale=1.0,
        )
    assert torch.equal(exp_avg, grad.float())


def test_split_and_join_hold_every_float32():
    lows = [0, 1, 2, 0x1234, 0x7FFF, 0x8000, 0x8001, 0xABCD, 0xFFFE, 0xFFFF]
    high = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    for low in lows:
        bits = high | low
        param, remainder = torch.empty(1 << 16, dtype=torch.bfloat16), torch.empty(1 << 16, dtype=torch.int16)
        split(bits.view(torch.float32), param, remainder)
        assert torch.equal(join(param, remainder).view(torch.int32), bits)
        # The documented decoding, for a remainder read as unsigned.
        unsigned = remainder.int() & 0xFFFF
        decoded = ((param.view(torch.int16).int() - (unsigned >> 15)) << 16) | unsigned
        assert torch.equal(decoded, bits)


def test_native_encoding_holds_every_float32():
    """With nothing to learn from and no decay a native update writes back what it read."""
    high = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    with make_adam() as optimizer:
        for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
            bits = high | low
            master = bits.view(torch.float32)
            bits = bits[torch.isfinite(master)]
            param = torch.empty(len(bits), dtype=torch.bfloat16)
            remainder = torch.empty(len(bits), dtype=torch.int16)
            split(bits.view(torch.float32), param, remainder)
            before = param.clone()
            zeros = torch.zeros(len(bits))
            optimizer.update(
                source=param,
                target=param,
                remainder=remainder.view(torch.uint16),
                grad=zeros,
                exp_avg=zeros.clone(),
                exp_avg_sq=zeros.clone(),
                lr=1.0,
                weight_decay=0.0,
                step=1,
                grad_scale=1.0,
            )
            assert torch.equal(join(param, remainder).view(torch.int32), bits)
            assert torch.equal(param.view(torch.int16), before.view(torch.int16))


@pytest.mark.sample(8)
@KINDS
@pytest.mark.parametrize("count", LENGTHS)
def test_thread_counts_generations_and_paths_give_the_same_bits(dtype, grad_dtype, count):
    states, _ = make_states(count, dtype)
    with make_adam(threads=1) as optimizer:
        expected = run(optimizer, states, grad_dtype)
    for threads in (2, 3):
        with make_adam(threads=threads) as optimizer:
            assert_same_bits(run(optimizer, states, grad_dtype), expected)
            assert_same_bits(run(optimizer, states, grad_dtype, in_place=False), expected)
    with make_adam(fallback=True) as optimizer:
        assert_same_bits(run(optimizer, states, grad_dtype), expected)
        assert_same_bits(run(optimizer, states, grad_dtype, in_place=False), expected)


def test_fallback_joins_its_chunks():
    count = adam.FALLBACK_CHUNK + 3333
    states, _ = make_states(count, torch.bfloat16)
    with make_adam() as native, make_adam(fallback=True) as fallback:
        assert_same_bits(run(fallback, states, torch.bfloat16, steps=2), run(native, states, torch.bfloat16, steps=2))
        grad = values(count, 3)
        assert square_sum(fallback, grad) == square_sum(native, grad)


def test_a_view_leaves_its_neighbors_alone():
    states, _ = make_states(4 * CHUNK, torch.bfloat16)
    grad = values(4 * CHUNK, 1, torch.bfloat16)
    part = slice(CHUNK + 128, 3 * CHUNK + 5)
    before = {name: t.clone() for name, t in states.items()}
    with make_adam() as optimizer:
        views = {name: t[part] for name, t in states.items()}
        optimizer.update(
            **views,
            target=views["source"],
            grad=grad[part],
            lr=1e-2,
            weight_decay=0.1,
            step=1,
            grad_scale=1.0,
        )
    for name, tensor in states.items():
        assert torch.equal(tensor[: part.start], before[name][: part.start])
        assert torch.equal(tensor[part.stop :], before[name][part.stop :])
    assert not torch.equal(states["exp_avg"][part], before["exp_avg"][part])


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("count", LENGTHS)
def test_square_sum_is_exact_to_double_and_does_not_depend_on_threads(dtype, count):
    grad = values(count, 5).clamp(-1e3, 1e3).to(dtype)
    sums = set()
    for threads in (1, 2, 3):
        with make_adam(threads=threads) as optimizer:
            sums.add(square_sum(optimizer, grad))
    with make_adam(fallback=True) as optimizer:
        sums.add(square_sum(optimizer, grad))
    assert len(sums) == 1
    assert sums.pop() == pytest.approx(float(grad.double().square().sum()), rel=1e-12)


@PATHS
def test_square_sum_shows_what_is_not_finite(fallback):
    with make_adam(fallback) as optimizer:
        for value in (float("nan"), float("inf"), 65520.0):
            grad = torch.ones(3 * CHUNK + 10)
            grad[2 * CHUNK + 5] = value
            assert not square_sum(optimizer, grad.half()) < float("inf")
            assert math.isfinite(value) or not square_sum(optimizer, grad) < float("inf")
        assert square_sum(optimizer, torch.empty(0)) == 0


def tree(grads):
    """Neighbors are added, then neighbors of the sums, until one is left."""
    while len(grads) > 1:
        grads = [sum(grads[i + 1 : i + 2], grads[i]) for i in range(0, len(grads), 2)]
    return grads[0]


def groups(count, replicas, dtype=torch.float32):
    return [values(count, 40 + group, dtype) for group in range(replicas)]


@pytest.mark.sample(10)
@pytest.mark.parametrize("replicas", range(1, 6))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", LENGTHS)
def test_gradients_are_added_as_a_tree_into_the_first_on_any_threads_and_path(count, dtype, replicas):
    expected = tree(groups(count, replicas, dtype))
    squares = set()
    for fallback, threads in ((False, 1), (False, 4), (True, 1), (True, 4)):
        with make_adam(fallback, threads) as optimizer:
            grads = groups(count, replicas, dtype)
            squares.add(square_sum(optimizer, *grads))
            assert torch.equal(grads[0].view(torch.uint8), expected.view(torch.uint8))
            squares.add(square_sum(optimizer, grads[0]))
    assert len(squares) == 1
    assert squares.pop() == pytest.approx(float(expected.double().square().sum()), rel=1e-12)


@pytest.mark.parametrize("replicas", [2, 3, 5])
def test_sums_of_gradients_are_those_in_double_rounded_once_a_level(replicas):
    grads = [values(70_001, 40 + group).clamp(-1e3, 1e3) for group in range(replicas)]
    exact, scale = sum(g.double() for g in grads), sum(g.double().abs() for g in grads)
    with make_adam() as optimizer:
        square_sum(optimizer, *grads)
    levels = (replicas - 1).bit_length()
    assert ((grads[0].double() - exact).abs() <= levels * scale * 2.0**-24 * 1.001 + 1e-44).all()


def test_fallback_adds_gradients_across_its_chunks():
    count = adam.FALLBACK_CHUNK + 3333
    with make_adam() as native, make_adam(fallback=True) as fallback:
        ours, theirs = groups(count, 3), groups(count, 3)
        assert square_sum(native, *ours) == square_sum(fallback, *theirs)
    assert_same_bits({"sum": ours[0]}, {"sum": theirs[0]})


@PATHS
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_seen_in_any_group(fallback, value):
    with make_adam(fallback) as optimizer:
        for group in range(5):
            grads = [torch.ones(CHUNK + 10) for _ in range(5)]
            grads[group][CHUNK + 5] = value
            assert not math.isfinite(square_sum(optimizer, *grads))
            assert not grads[0][CHUNK + 5].isfinite() and grads[0][:CHUNK].eq(5).all()


@PATHS
def test_a_group_may_be_a_view_and_its_neighbors_stay(fallback):
    whole = [torch.full((CHUNK + 30,), float(group)) for group in range(3)]
    with make_adam(fallback) as optimizer:
        assert square_sum(optimizer, *(each[10:-10] for each in whole)) == 9 * (CHUNK + 10)
    for group, each in enumerate(whole):
        assert each[:10].eq(group).all() and each[-10:].eq(group).all()


@pytest.mark.parametrize(("moments", "measured"), [("fp32", CHUNK + 9), ("int8", CHUNK)])
def test_the_measurement_beside_a_copy(moments, measured):
    found = bench_adam.measure(CHUNK + 9, 2, moments)
    assert (found["parameters"], found["threads"]) == (measured, 2)
    assert found["share"] == pytest.approx(found["update_bytes_per_second"] / found["copy_bytes_per_second"])


def test_every_instruction_set_gives_the_same_bits(builds):
    results = []
    for _ in instruction_sets(builds):
        with make_adam() as optimizer:
            run_all = {}
            for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
                states, _ = make_states(CHUNK + 1357, dtype)
                run_all |= {f"{dtype} {k}": t for k, t in run(optimizer, states, dtype).items()}
                run_all[f"{dtype} sum"] = torch.tensor(
                    [square_sum(optimizer, values(CHUNK + 1357, 1, dtype))], dtype=torch.float64
                )
            for replicas, dtype in itertools.product((2, 3, 4, 5), (torch.float32, torch.float64)):
                grads = groups(CHUNK + 1357, replicas, dtype)
                square = square_sum(optimizer, *grads)
                run_all[f"{dtype} {replicas} sum"] = torch.tensor([square], dtype=torch.float64)
                run_all[f"{dtype} {replicas}"] = grads[0]
            results.append(run_all)
    for other in results[1:]:
        assert_same_bits(results[0], other)


def test_an_error_in_a_pool_thread_surfaces(monkeypatch):
    class Broken:
        def square_sum_f32(self, job):
            raise RuntimeError("broken")

    monkeypatch.setattr(adam, "_library", Broken)
    with CpuAdam(BETAS, EPS, 2) as optimizer, pytest.raises(RuntimeError, match="broken"):
        square_sum(optimizer, torch.ones(CHUNK * 3))


@PATHS
def test_what_follows_parts_waits_for_the_last_of_the_threads(fallback, monkeypatch):
    with make_adam(fallback) as optimizer:
        release, numbers, told = threading.Event(), itertools.count(), []

        def call():
            if next(numbers) == 0:
                assert release.wait(PATIENCE)

        monkeypatch.setattr(optimizer, "_calls", lambda part: [call, call])
        begun = optimizer.begin([UpdateArgs(), UpdateArgs()], lambda: told.append(release.is_set()))
        wait(begun, PATIENCE, FIRST_COMPLETED)
        early = len(told)
        release.set()
        ended(begun)
        assert (early, told) == (0, [True])


@PATHS
@pytest.mark.parametrize("count", [1, 7])
def test_calls_after_parts_wait_for_all_of_them_and_come_before_what_follows(fallback, count, monkeypatch):
    with CpuAdam(BETAS, EPS, 3, force_fallback=fallback) as optimizer:
        release, numbers, done = threading.Event(), itertools.count(), []

        def call(name):
            if next(numbers) in (0, 2):  # the first part, and the first call after them
                assert release.wait(PATIENCE)
            done.append(name)

        monkeypatch.setattr(optimizer, "_calls", lambda part: [lambda: call("part")])
        threading.Timer(0.1, release.set).start()
        after = [lambda: call("after")] * count
        ended(optimizer.begin([UpdateArgs(), UpdateArgs()], lambda: done.append("end"), after))
        assert done == ["part"] * 2 + ["after"] * count + ["end"]


@PATHS
@pytest.mark.parametrize("failing", ["part", "after"])
def test_nothing_follows_where_one_failed(fallback, failing, monkeypatch):
    with make_adam(fallback) as optimizer:
        told = []
        monkeypatch.setattr(optimizer, "_calls", lambda part: [lambda: 1 / (failing != "part")])
        after = [lambda: told.append("after"), lambda: 1 / (failing != "after")]
        with pytest.raises(ZeroDivisionError):
            ended(optimizer.begin([UpdateArgs()], lambda: told.append("end"), after))
        assert told == ["after"] * (failing == "after")


@PATHS
def test_nothing_follows_parts_of_which_one_failed(fallback, monkeypatch):
    with make_adam(fallback) as optimizer:
        told = []
        monkeypatch.setattr(optimizer, "_calls", lambda part: [lambda: None, lambda: 1 / 0][part["step"] :])
        begun = optimizer.begin([UpdateArgs(step=1), UpdateArgs(step=0)], lambda: told.append(True))
        with pytest.raises(ZeroDivisionError):
            ended(begun)
        assert not told


def test_without_the_compiled_library_torch_runs(monkeypatch):
    monkeypatch.setattr(adam, "_library", lambda: None)
    with CpuAdam(BETAS, EPS) as optimizer:
        assert not optimizer.native
        assert square_sum(optimizer, torch.full((3,), 2.0)) == 12.0
