"""Optimizers, numbers and builds that tests of the CPU's AdamW share."""

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rptrain.engine.optim import adam
from rptrain.engine.optim.adam import CpuAdam

BETAS, EPS = (0.9, 0.95), 1e-8
PATHS = pytest.mark.parametrize("fallback", [False, True], ids=["native", "fallback"])


def make_adam(fallback=False, threads=2):
    optimizer = CpuAdam(BETAS, EPS, threads, force_fallback=fallback)
    if not fallback and not optimizer.native:
        pytest.skip("installed without a compiler")
    return optimizer


def values(count, seed, dtype=torch.float32):
    """Normal numbers of many sizes, with zeros, denormals and large ones among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator, dtype=torch.float64)
    x *= 10 ** torch.randint(-6, 3, (count,), generator=generator).double()
    for i, special in enumerate((0.0, -0.0, 1e-40, -1e-40, 1e30, -1e30)):
        x[10 + i :: 1000] = special
    if dtype == torch.float16:
        x.clamp_(-6e4, 6e4)
    return x.to(dtype)


def assert_same_bits(left, right):
    for name, tensor in left.items():
        if tensor is not None:
            assert torch.equal(tensor.view(torch.uint8), right[name].view(torch.uint8)), name


def instruction_sets(folder: Path) -> Iterator[str]:
    """The clones that target_clones makes, compiled one at a time; each is what CpuAdam runs on meanwhile."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    source = Path(adam.__file__).with_name("adam.c")
    flags = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-DCLONES="]
    known = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    kinds = [("x86-64", "sse2"), ("x86-64-v3", "avx2"), ("x86-64-v4", "avx512bw")]
    available = [name for name, flag in kinds if flag in known]
    if len(available) < 2:
        pytest.skip("one instruction set only")
    for name in available:
        library = folder / f"{name}.so"
        subprocess.run(["gcc", *flags, f"-march={name}", "-o", library, source, "-lm"], check=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(adam, "_library", lambda library=library: ctypes.CDLL(str(library)))
            yield name
