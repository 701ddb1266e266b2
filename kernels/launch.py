"""The choice between Triton kernels and the reference, and how kernels are compiled and launched."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from rptrain.kernels import with_triton

_found = find_spec("triton")
HAS_TRITON = _found is not None and _found.origin is not None  # a folder of this name is not the package

if TYPE_CHECKING:  # kernels are checked by compiling them, not by types
    triton: Any = None

    class _Language(type):
        def __getattr__(cls, name: str) -> Any: ...

    class tl(metaclass=_Language):
        constexpr: TypeAlias = Any
elif HAS_TRITON and with_triton:
    import triton
    import triton.language as tl
else:  # everything runs on the reference; kernels are never launched

    class _NotCompiled:
        def __init__(self, function: Callable[..., Any]) -> None:
            self._name = function.__name__

        def __getitem__(self, grid: object) -> Any:
            return self.run

        def run(self, *args: object, **options: object) -> None:
            raise RuntimeError(f"the kernel {self._name} was not compiled, because Triton was not imported")

    class _Absent:
        constexpr, jit = object, _NotCompiled

    triton = tl = _Absent()

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# A product and the sum that follows it are rounded once. It makes the bits, and Triton's default changes in 3.10.
FIXED_OPTIONS = {"enable_fp_fusion": True}

__all__ = [
    "DTYPES", "FIXED_OPTIONS", "HAS_TRITON", "fused", "jit", "power_of_2", "programs",
    "rows_and_columns", "tl", "triton", "warps",
]  # fmt: skip


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit` for all kernels: each launch has the FIXED_OPTIONS, whatever Triton's defaults are."""
    kernel = triton.jit(function)
    kernel.run = partial(kernel.run, **FIXED_OPTIONS)
    return kernel


def fused(*tensors: Tensor) -> bool:
    """Whether operations on such tensors run as Triton kernels: on CUDA, in a type that the kernels take.

    Otherwise the reference runs, kernels/reference/dense.py. Nothing here looks at values, so nothing waits for the
    device.
    """
    return HAS_TRITON and all(x.is_cuda and x.dtype in DTYPES for x in tensors)


def power_of_2(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def warps(elements: int) -> int:
    """Warps of a program that works on so many elements at once: 8 to 16 a thread."""
    return max(1, min(16, power_of_2(elements) // 512))


def programs(device: torch.device, each: int) -> int:
    """Programs that are resident together, `each` on a multiprocessor; a fixed number off CUDA.

    Where partial sums follow from it, their bits hold for one model of GPU.
    """
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count * each


@jit
def rows_and_columns(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The indices of rows and of columns in the tile of a program, of a one-dimensional grid over all tiles.

    Programs that follow one another share the columns and, 8 at a time, the rows, so what they read stays in the cache.
    """
    GROUP: tl.constexpr = 8
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    group = tl.program_id(0) // (GROUP * across)
    height = tl.minimum(down - group * GROUP, GROUP)
    place = tl.program_id(0) % (GROUP * across)
    row = (group * GROUP + place % height) * ROWS + tl.arange(0, ROWS)
    return row, (place // height) * COLUMNS + tl.arange(0, COLUMNS)
