"""The engine on GPUs: the CPU engine's results, the same bits every time, no allocation in steady state."""

from dataclasses import replace

import pytest
import torch

from benchmarks.page_locking import lockable
from rptrain.engine import stage_pass
from rptrain.engine.devices.cuda import CudaDevice, CudaStream
from rptrain.engine.memory.arena import Arena
from rptrain.engine.memory.page_locking import PageableRanges, page_locked
from rptrain.engine.optim.loss_scale import LossScale
from rptrain.kernels.quant import FORMATS
from rptrain.models.transforms.lora import LoRA
from rptrain.schedule.plan import Plan

from ..engine import plain, runs
from ..engine.transfer.test_staging import make_small, mapped_store

pytestmark = pytest.mark.gpu

CFG = plain.config(hidden_size=128, head_dim=32, intermediate_size=256, tie_word_embeddings=True)
PLANS = ["F0-1 F2-3 FB4-4 B2-3 B0-1", "F0-2 FB3-4 B2-2 B1-1 B0-0", "FB0-4"]


def same(a, b):
    return a[:2] == b[:2] and all(torch.equal(a[2][name], b[2][name]) for name in a[2])


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_equals_the_cpu_engine(asynchronous):
    batches = plain.make_batches(6)
    plan = f"{PLANS[0]} | N=1 M=4 MR=4"
    cpu, gpu = (
        runs.run(CFG, batches, plan, asynchronous=asynchronous, device=device, max_grad_norm=1.0)
        for device in ("cpu", "cuda")
    )
    assert gpu[0] == pytest.approx(cpu[0], rel=1e-5)
    assert gpu[1] == pytest.approx(cpu[1], rel=1e-4)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "uniform"])
def test_the_same_bits_every_time_and_with_any_plan(asynchronous, packed):
    batches = plain.make_batches(5, length=64)
    if not packed:
        batches = [plain.uniform(batch) for batch in batches]

    def go(plan):
        return runs.run(CFG, batches, plan, asynchronous=asynchronous, dtype=torch.bfloat16, device="cuda")

    first = go(f"{PLANS[0]} | N=1 M=4 MR=4")
    assert first[0][-1] < first[0][0]
    for plan in (*PLANS, *PLANS):
        assert same(first, go(f"{plan} | N=1 M=4 MR=4")), plan


@pytest.mark.parametrize("fp16_accumulation", [False, True])
def test_float16_has_the_same_bits_with_any_plan_and_learns_as_on_the_cpu(fp16_accumulation):
    """The loss scale changes every two steps."""
    batches = plain.make_batches(6, length=64)

    def go(plan, device, **options):
        return runs.run(
            CFG,
            batches,
            f"{plan} | N=1 M=4 MR=4",
            asynchronous=True,
            dtype=torch.float16,
            device=device,
            loss_scale=LossScale.start(2.0**10, 2),
            **options,
        )

    first = go(PLANS[0], "cuda", fp16_accumulation=fp16_accumulation)
    assert first[0] == pytest.approx(go(PLANS[0], "cpu")[0], rel=1e-2)
    assert first[0][-1] < first[0][0]
    for plan in (*PLANS, *PLANS):
        assert same(first, go(plan, "cuda", fp16_accumulation=fp16_accumulation)), plan
    assert not torch.backends.cuda.matmul.allow_fp16_accumulation


@pytest.mark.parametrize("lora", [None, LoRA(r=4)], ids=["full", "lora"])
def test_fp8_has_the_same_bits_with_any_plan_and_learns_as_on_the_cpu(lora):
    batches = plain.make_batches(5, length=64)

    def go(plan, device, dtype=torch.bfloat16, fp8=True):
        options = {"asynchronous": True, "dtype": dtype, "lora": lora, "fp8": fp8, "rate": 1e-2}
        return runs.run(CFG, batches, f"{plan} | N=1 M=4 MR=4", device=device, **options)

    wide = go(PLANS[0], "cuda", torch.float32)[0]
    assert wide == pytest.approx(go(PLANS[0], "cpu", torch.float32)[0], rel=3e-2)  # sums that differ change codes
    first = go(PLANS[0], "cuda")
    assert first[0] == pytest.approx(wide, rel=5e-2)
    assert first[0] != go(PLANS[0], "cuda", fp8=False)[0]
    for plan in (*PLANS, *PLANS):
        assert same(first, go(plan, "cuda")), plan


@pytest.mark.parametrize("base", [*FORMATS, "fp8"])
def test_a_quantized_base_has_the_same_bits_with_any_plan_and_learns_as_on_the_cpu(base):
    batches = plain.make_batches(1, length=64) * 5

    def go(plan, device, dtype=torch.bfloat16):
        options = {"asynchronous": True, "dtype": dtype, "lora": LoRA(r=4), "base": base, "rate": 1e-2}
        return runs.run(CFG, batches, f"{plan} | N=1 M=4 MR=4", device=device, **options)

    wide = go(PLANS[0], "cuda", torch.float32)[0]
    assert wide == pytest.approx(go(PLANS[0], "cpu", torch.float32)[0], rel=1e-4)
    first = go(PLANS[0], "cuda")
    assert first[0] == pytest.approx(wide, rel=5e-2)
    assert first[0][-1] < first[0][0]
    for plan in (*PLANS, *PLANS):
        assert same(first, go(plan, "cuda")), plan


@pytest.mark.parametrize("plan", PLANS)
def test_mapped_weights_have_the_bits_of_those_in_memory(plan, tmp_path, monkeypatch):
    make_small(monkeypatch, 30_000)
    *batches, other = plain.make_batches(5, length=64)
    plan, kind, results = f"{plan} | N=1 M=4 MR=4", {"lora": LoRA(r=4)}, []
    options = {"asynchronous": True, "lock": True}
    memory = runs.make_store(CFG, torch.bfloat16, **options, **kind)
    with memory, mapped_store(tmp_path, CFG, kind, dtype=torch.bfloat16, **options) as mapped:
        for store in (memory, mapped):
            with runs.engine_of(store, plan, tokens=128, device="cuda") as engine:
                assert not engine.locking.missing
                losses = [engine.evaluate(other)]
                for batch in batches:
                    losses.append(engine.forward_backward(batch).result())
                    losses.append(engine.step(1e-2).result().grad_norm)
                losses.append(engine.evaluate(other))
            results.append((losses, [], runs.checkpoint_tensors(store)))
    assert same(*results)


@pytest.mark.parametrize("plan", PLANS)
def test_graphs_change_nothing(plan, monkeypatch):
    """Documents of several kinds and other numbers of supervised tokens: each is captured by itself, or not at all."""
    batches = plain.make_batches(8, length=64)
    batches[2:6:2] = [plain.uniform(batch) for batch in batches[2:6:2]]
    batches[3] = replace(batches[3], supervised=batches[3].supervised // 4)  # another scale of the loss
    captured, launch = [], CudaStream.launch

    def counted(stream, where, graph):
        captured.append(id(graph))
        launch(stream, where, graph)

    monkeypatch.setattr(CudaStream, "launch", counted)

    def go():
        return runs.run(CFG, batches, f"{plan} | N=1 M=4 MR=4", asynchronous=True, dtype=torch.bfloat16, device="cuda")

    first = go()
    launched = len(captured)
    assert launched > 2 * len(batches)  # micro-batches
    monkeypatch.setattr(
        CudaDevice, "replay", lambda device, key, buffer_slots, where, work: device.compute.run(where, work)
    )
    assert same(first, go())
    assert len(captured) == launched


def test_events_are_used_again_only_after_nothing_refers_to_them():
    device = CudaDevice(0)
    device.enter()
    kept = device.compute.record()
    handles = {device.compute.record().event.cuda_event for _ in range(10)}
    assert len(handles) == 1 and kept.event.cuda_event not in handles
    device.grad_download.wait(kept)
    device.grad_download.record().synchronize()
    del kept
    device.close()


def test_marks_keep_their_times_when_their_events_are_used_again():
    device = CudaDevice(0)
    device.enter()
    first, handles = device.compute.mark(), set()
    for _ in range(20):
        before, mark = first(), device.compute.mark()
        handles.add(mark._event.cuda_event)
        device.compute.run("work", lambda: device.empty(1 << 22, torch.float32).zero_())
        assert before == first() <= mark() and mark.passed()
    assert len(handles) <= 3
    device.close()


@pytest.mark.parametrize("page_locked", [True, False])
def test_copies_follow_their_stream(page_locked):
    host = torch.arange(1 << 20, dtype=torch.int32)
    host = host.pin_memory() if page_locked else host
    back = torch.zeros_like(host, pin_memory=page_locked)
    ranges = [range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in (host, back)]
    device = CudaDevice(0, pageable=None if page_locked else PageableRanges(ranges))
    device.enter()
    target = device.empty(1 << 20, torch.int32)
    device.param_upload.copy("upload", target, host)
    device.compute.wait(device.param_upload.record())
    device.compute.run("double", lambda: target.mul_(2))
    device.grad_download.wait(device.compute.record())
    device.grad_download.copy("download", back, target)
    device.grad_download.record().synchronize()
    assert torch.equal(back, host * 2)
    device.close()


@pytest.mark.parametrize("plan", PLANS)
def test_the_same_bits_result_however_much_is_locked(plan):
    def go(limit):
        with lockable(limit):
            return runs.run(
                CFG, batches, f"{plan} | N=1 M=4 MR=2", asynchronous=True, dtype=torch.bfloat16, device="cuda"
            )

    batches = plain.make_batches(6, length=64)
    whole = go(1 << 40)
    for limit in (1 << 20, 1 << 16, 0):
        assert same(whole, go(limit)), limit


def test_a_refusal_leaves_no_error_to_the_next_kernel():
    tensor = torch.ones(8)
    with lockable(0), Arena(1 << 20) as arena:
        arena.take(1 << 20, torch.uint8)
        arena.lock()
        assert arena.locking.missing == 1 << 20
        tensor.to("cuda").add_(1)
        assert page_locked(tensor) is tensor
        tensor.to("cuda").add_(1)


@pytest.mark.parametrize("plan", PLANS)
def test_pieces_of_any_length_give_the_same_bits(plan, monkeypatch):
    def go(steps):
        monkeypatch.setattr(stage_pass, "PIECE_STEPS", steps)
        return runs.run(CFG, batches, f"{plan} | N=1 M=4 MR=4", asynchronous=True, dtype=torch.bfloat16, device="cuda")

    batches = [plain.uniform(batch) for batch in plain.make_batches(8, length=64)]
    assert same(go(16), go(2))


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(("fp8", "half_sums"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("sizes", ["M=4 MR=4", "M=4 MR=2 R=2", "M=4 MR=1 R=2", "M=4 MR=1 R=4"])
def test_several_gpus_give_the_bits_of_one(asynchronous, fp8, half_sums, sizes):
    """On as many as there are, four at most."""
    batches = plain.make_batches(6, length=64)
    options = {"asynchronous": asynchronous, "fp8": fp8, "half_sums": half_sums}
    most = min(torch.cuda.device_count(), 4)
    plans = [Plan.parse(f"{stages} | N={n} {sizes}") for stages in PLANS for n in range(1, most + 1)]
    results = [
        runs.run(CFG, batches, plan, dtype=torch.bfloat16, device="cuda", **options)
        for plan in plans
        if plan.devices < plan.replicas or plan.devices % plan.replicas == 0
    ]
    assert all(same(results[0], other) for other in results[1:])


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_the_driver_allocates_nothing_in_steady_state(asynchronous):
    batches = [plain.uniform(batch) for batch in plain.make_batches(10, length=64)]
    plan = f"{PLANS[0]} | N=1 M=4 MR=4"
    counts = []
    with (
        runs.make_store(CFG, torch.bfloat16, asynchronous=asynchronous, lock=True) as store,
        runs.engine_of(store, plan, tokens=128, asynchronous=asynchronous, device="cuda") as engine,
    ):
        assert not engine.locking.missing
        for batch in batches:
            engine.forward_backward(batch).result()
            engine.step(1e-3).result()
            counts.append(torch.cuda.memory_stats()["num_device_alloc"])
    assert counts[3] == counts[-1]


def test_rounds_and_delays_change_nothing():
    batches = plain.make_batches(4, micro_batches=4, length=64)

    def go(probe=None):
        plan = f"{PLANS[0]} | N=1 M=4 MR=2"
        return runs.run(CFG, batches, plan, asynchronous=True, dtype=torch.bfloat16, device="cuda", probe=probe)

    def spin(where):
        if "input" in where or "download" in where:
            torch.cuda._sleep(2_000_000)

    assert same(go(), go(spin))
