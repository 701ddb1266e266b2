"""Makes Triton's interpreter compute bfloat16, FP8 (e4m3) and float16 sums as GPUs do.

By itself it rounds bfloat16 by cutting off and multiplies its bit patterns, rounds e4m3 wrongly (31.13 to 16), and
rounds a sum in float16 once, at its end.
"""

import numpy as np


def mend() -> None:
    """Replaces the interpreter's conversions and product; to be called once, before a kernel runs."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    convert, multiply = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot
    convert_custom = InterpreterBuilder.create_fp_to_fp

    def to_float(bits: np.ndarray) -> np.ndarray:
        return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)

    def to_bfloat(values: np.ndarray) -> np.ndarray:
        """Round to nearest, ties to even; NaN stays NaN."""
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)

    def cast(self, source, target):
        pair = source.dtype.scalar, target.scalar
        if pair == (tl.bfloat16, tl.float32):
            return TensorHandle(to_float(source.data), target.scalar)
        if pair == (tl.float32, tl.bfloat16):
            return TensorHandle(to_bfloat(source.data), target.scalar)
        return convert(self, source, target)

    def cast_custom(self, source, target, rounding):
        pair = source.dtype.scalar, target.scalar
        if pair == (tl.float8e4nv, tl.float32):
            return TensorHandle(E4M3[source.data], target.scalar)
        if pair == (tl.float32, tl.float8e4nv):
            return TensorHandle(to_e4m3(source.data), target.scalar)
        assert tl.float8e4nv not in pair, pair
        return convert_custom(self, source, target, rounding)

    def upcast(operand):
        if operand.dtype.scalar == tl.bfloat16:
            return TensorHandle(to_float(operand.data), tl.float32)
        if operand.dtype.scalar == tl.float8e4nv:
            return TensorHandle(E4M3[operand.data], tl.float32)
        return operand

    def dot(self, a, b, acc, *rest):
        if acc.dtype.scalar == tl.float16:
            return TensorHandle(dot_in_half(a.data, b.data, acc.data), tl.float16)
        return multiply(self, upcast(a), upcast(b), acc, *rest)

    InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot = cast, dot
    InterpreterBuilder.create_fp_to_fp = cast_custom


def dot_in_half(a: np.ndarray, b: np.ndarray, acc: np.ndarray) -> np.ndarray:
    """acc + a b, rounded to float16 after each HALF_TERMS terms."""
    wide_a, wide_b = a.astype(np.float32), b.astype(np.float32)
    for start in range(0, a.shape[-1], HALF_TERMS):
        part = slice(start, start + HALF_TERMS)
        with np.errstate(over="ignore", invalid="ignore"):
            acc = (acc.astype(np.float32) + wide_a[..., part] @ wide_b[..., part, :]).astype(np.float16)
    return acc


def _e4m3_values() -> np.ndarray:
    """float32 of each of the 256 codes: sign, 4 bits of exponent with a bias of 7, 3 of mantissa; no infinities."""
    exponent, mantissa = np.divmod(np.arange(128), 8)
    values = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8.0 + mantissa, exponent - 10))
    values[127] = np.nan
    return np.concatenate((values, -values)).astype(np.float32)


E4M3 = _e4m3_values()
HALF_TERMS = 8  # that matrix units of 8.x add at once; those of 9.0 add more before they round


def to_e4m3(values: np.ndarray) -> np.ndarray:
    """Codes of the nearest values, ties to even; NaN is 127, and larger values become 448, as on GPUs."""
    sizes, signs = np.abs(values), np.signbit(values)
    # at a tie the lower neighbor is right if its code is even
    codes = np.clip(np.searchsorted(E4M3[:127], sizes, side="right") - 1, 0, 125)
    middles = (E4M3[codes].astype(np.float64) + E4M3[codes + 1]) / 2
    codes = codes + ((sizes > middles) | ((sizes == middles) & (codes % 2 == 1)))
    codes = np.where(np.isnan(values), 127, codes + 128 * signs)
    return codes.astype(np.uint8)
