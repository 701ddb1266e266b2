"""Optimizers, numbers and builds that tests of the CPU's AdamW share."""

import ctypes
from collections.abc import Callable, Iterator
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


def instruction_sets(builds: Callable[[Path], dict[str, Path]]) -> Iterator[str]:
    """Each is what CpuAdam runs on meanwhile."""
    for name, library in builds(Path(adam.__file__).with_name("adam.c")).items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(adam, "_library", lambda library=library: ctypes.CDLL(str(library)))
            yield name
