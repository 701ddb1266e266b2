"""FP8 products by rows that are added to a matrix in place, through cuBLASLt: torch's product only overwrites.

Matrices are row-major here and column-major there: out = A B^T is computed as the transposed out = B A^T.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rptrain.kernels.target import Target

CUDA = (12, 9)  # scales by row exist from this version on
# From cublasLt.h and library_types.h
COMPUTE_32F, R_32F, R_16BF, R_8F_E4M3 = 68, 0, 14, 28
TRANSA, TRANSB, A_SCALE, B_SCALE, FAST_ACCUM, A_SCALE_MODE, B_SCALE_MODE = 3, 4, 17, 18, 25, 31, 32
OUTER_VEC_32F = 3  # a float32 scale for each row
MIN_ALIGNMENTS = (5, 6, 7, 8)  # of A, B, C and D
ALIGNMENT = 16  # bytes that algorithms may assume, whatever the addresses are, so that bits do not depend on them
NOT_SUPPORTED = 15  # CUBLAS_STATUS_NOT_SUPPORTED
VERSION = 120900  # of the library, at least
TYPES = {torch.float32: R_32F, torch.bfloat16: R_16BF}


class _Heuristic(ctypes.Structure):
    """An algorithm that the library suggests, and what it needs."""

    _fields_ = (
        ("algo", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


def has_products(target: Target, cuda: tuple[int, ...]) -> bool:
    """Whether cuBLASLt multiplies FP8 by rows on a GPU, and can be loaded."""
    return target.cublas_fp8_rows and cuda >= CUDA and _library() is not None


@cache
def _library() -> ctypes.CDLL | None:
    """The library that torch has loaded; None if there is none under its name, or an older one."""
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '0').partition('.')[0]}")
    except OSError:
        return None
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return library if library.cublasLtGetVersion() >= VERSION else None


@cache
def _handle(device: int) -> ctypes.c_void_p:
    """The handle of a device, which is current."""
    handle = ctypes.c_void_p()
    _call("cublasLtCreate", ctypes.byref(handle))
    return handle


def add_product(out: Tensor, x: Tensor, a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor) -> bool:
    """out = x + A B^T [M, N], with the codes a [M, K] and b [N, K] and a float32 scale for each of their rows.

    `out` and x are float32 or bfloat16, and the same tensor only in float32: in bfloat16, the library would round the
    product before it is added. Codes are contiguous, and the rows of out and x; N and K are multiples of 16. Sums are
    float32, and rounded once. The algorithm is the library's first choice for these sizes, so the same sizes give the
    same bits. False if the library has no algorithm for them; `out` is then unchanged.
    """
    (rows, inner), columns = a.shape, len(b)
    one = ctypes.byref(ctypes.c_float(1.0))
    with (
        torch.cuda.device(out.device),
        _operation(a_scales, b_scales) as operation,
        _layout(R_8F_E4M3, inner, columns, b.stride(0)) as left,
        _layout(R_8F_E4M3, inner, rows, a.stride(0)) as right,
        _layout(TYPES[x.dtype], columns, rows, x.stride(0)) as added,
        _layout(TYPES[out.dtype], columns, rows, out.stride(0)) as target,
    ):
        handle = _handle(out.device.index)
        algo = _algorithm(handle, operation, left, right, added, target)
        if algo is None:
            return False
        pointers = [ctypes.c_void_p(each.data_ptr()) for each in (b, a, x, out)]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        _call(
            "cublasLtMatmul", handle, operation, one, pointers[0], left, pointers[1], right, one, pointers[2], added,
            pointers[3], target, ctypes.byref(algo), None, ctypes.c_size_t(0), stream,
        )  # fmt: skip
        return True


@contextmanager
def _operation(a_scales: Tensor, b_scales: Tensor) -> Iterator[ctypes.c_void_p]:
    with _created("MatmulDesc", COMPUTE_32F, R_32F) as operation:
        for attribute, value in (
            (TRANSA, ctypes.c_int(1)),
            (TRANSB, ctypes.c_int(0)),
            (FAST_ACCUM, ctypes.c_int8(0)),
            (A_SCALE_MODE, ctypes.c_int(OUTER_VEC_32F)),
            (B_SCALE_MODE, ctypes.c_int(OUTER_VEC_32F)),
            (A_SCALE, ctypes.c_void_p(b_scales.data_ptr())),
            (B_SCALE, ctypes.c_void_p(a_scales.data_ptr())),
        ):
            _set("MatmulDesc", operation, attribute, value)
        yield operation


@contextmanager
def _layout(kind: int, rows: int, columns: int, stride: int) -> Iterator[ctypes.c_void_p]:
    sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(stride)
    with _created("MatrixLayout", kind, *sizes) as layout:
        yield layout


def _algorithm(
    handle: ctypes.c_void_p, operation: ctypes.c_void_p, left: ctypes.c_void_p, right: ctypes.c_void_p,
    added: ctypes.c_void_p, target: ctypes.c_void_p,
) -> _Heuristic | None:  # fmt: skip
    """The algorithm of a product, without a workspace; None if there is none."""
    found, count = _Heuristic(), ctypes.c_int()
    with _created("MatmulPreference") as preference:
        for attribute in MIN_ALIGNMENTS:
            _set("MatmulPreference", preference, attribute, ctypes.c_uint32(ALIGNMENT))
        status = _call(
            "cublasLtMatmulAlgoGetHeuristic", handle, operation, left, right, added, target, preference,
            ctypes.c_int(1), ctypes.byref(found), ctypes.byref(count), allowed=(0, NOT_SUPPORTED),
        )  # fmt: skip
    return found if status == 0 and count.value else None


@contextmanager
def _created(kind: str, *arguments: object) -> Iterator[ctypes.c_void_p]:
    """An object of the library, destroyed at the end."""
    made = ctypes.c_void_p()
    _call(f"cublasLt{kind}Create", ctypes.byref(made), *arguments)
    try:
        yield made
    finally:
        _call(f"cublasLt{kind}Destroy", made)


def _set(kind: str, target: ctypes.c_void_p, attribute: int, value: "ctypes._SimpleCData[Any]") -> None:
    size = ctypes.c_size_t(ctypes.sizeof(value))
    _call(f"cublasLt{kind}SetAttribute", target, ctypes.c_int(attribute), ctypes.byref(value), size)


def _call(name: str, *arguments: object, allowed: tuple[int, ...] = (0,)) -> int:
    """Returns the status. Raises RuntimeError if it is not allowed."""
    status = int(getattr(_library(), name)(*arguments))
    if status not in allowed:
        raise RuntimeError(f"cuBLASLt: {name} failed with status {status}")
    return status
