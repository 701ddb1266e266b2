"""Products with a weight [out, in] and its bias, and their gradients accumulated in a wider type.

A weight in FP8 is multiplied with operands that are quantized by rows, and its gradient is that of the quantized input.
The input of a product is a tensor, or an Operand that holds it in the forms that the product reads.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from rptrain.kernels import fp8, fp8_products, half
from rptrain.kernels.fp8 import Operand
from rptrain.kernels.grouped import grouped_weight_grad_triton
from rptrain.kernels.launch import fused

Weight = Tensor | fp8.FP8Weight


def linear(x: Tensor | Operand, w: Weight, bias: Tensor | None = None) -> Tensor:
    """x [T, in] times the transposed weight, plus the bias [out] where given: [T, out].

    In FP8 the product is rounded before the bias is added.
    """
    if isinstance(w, Tensor):
        return F.linear(plain(x), w, bias)
    x = _operand(x)
    y = fp8_products.product(x.in_fp8(), w.rows, x.dtype)
    return y if bias is None else y.add_(bias)


def linear_add(x: Tensor | Operand, w: Weight, residual: Tensor, *, overwrite: bool = False) -> Tensor:
    """residual [T, out] plus x [T, in] times the transposed weight, rounded once; `overwrite` may write over residual.

    Both ways give the same bits: without `overwrite` the product adds to a copy, as torch does internally. In FP8 the
    result is always a new tensor, see `fp8_products.product_add`.
    """
    if isinstance(w, Tensor):
        return (residual if overwrite else residual.clone()).addmm_(plain(x), w.t())
    return fp8_products.product_add(_operand(x).in_fp8(), w.rows, residual)


def linear_backward_input(dy: Tensor, w: Weight, total: Tensor | None = None) -> Tensor:
    """The gradient [T, in] of the input; with `total`, its sum with this gradient by others, which may be overwritten.

    The sum is rounded once, in FP8 as `fp8_products.product_add` does.
    """
    if isinstance(w, Tensor):
        return dy @ w if total is None else total.addmm_(dy, w)
    return _backward_input(fp8.quantize_rows(dy, w.rows.scales), w, dy.dtype, total)


def _backward_input(dy: fp8.Rows, w: fp8.FP8Weight, dtype: torch.dtype, total: Tensor | None) -> Tensor:
    """`linear_backward_input` of a quantized dy, whose columns were multiplied by the scales of w."""
    assert w.columns is not None
    columns = fp8.Rows(w.columns, torch.ones(len(w.columns), device=dy.scales.device))
    if total is None:
        return fp8_products.product(dy, columns, dtype)
    return fp8_products.product_add(dy, columns, total)


def linear_backward(
    acc: Tensor | None,
    dy: Tensor,
    x: Tensor | Operand,
    w: Weight,
    maxima: fp8.Maxima | None = None,
    *,
    half_sums: bool = False,
    total: Tensor | None = None,
) -> Tensor:
    """The gradient [T, in] of the input x; adds that of the weight to `acc`, as `accumulate_weight_grad` does.

    `total`: see `linear_backward_input`.

    In FP8 the rows and columns of dy are quantized together. `maxima` are those of dy with the scales of the weight's
    rows as factors of columns, and those of x's rows as factors of rows.
    """
    if acc is None or isinstance(w, Tensor):
        dx = linear_backward_input(dy, w, total)
        accumulate_weight_grad(acc, dy, x, half_sums=half_sums)
        return dx
    rows = _operand(x).in_fp8()
    by_row, by_column = fp8.quantize_both(dy, w.rows.scales, rows.scales, maxima)
    dx = _backward_input(by_row, w, dy.dtype, total)
    del by_row
    fp8_products.accumulate(acc, by_column, fp8.transpose(rows.codes))
    return dx


def accumulate_weight_grad(
    acc: Tensor | None,
    dy: Tensor,
    x: Tensor | Operand,
    *,
    in_fp8: bool = False,
    maxima: fp8.Maxima | None = None,
    half_sums: bool = False,
) -> None:
    """acc [out, in] += dy.T @ x in place; acc is float32, or float64 for float64 inputs. None: nothing is computed.

    16-bit inputs are never rounded to 16 bits in between: CUDA multiplies them into the float32 sum. Where torch sums
    products in float16, its libraries have none with a float32 result, so a kernel of ours takes their place. `in_fp8`
    quantizes the rows of x as `linear` does, with their `maxima` where known, and the columns of dy, multiplied by
    their scales. `half_sums` sums products of float16 inputs in float16, at most 128 at a time (kernels/half.py), where
    kernels run that can.
    """
    if acc is None:
        return
    if in_fp8:
        x = _operand(x)
        codes, scales = fp8.transposed(x, maxima)
        fp8_products.accumulate(acc, fp8.quantize_columns(dy, scales), codes)
        return
    x = plain(x)
    if acc.dtype == x.dtype:
        acc.addmm_(dy.t(), x)
    elif half_sums and x.dtype == torch.float16 and fused(dy, x) and half.takes(x):
        half.product(acc, dy.t(), x.t(), add=True)
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


def plain(x: Tensor | Operand) -> Tensor:
    """An operand that is held in the model's type, as a tensor."""
    if isinstance(x, Tensor):
        return x
    assert x.plain is not None
    return x.plain


def _operand(x: Tensor | Operand) -> Operand:
    return Operand(x.dtype, x) if isinstance(x, Tensor) else x
