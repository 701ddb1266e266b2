"""The wire format of a unit: what devices read in place of its 16-bit or float32 weights when they multiply in FP8.

Parameters in FP8 are codes and scales of their rows (kernels/fp8.py); the others are copies in the model's type.
"""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from rptrain.kernels.fp8 import Rows
from rptrain.kernels.fp8_host import quantize_rows_into
from rptrain.models.params import Unit

PIECE = 1 << 20  # elements quantized at a time, so that all threads have work


def writes(unit: Unit, flat: Tensor, wire: Tensor) -> Sequence[Callable[[], object]]:
    """Calls that together write the weights in `flat` [unit.numel] to `wire`, in bytes; any thread, in any order.

    Padding is not written.
    """
    params = unit.views(flat)
    plain, weights = unit.wire_views(wire, flat.dtype)
    calls: list[Callable[[], object]] = [partial(copy.copy_, params[name]) for name, copy in plain.items()]
    for name, weight in weights.items():
        size = params[name].shape[-1]
        source, codes = params[name].view(-1, size), weight.rows.codes.view(-1, size)
        scales = weight.rows.scales.view(-1)
        count = max(PIECE // size, 1)
        for start in range(0, len(source), count):
            part = slice(start, start + count)
            calls.append(partial(quantize_rows_into, source[part], Rows(codes[part], scales[part])))
    return calls
