"""Products with a weight [out, in] and its bias, and their gradients accumulated in a wider type.

A weight in FP8 is multiplied with operands that are quantized by rows, and its gradient is that of the quantized input.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from rptrain.kernels import fp8
from rptrain.kernels.grouped import grouped_weight_grad_triton
from rptrain.kernels.launch import fused

Weight = Tensor | fp8.FP8Weight


def linear(x: Tensor, w: Weight, bias: Tensor | None = None) -> Tensor:
    """x [T, in] times the transposed weight, plus the bias [out] where given: [T, out].

    In FP8 the product is rounded before the bias is added.
    """
    if isinstance(w, Tensor):
        return F.linear(x, w, bias)
    y = fp8.product(fp8.quantize_rows(x), w.rows, x.dtype)
    return y if bias is None else y.add_(bias)


def linear_add(x: Tensor, w: Weight, residual: Tensor, *, overwrite: bool = False) -> Tensor:
    """residual [T, out] plus x [T, in] times the transposed weight, rounded once; `overwrite` writes over residual.

    Both ways give the same bits: without `overwrite` the product adds to a copy, as torch does internally. In FP8 the
    product is rounded before it is added.
    """
    if isinstance(w, Tensor):
        return (residual if overwrite else residual.clone()).addmm_(x, w.t())
    return linear(x, w).add_(residual)


def linear_backward_input(dy: Tensor, w: Weight) -> Tensor:
    """The gradient [T, in] of the input."""
    if isinstance(w, Tensor):
        return dy @ w
    return _backward_input(fp8.quantize_rows(dy, w.rows.scales), w, dy.dtype)


def _backward_input(dy: fp8.Rows, w: fp8.FP8Weight, dtype: torch.dtype) -> Tensor:
    """`linear_backward_input` of a quantized dy, whose columns were multiplied by the scales of w."""
    assert w.columns is not None
    ones = torch.ones(len(w.columns), device=dy.scales.device)
    return fp8.product(dy, fp8.Rows(w.columns, ones), dtype)


def linear_backward(acc: Tensor | None, dy: Tensor, x: Tensor, w: Weight) -> Tensor:
    """The gradient [T, in] of the input x; adds that of the weight to `acc`, as `accumulate_weight_grad` does.

    In FP8 the rows and columns of dy are quantized together.
    """
    if acc is None or isinstance(w, Tensor):
        dx = linear_backward_input(dy, w)
        accumulate_weight_grad(acc, dy, x)
        return dx
    rows = fp8.quantize_rows(x)
    by_row, by_column = fp8.quantize_both(dy, w.rows.scales, rows.scales)
    dx = _backward_input(by_row, w, dy.dtype)
    del by_row
    fp8.accumulate(acc, by_column, fp8.transpose(rows.codes))
    return dx


def accumulate_weight_grad(acc: Tensor | None, dy: Tensor, x: Tensor, *, in_fp8: bool = False) -> None:
    """acc [out, in] += dy.T @ x in place; acc is float32, or float64 for float64 inputs. None: nothing is computed.

    16-bit inputs are never rounded to 16 bits in between: CUDA multiplies them into the float32 sum. Where torch sums
    products in float16, its libraries have none with a float32 result, so a kernel of ours takes their place. `in_fp8`
    quantizes the rows of x as `linear` does, and the columns of dy, multiplied by their scales.
    """
    if acc is None:
        return
    if in_fp8:
        rows = fp8.quantize_rows(x)
        fp8.accumulate(acc, fp8.quantize_columns(dy, rows.scales), fp8.transpose(rows.codes))
    elif acc.dtype == x.dtype:
        acc.addmm_(dy.t(), x)
    elif x.dtype == torch.float16 and torch.backends.cuda.matmul.allow_fp16_accumulation and fused(dy, x):
        ends = torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)
        grouped_weight_grad_triton(acc[None], dy, x, ends)
    elif x.is_cuda:
        torch.addmm(acc, dy.t(), x, out_dtype=acc.dtype, out=acc)
    else:  # the CPU has no product of mixed types
        acc.addmm_(dy.t().to(acc.dtype), x.to(acc.dtype))


def accumulate_bias_grad(acc: Tensor | None, dy: Tensor) -> None:
    """acc [out] += the sum of the rows of dy [T, out], which is made in the type of acc. None: nothing is computed."""
    if acc is not None:
        acc += dy.sum(0, dtype=acc.dtype)
