"""What a kernel's result is compared with: the reference in float64, and the reference's error in the kernel's type."""

import pytest
import torch
from torch import Tensor

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])


def random(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(device, dtype)


def exact(*tensors: Tensor) -> list[Tensor]:
    return [tensor.double() for tensor in tensors]


def close(ours: Tensor, theirs: Tensor) -> None:
    """Within 1e-5 of the largest value; fails on NaN."""
    error = (ours.double() - theirs.double()).abs().max()
    assert error <= 1e-5 * max(theirs.abs().max().item(), 1), error


def no_worse(ours: Tensor, reference: Tensor, theirs: Tensor) -> None:
    """As near to float64's result as the reference is, within half as much again or 2 units in the last place."""
    if ours.dtype == torch.float32:
        return close(ours, theirs)
    error, allowed = ((x.double() - theirs).abs() for x in (ours, reference))
    unit = torch.finfo(ours.dtype).eps * theirs.abs().max().item()
    assert error.max() <= max(1.5 * allowed.max().item(), unit), (error.max(), allowed.max())
    # and on the whole: a systematic error would hide behind the largest
    assert error.mean() <= 1.5 * allowed.mean() + 0.05 * unit, (error.mean(), allowed.mean())
