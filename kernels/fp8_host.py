"""FP8 by rows on the host: weights become codes and scales before they are uploaded (fp8.c, or torch's operations)."""

import ctypes

import torch
from torch import Tensor

from rptrain.kernels.fp8 import Rows
from rptrain.kernels.reference import fp8 as reference
from rptrain.utils import native

NATIVE = (torch.bfloat16, torch.float16, torch.float32)  # what fp8.c reads


def quantize_rows_into(w: Tensor, out: Rows) -> None:
    """The rows of w [N, K] on the CPU, contiguous, to `out`; the bits of kernels/fp8.py. Any thread may call it.

    Weights of at most 32 bits need no additional memory.
    """
    assert w.is_cpu and w.is_contiguous() and out.codes.is_contiguous() and out.scales.is_contiguous()
    assert (out.codes.shape, out.scales.shape) == (w.shape, w.shape[:1])
    compiled = native.library("rptrain.kernels._fp8")
    if compiled and w.dtype in NATIVE:
        quantize = getattr(compiled, f"fp8_rows_{native.suffix(w.dtype)}")
        places = (ctypes.c_void_p(tensor.data_ptr()) for tensor in out)
        quantize(ctypes.c_void_p(w.data_ptr()), *map(ctypes.c_int64, w.shape), *places)
        return
    codes, scales = reference.quantize(w, None)
    out.codes.copy_(codes)
    out.scales.copy_(scales)
