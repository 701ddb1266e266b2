"""The work of an optimizer step on the CPU, in one place for plans and measurements."""

from collections.abc import Iterable
from math import inf

import torch

from rptrain.engine.memory.moments import Moments, bytes_each
from rptrain.engine.memory.step_layout import StepLayout, accumulate_dtype
from rptrain.engine.memory.store import REST
from rptrain.models.params import Unit


def update_bytes(dtype: torch.dtype, moments: Moments, *, wide_grad: bool = False, codes: float = 0.0) -> float:
    """Bytes per parameter that an update in adam.c reads and writes, by the type of the parameters.

    bfloat16 with `fp32` moments: the gradient is read (2); the parameter, its remainder and both moments are read and
    written (2 + 2 + 8 each way): 26. Parameters in float16 are only written, and their float32 masters are read and
    written. A `wide_grad` is a partial sum in the type of `accumulate_dtype`. `codes` is the fraction of the parameters
    that are then read again and written as FP8 codes of 1 byte.

    Async and sync updates read and write the same amount. Left out: in async the caches may also read the lines of
    the generation that is overwritten; the norm, and with replicas the sum, of gradients is computed as they arrive, in
    backward.
    """
    wide = accumulate_dtype(dtype)
    grad = wide.itemsize if wide_grad else dtype.itemsize
    rest = sum(kind.itemsize for kind in REST.get(dtype, {}).values())
    params = dtype.itemsize if dtype == torch.float16 else 2 * dtype.itemsize
    return grad + params + 2 * (rest + bytes_each(moments, wide)) + codes * (dtype.itemsize + 1)


def update_bytes_of(layout: StepLayout, units: Iterable[Unit]) -> float:
    """Bytes per parameter that the update of trainable units reads and writes."""
    units = [*units]
    moved = (
        unit.numel
        * update_bytes(
            unit.dtype_in(layout.dtype),
            layout.moments,
            wide_grad=layout.wide_grad,
            codes=fraction_of_codes([unit]),
        )
        for unit in units
    )
    return sum(moved) / sum(unit.numel for unit in units)


def thread_rate(moments: Moments) -> float:
    """The parameters per second that a thread can update, if that and not memory is the limit.

    Measured with int8 moments: 0.26e9 to 0.39e9 with 30 to 8 threads and AVX-512, 0.3e9 with two threads and AVX2.
    """
    return 0.3e9 if moments == "int8" else inf


def fraction_of_codes(units: Iterable[Unit]) -> float:
    """The fraction of the parameters of trainable units that devices read as FP8 codes."""
    params = [param for unit in units for param in unit.params]
    return sum(param.numel for param in params if param.in_fp8) / sum(param.numel for param in params)
