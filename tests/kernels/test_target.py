"""Vendors, architectures and features; a GPU of AMD never has the features of the NVIDIA GPU with its numbers."""

import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rptrain.kernels import target
from rptrain.kernels.target import KB, Target, amd, named, nvidia

FEATURES = [field.name for field in fields(Target) if field.type is bool]


def features(found: Target) -> set[str]:
    return {name for name in FEATURES if getattr(found, name)}


MATRIX = {"triton", "cudnn", "matrix_units", "tf32x3", "half_sums"}


@pytest.mark.parametrize(
    ("capability", "shared", "expected"),
    [
        ((6, 1), 64, {"cudnn"}),
        ((7, 5), 64, {"triton", "cudnn"}),
        ((8, 0), 163, MATRIX),
        ((8, 6), 99, MATRIX),
        ((8, 9), 99, MATRIX | {"has_fp8", "cutlass_fp8_rows"}),
        (
            (9, 0),
            227,
            MATRIX | {"has_fp8", "cutlass_fp8_rows", "cublas_fp8_rows", "tma", "async_matrix_units"},
        ),
        ((10, 0), 227, MATRIX | {"has_fp8", "cutlass_fp8_rows", "tma", "async_matrix_units"}),
        ((12, 0), 99, MATRIX | {"has_fp8", "tma", "tight_registers"}),
    ],
)
def test_features_of_nvidia(capability, shared, expected):
    found = nvidia(*capability)
    assert (found.shared_memory, found.warp_size, features(found)) == (shared * KB, 32, expected)
    assert named(found.architecture) == found


@pytest.mark.parametrize(
    ("name", "warp_size", "expected"),
    [
        ("gfx942", 64, {"triton", "matrix_units"}),
        ("gfx1100", 32, {"triton", "matrix_units"}),
        ("gfx1201", 32, {"triton", "matrix_units"}),
        ("gfx906", 64, {"triton"}),
    ],
)
def test_features_of_amd(name, warp_size, expected):
    found = amd(name)
    assert (found.shared_memory, found.warp_size, features(found)) == (64 * KB, warp_size, expected)
    assert named(name) == found


def test_the_vendor_of_a_gpu_is_that_of_torch(monkeypatch):
    """An MI300 has the numbers of Hopper."""
    found = SimpleNamespace(major=9, minor=4, gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert target.read() == nvidia(9, 4) and target.read().tma
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert target.read() == amd("gfx942") and not target.read().tma


def test_names():
    assert [(each.name, each.version, each.described) for each in (nvidia(12, 1), amd("gfx942"))] == [
        ("sm_121", "12.1", "compute capability 12.1"),
        ("gfx942", "gfx942", "architecture gfx942"),
    ]


def test_where_there_is_no_gpu_kernels_are_those_of_a_small_one():
    assert target.target_of(torch.device("cpu")) == nvidia(8, 6)


def test_nothing_else_reads_a_compute_capability():
    root = Path(target.__file__).parents[1]
    reading = re.compile(r"get_device_capability|properties\.m(aj|in)or|ComputeCapability|\.capability\b")
    found = {
        path.relative_to(root).as_posix()
        for room in ("kernels", "models", "rptrain")
        for path in (root / room).rglob("*.py")
        if reading.search(path.read_text())
    }
    allowed = {"kernels/target.py", "rptrain/utils/nvml.py", "rptrain/engine/devices/accelerator.py"}
    assert found <= allowed | {"rptrain/doctor/gpu.py"}, "ask kernels/target.py for a feature"  # gpu.py prints it
