"""What the doctor says of machines, good and bad."""

import errno
import resource
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from rptrain.doctor import gpu, host
from rptrain.doctor.checks import Check, check, lines
from rptrain.doctor.examine import examine
from rptrain.doctor.gpu import CopyRates, Gpu, describe
from rptrain.engine.memory import arena
from rptrain.engine.optim import adam
from rptrain.utils import control_groups, native
from rptrain.utils.nvml import Link
from rptrain.utils.parallel import cores

from ..engine.memory.test_store import Runtime
from ..refusals import Refusals

GOOD = Gpu(
    "cuda:0", "RTX 4090", 24 << 30, "8.9", "580.1", Link(4, 16, 4, 16), CopyRates(25e9, 26e9, 45e9), wait_value=True
)


@pytest.fixture
def no_gpu(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_machine_without_a_gpu(no_gpu, tmp_path):
    report = examine(tmp_path / "runs")
    by_subject = {finding.subject: finding for finding in report}
    assert list(by_subject) == [
        "GPU",
        "software",
        "C compiler",
        "optimizer",
        "CPU",
        "host memory",
        "page-locking",
        "disk",
        "runs folder",
        "GGUF",
    ]
    assert by_subject["GPU"].status == "warning"
    assert by_subject["CPU"].figures["cores"] == cores()
    assert by_subject["host memory"].figures["free"] > 0
    assert by_subject["page-locking"].status == "ok" and by_subject["page-locking"].figures["locks"] is None
    assert by_subject["disk"].figures["speed"] > 0 and list(tmp_path.iterdir()) == []
    assert by_subject["runs folder"].figures == {"saves": True, "syncs_folders": True, "locks": True}
    assert by_subject["software"].figures["torch"] == version("torch")


def test_the_report_as_text():
    report = [check("GPU", "none", "get one"), Check("disk", "ok", "large")]
    assert list(lines(report)) == [
        "warning  GPU   none",
        "               -> get one",
        "ok       disk  large",
    ]


def test_a_good_gpu():
    finding = describe(GOOD)
    assert finding.status == "ok" and finding.subject == "cuda:0"
    assert finding.text == (
        "RTX 4090, 24.0 GiB, compute capability 8.9, driver 580.1; PCIe 4 x16, 25.0 GB/s up, 26.0 down, "
        "45.0 both ways together; streams can wait for values"
    )
    assert finding.figures["rates"] == {"up": 25e9, "down": 26e9, "both": 45e9, "page_locked": True}


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"link": Link(4, 8, 4, 16), "rates": CopyRates(12e9, 12e9, 20e9)}, "16 lanes and has 8"),
        ({"link": Link(3, 16, 4, 16), "rates": CopyRates(12e9, 12e9, 20e9)}, "could be PCIe 4"),
        ({"rates": CopyRates(8e9, 8e9, 9e9, page_locked=False)}, "page-locking was refused"),
        ({"rates": CopyRates(25e9, 9e9, 20e9)}, "carries 32 GB/s"),
        ({"link": Link(4, None, 4, 16)}, None),
        ({"link": None}, None),
    ],
)
def test_a_slow_link(changes, advice):
    finding = describe(replace(GOOD, **changes))
    assert (finding.advice is None) == (advice is None) and (advice or "") in (finding.advice or "")


def test_what_gpus_need_of_the_host(monkeypatch):
    monkeypatch.setattr(host, "_version", lambda package: None if package == "triton" else "1.0")
    monkeypatch.setattr(host.shutil, "which", lambda name: None)
    assert [host._versions(gpus).status for gpus in (True, False)] == ["warning", "ok"]
    assert [host._compiler(gpus).status for gpus in (True, False)] == ["warning", "ok"]


@pytest.mark.parametrize("locks", [True, False])
def test_page_locking_is_tried(monkeypatch, locks):
    runtime = Runtime((1 << 40) * locks)
    monkeypatch.setattr(arena, "_cudart", lambda: runtime)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1 << 20, 1 << 20))
    finding = host._locking(gpus=True)
    assert finding.figures == {"limit": 1 << 20, "locks": locks}
    assert "1.00 MiB" in finding.text and (finding.status == "ok") == locks


def test_an_optimizer_that_was_not_compiled(monkeypatch):
    monkeypatch.setattr(native, "library", lambda name: None)
    finding = host._native()
    assert finding.status == "warning" and "C compiler" in str(finding.advice)
    assert adam.instruction_set() is None


def test_the_instructions_of_the_optimizer():
    flags = set(next(line for line in Path("/proc/cpuinfo").open() if line.startswith("flags")).split())  # noqa: SIM115
    expected = (
        "AVX-512" if "avx512vl" in flags else "AVX2" if "avx2" in flags else "what the compiler takes for granted"
    )
    assert adam.instruction_set() == expected


def test_a_control_group_that_leaves_less(monkeypatch):
    monkeypatch.setattr(control_groups, "memory_left", lambda: iter([3 << 30, 1 << 60]))
    finding = host._memory()
    assert finding.figures["group_left"] == finding.figures["free"] == 3 << 30 and "control group" in finding.text
    monkeypatch.setattr(control_groups, "memory_left", lambda: iter(()))
    assert host._memory().figures["group_left"] is None


@pytest.mark.parametrize(
    ("free", "total", "speed", "advice"),
    [
        (1 << 30, 1 << 40, 1.0, "make room"),
        (1 << 40, 1 << 40, 1e12, "faster disk"),
        (1 << 40, 1 << 40, 1.0, None),
        (0, 0, 1.0, None),
    ],
    ids=["scarce", "slow", "good", "no_size"],
)
def test_the_disk(monkeypatch, tmp_path, free, total, speed, advice):
    """`speed` is the least that is not slow."""
    monkeypatch.setattr(host.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": free, "total": total}))
    monkeypatch.setattr(host, "SLOW_DISK", speed)
    finding = host._disk(tmp_path)
    assert str(tmp_path) in finding.text
    assert (finding.advice is None) == (advice is None) and (advice or "") in (finding.advice or "")


def test_a_disk_that_cannot_be_written(monkeypatch, tmp_path):
    def refuse(**options: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(host.tempfile, "TemporaryFile", refuse)
    finding = host._disk(tmp_path)
    assert finding.status == "warning" and "Read-only file system" in finding.text


@pytest.mark.parametrize(
    ("syncing", "locking", "figures"),
    [
        (errno.EINVAL, None, {"saves": True, "syncs_folders": False, "locks": True}),
        (errno.ENOTSUP, errno.ENOLCK, {"saves": True, "syncs_folders": False, "locks": False}),
        (errno.EIO, None, {"saves": False, "syncs_folders": None, "locks": None}),
    ],
    ids=["synced", "locked", "saved"],
)
def test_a_runs_folder_on_a_file_system_that_lacks_something(tmp_path, monkeypatch, syncing, locking, figures):
    Refusals(monkeypatch).syncing_folders(syncing)
    if locking is not None:
        Refusals(monkeypatch).locking(locking)
    finding = host._saving(tmp_path)
    assert finding.figures == figures and list(tmp_path.iterdir()) == []
    good = figures["saves"] and figures["locks"]
    assert finding.status == ("ok" if good else "warning") and ("save.output_dir" in (finding.advice or "")) != good


@pytest.mark.gpu
def test_a_gpu_that_is_here(tmp_path):
    first = examine(tmp_path)[0]
    assert first.subject == "cuda:0" and first.figures["memory"] > 0
    assert first.figures["driver"] is not None and first.figures["link"]["generation"]
    assert 1e9 < first.figures["rates"]["up"] < 1e12
    assert first.figures["wait_value"] is not None


def test_a_gpu_without_memory_left_is_a_line_of_the_report(monkeypatch):
    def full(driver, index):
        if index == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 64 MiB")
        return GOOD

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(gpu, "_look", full)
    first, second = gpu.examine()
    assert first.status == "ok" and second.subject == "cuda:1" and second.status == "warning"
    assert second.text == "cannot be measured: CUDA out of memory." and "nvidia-smi" in (second.advice or "")
