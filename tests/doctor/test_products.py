"""The rates of products that the doctor measures: which it times, what it says of them, and what it keeps."""

from dataclasses import replace
from datetime import date
from types import SimpleNamespace

import pytest
import torch

from rptrain.bench import clock
from rptrain.data import cache
from rptrain.doctor import examine as whole
from rptrain.doctor import kernels, links, products
from rptrain.doctor.checks import Check, check
from rptrain.kernels import target
from rptrain.machine.rates import GpuRates, LinkRates, Versions, load
from rptrain.schedule.machine import MeasuredRates, Rates
from rptrain.utils.nvml import GpuStatus

CPU = torch.device("cpu")
HERE = Versions(torch.__version__, torch.version.cuda)


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    for name, size in (("TOKENS", 32), ("INPUTS", 48), ("OUTPUTS", 64)):
        monkeypatch.setattr(products, name, size)
    monkeypatch.setattr(cache, "default_folder", lambda: tmp_path / "cache")


@pytest.mark.parametrize("with_fp8", [False, True])
def test_rates_are_operations_over_seconds(monkeypatch, with_fp8):
    taken = {"bf16": 4e-6, "fp16": 2e-6, "fp8": 1e-6}

    def seconds(works, device, *, turns, cold):
        assert (device, turns, cold) == (CPU, products.TURNS, False)
        for work in works.values():
            work()
        return {kind: taken[kind] for kind in works}

    monkeypatch.setattr(clock, "seconds", seconds)
    operations = 2 * 32 * 48 * 64 / 1e12
    expected = {kind: pytest.approx(operations / time) for kind, time in taken.items()}
    assert products.measure(CPU, with_fp8=with_fp8) == Rates(**expected | ({} if with_fp8 else {"fp8": None}))


def test_the_products_are_those_of_training(monkeypatch):
    """Of one pair of matrices: in bfloat16, in float16 with the library's setting, and rounded to FP8."""
    settings, mm = [], torch.mm

    def watched(x, w, out):
        settings.append((x.dtype, torch.backends.cuda.matmul.allow_fp16_accumulation))
        return mm(x, w, out=out)

    monkeypatch.setattr(torch, "mm", watched)
    torch.manual_seed(0)
    works = products._works(CPU, with_fp8=True)
    exact = works["bf16"]().float()
    works["fp16"]()
    assert settings == [(torch.bfloat16, False), (torch.float16, True)]
    assert not torch.backends.cuda.matmul.allow_fp16_accumulation
    narrow = works["fp8"]()
    assert narrow.dtype == torch.bfloat16 and 0 < (narrow.float() - exact).norm() / exact.norm() < 0.05


class Driver:
    """A driver of two GPUs, the second of which other work may use."""

    used: int | None = 0

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def gpu(self, uuid):
        return uuid

    def status(self, gpu):
        return GpuStatus(None, self.used if gpu == "uuid-1" else 0, None)


@pytest.fixture
def two_gpus(monkeypatch):
    """Two GPUs that are measured at once; returns which were, and with FP8 or not."""
    measured = []

    def measure(device, *, with_fp8):
        measured.append((str(device), with_fp8))
        return Rates(140, 280, 250 if with_fp8 else None)

    names = {0: "NVIDIA GeForce RTX 4090", 1: "Quadro"}
    properties = {
        i: SimpleNamespace(uuid=f"uuid-{i}", name=name, major=8, minor=(9, 6)[i]) for i, name in names.items()
    }
    monkeypatch.setattr(products, "Driver", Driver)
    monkeypatch.setattr(products, "measure", measure)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", lambda index: Driver())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[int(str(index)[-1])])
    monkeypatch.setattr(products, "HAS_TRITON", True)
    compiled = [check(f"cuda:{index} kernels", "compiled", runs=True) for index in range(2)]
    monkeypatch.setattr(kernels, "examine", lambda: compiled)
    monkeypatch.setattr(Driver, "used", 0)
    return measured


def examine(compiles: tuple[bool, bool] = (True, True)) -> list[Check]:
    return products.examine(products.used(), compiles)


def test_each_gpu_is_measured_and_kept(two_gpus):
    first, second = examine()
    assert two_gpus == [("cuda:0", True), ("cuda:1", False)], "the second one has no FP8"
    assert (first.subject, first.status, second.status) == ("cuda:0 products", "ok", "ok")
    assert first.text == (
        "bfloat16 140 TFLOP/s (0.85 of the data sheet's 165), float16 with float16 sums 280 TFLOP/s (0.85 of the data "
        "sheet's 330), FP8 250 TFLOP/s (0.76 of the data sheet's 330)"
    )
    assert second.text == "bfloat16 140 TFLOP/s, float16 with float16 sums 280 TFLOP/s"
    today = date.today().isoformat()
    assert first.figures == {
        "uuid": "uuid-0",
        "rates": {"bf16": 140, "fp16": 280, "fp8": 250},
        "peak": {"bf16": 165, "fp16": 330, "fp8": 330},
        "date": today,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    assert second.figures["peak"] is None
    assert load().gpus == (
        GpuRates("uuid-0", "NVIDIA GeForce RTX 4090", HERE, MeasuredRates(Rates(140, 280, 250), today)),
        GpuRates("uuid-1", "Quadro", HERE, MeasuredRates(Rates(140, 280), today)),
    )


def test_without_triton_fp8_is_not_measured(two_gpus, monkeypatch):
    """Also where it cannot compile; what torch computes is measured there."""
    examine(compiles=(False, True))
    monkeypatch.setattr(products, "HAS_TRITON", False)
    examine()
    assert two_gpus == 2 * [("cuda:0", False), ("cuda:1", False)]


@pytest.mark.parametrize(("used", "counts"), [(60, False), (3, True), (None, True)])
def test_a_gpu_that_is_in_use_is_not_measured(two_gpus, monkeypatch, used, counts):
    """Its rates would be too low for every later plan."""
    monkeypatch.setattr(Driver, "used", used)
    first, second = examine()
    assert first.status == "ok" and (second.status == "ok") == counts
    assert len(two_gpus) == len(load().gpus) == 1 + counts
    if not counts:
        assert "60% of the time" in second.text and "again" in (second.advice or "")


def test_a_gpu_without_memory_left(two_gpus, monkeypatch):
    def full(device, *, with_fp8):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 64 MiB")

    monkeypatch.setattr(products, "measure", full)
    first, second = examine()
    assert first.text == second.text == "cannot be measured: CUDA out of memory." and first.status == "warning"
    assert load().gpus == ()


def test_rates_that_cannot_be_kept(two_gpus, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(cache, "default_folder", lambda: tmp_path / "file")
    first, _ = examine()
    assert first.status == "warning" and first.text.startswith("bfloat16 140")
    assert "cannot be kept" in (first.advice or "") and "cache folder" in (first.advice or "")


def test_the_report_has_them_behind_the_gpus(two_gpus, monkeypatch, tmp_path):
    monkeypatch.setattr(whole.gpu, "examine", lambda: [replace(products.check("cuda:0", "a GPU"), figures={})])
    monkeypatch.setattr(links, "measure", lambda indices: LinkRates(("uuid-0", "uuid-1"), 20e9, 25e9, "2026-11-25"))
    findings = whole.examine(tmp_path)
    assert [one.subject for one in findings[:8]] == [
        "cuda:0", "GPUs", "cuda:0 kernels", "cuda:1 kernels", "links", "cuda:0 products", "cuda:1 products", "software"
    ]  # fmt: skip
    assert findings[1].status == "warning" and 'engine.devices = "cuda:1" (Quadro' in (findings[1].advice or "")
    assert findings[4].text == "20.0 GB/s each way with copies both ways; 2 GPUs at once 25.0 GB/s (0.62 of 2 links)"
    assert load().links == (LinkRates(("uuid-0", "uuid-1"), 20e9, 25e9, "2026-11-25"),)


def test_links_are_not_measured_beside_other_work(two_gpus, monkeypatch, tmp_path):
    monkeypatch.setattr(whole.gpu, "examine", list)
    monkeypatch.setattr(Driver, "used", 60)
    monkeypatch.setattr(links, "measure", lambda indices: pytest.fail("measured"))
    found = next(one for one in whole.examine(tmp_path) if one.subject == "links")
    assert found.status == "warning" and "other work" in found.text and not load().links


def test_links_without_memory_left(two_gpus, monkeypatch):
    def full(indices):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 64 MiB")

    monkeypatch.setattr(links, "measure", full)
    (found,) = links.examine(idle=True)
    assert found.status == "warning" and found.text == "cannot be measured: CUDA out of memory."


def test_links_that_cannot_be_kept(two_gpus, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(cache, "default_folder", lambda: tmp_path / "file")
    monkeypatch.setattr(links, "measure", lambda indices: LinkRates(("uuid-0",), 20e9, 20e9, "2026-11-25"))
    (found,) = links.examine(idle=True)
    assert found.text == "20.0 GB/s each way with copies both ways" and "cannot be kept" in (found.advice or "")


class Link:
    """A link whose copies take 1 s, or 1 s each where several share it."""

    def __init__(self, now):
        self.now = now

    def copy(self):
        self.now[0] += 1.0

    def wait(self):
        pass


def test_links_are_measured_alone_and_together(two_gpus, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(links, "_Link", lambda index: Link(now))
    monkeypatch.setattr(links.time, "perf_counter", lambda: now[0])
    moved = links.IN_A_ROW * links.COPIED
    found = links.measure([1, 0])
    assert found.uuids == ("uuid-0", "uuid-1") and (found.alone, found.together) == (moved, moved)


@pytest.mark.gpu
def test_the_links_that_are_here(monkeypatch):
    monkeypatch.undo()
    count = torch.cuda.device_count()
    found = links.measure(range(count))
    assert 1e9 < found.alone < 1e12 and found.alone < 1.3 * found.together < 1.7 * count * found.alone


@pytest.mark.gpu
def test_a_gpu_that_is_here(monkeypatch):
    monkeypatch.undo()
    found = products.measure(torch.device("cuda", 0), with_fp8=target.read(0).has_fp8)
    assert 1 < found.bf16 < 5000 and 1 < found.fp16 < 5000
