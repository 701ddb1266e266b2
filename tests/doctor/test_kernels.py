"""The kernel that the doctor compiles, in a process that may end in any way, and checks that fail."""

import json
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from rptrain.data import cache
from rptrain.doctor import examine as whole
from rptrain.doctor import failures, gpu, host, kernels, links, products
from rptrain.doctor.checks import check
from rptrain.kernels.toolchain_errors import ToolchainError, TritonError

OK = json.dumps(check("cuda:0 kernels", "compiled", runs=True).to_dict())
BROKEN = json.dumps(check("cuda:1 kernels", "no C compiler", "install gcc").to_dict())


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.fixture
def process(monkeypatch):
    """Sets the code of the process that compiles kernels."""
    return lambda code: monkeypatch.setattr(kernels, "COMMAND", (sys.executable, "-S", "-c", code))


def test_a_check_for_each_gpu(two_gpus, process):
    process(f"print({OK!r}); print({BROKEN!r})")
    first, second = kernels.examine()
    assert (first.status, kernels.runs(first)) == ("ok", True)
    assert (second.status, kernels.runs(second)) == ("warning", False)
    assert (second.text, second.advice) == ("no C compiler", "install gcc")


def test_a_process_that_ends_early(two_gpus, process):
    process(f"print({OK!r}, flush=True); import os, sys; print('LLVM ERROR: too old', file=sys.stderr); os._exit(134)")
    first, second = kernels.examine()
    assert kernels.runs(first) and not kernels.runs(second)
    assert second.subject == "cuda:1 kernels" and "status 134: LLVM ERROR: too old" in second.text and second.advice


def test_a_process_that_hangs(two_gpus, process, monkeypatch):
    monkeypatch.setattr(kernels, "LONGEST", 0.5)
    process("import time; time.sleep(60)")
    first, second = kernels.examine()
    assert first.status == second.status == "warning" and "not compiled within" in first.text


def test_the_process_answers(two_gpus, monkeypatch, capsys):
    """It tries each GPU, whatever is wrong with the one before."""

    def try_out(device, *, anew):
        assert anew
        if device.index == 0:
            raise ToolchainError("no compiler", "install gcc")
        if device.index == 1:
            raise subprocess.CalledProcessError(1, ["cc"])

    monkeypatch.setattr(kernels, "try_out", try_out)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    kernels.main()
    first, second, third = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (first["status"], first["text"], first["advice"]) == ("warning", "no compiler", "install gcc")
    assert (second["subject"], second["status"]) == ("cuda:1 kernels", "warning") and "cc" in second["text"]
    assert (third["subject"], third["status"], third["figures"]) == ("cuda:2 kernels", "ok", {"runs": True})


def old_gpu(monkeypatch):
    """A GPU of an architecture that torch has no kernels for."""
    found = SimpleNamespace(name="a GPU", major=6, minor=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: found)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: found.name)
    monkeypatch.setattr(torch.cuda, "get_arch_list", list)


def test_the_report_is_whole_whatever_fails(two_gpus, process, monkeypatch, tmp_path):
    """No function of torch, Triton or the system works; torch has no kernels, which the report says once per GPU."""
    said = "CUDA error: no kernel image is available for execution on the device"

    def failing(error):
        def function(*given, **named):
            raise error

        return function

    process("raise SystemExit(3)")
    monkeypatch.setattr(cache, "default_folder", lambda: tmp_path / "cache")
    old_gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(products.kept, "uuid", str)
    monkeypatch.setattr(products, "measure", failing(RuntimeError(said)))
    monkeypatch.setattr(links, "measure", failing(TritonError("a link")))
    monkeypatch.setattr(gpu, "_look", failing(OSError(5, "Input/output error", "/dev/nvidia0")))
    monkeypatch.setattr(gpu, "models", list)
    monkeypatch.setattr(host.Arena, "lock", failing(RuntimeError("no locks")))
    monkeypatch.setattr(host.shutil, "disk_usage", failing(PermissionError(13, "Permission denied", "/runs")))
    found = whole.examine(tmp_path / "runs")
    assert [one.subject for one in found] == [
        *("cuda:0", "cuda:1", "cuda:0 kernels", "cuda:1 kernels", "links", "software", "C compiler", "optimizer"),
        *("CPU", "host memory", "page-locking", "disk", "runs folder", "GGUF"),
    ]
    warnings = {one.subject: one for one in found if one.status == "warning"}
    expected = ["cuda:0", "cuda:1", "cuda:0 kernels", "cuda:1 kernels", "links", "page-locking", "disk"]
    assert [name for name in warnings if name in expected] == expected and all(one.advice for one in warnings.values())
    assert "/dev/nvidia0: Input/output error" in warnings["cuda:0"].text and "/runs" in warnings["disk"].text


def test_products_fail_for_want_of_kernels(two_gpus, monkeypatch):
    """If a kernel was compiled, nothing else has said it."""
    said = "CUDA error: no kernel image is available for execution on the device"

    def measure(device, *, with_fp8):
        raise RuntimeError(said)

    old_gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(products, "measure", measure)
    (found,) = products.examine([None, None], [True, False])
    assert found.subject == "cuda:0 products" and "no kernels for this GPU" in found.text


def test_an_unknown_error_passes():
    with pytest.raises(ZeroDivisionError):
        failures.attempt("disk", lambda: 1 // 0)


@pytest.mark.gpu
def test_the_gpus_that_are_here():
    found = kernels.examine()
    assert len(found) == torch.cuda.device_count() and all(map(kernels.runs, found)), found
