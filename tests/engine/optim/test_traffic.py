"""The bytes that an update moves: one figure for the plan and for the bench."""

import pytest
import torch

from rptrain.engine.memory.store import ModelStore
from rptrain.engine.optim.traffic import update_bytes
from rptrain.models.families import registry
from rptrain.models.locate import locate, read_config

from ...layouts import layout_of

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("dtype", "moments", "options", "expected"),
    [
        (BF16, "fp32", {}, 2 + 2 * (2 + 2 + 8)),
        (BF16, "fp32", {"wide_grad": True}, 4 + 2 * (2 + 2 + 8)),
        (BF16, "bf16", {}, 2 + 2 * (2 + 2 + 4)),
        (BF16, "int8", {}, 2 + 2 * (2 + 2 + 2 + 8 / 128)),
        (FP16, "fp32", {}, 2 + 2 + 2 * (4 + 8)),
        (FP16, "int8", {"wide_grad": True}, 4 + 2 + 2 * (4 + 2 + 8 / 128)),
        (FP32, "fp32", {}, 4 + 2 * (4 + 8)),
        (FP32, "bf16", {"wide_grad": True}, 4 + 2 * (4 + 4)),
        (FP64, "fp32", {}, 8 + 2 * (8 + 16)),
        (BF16, "fp32", {"codes": 1.0}, 26 + 2 + 1),
        (BF16, "fp32", {"codes": 0.5}, 26 + 1.5),
        (FP32, "fp32", {"codes": 1.0}, 28 + 4 + 1),
    ],
)
def test_bytes_of_a_parameter(dtype, moments, options, expected):
    assert update_bytes(dtype, moments, **options) == expected


@pytest.mark.parametrize("wide_grad", [False, True])
@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_they_are_those_of_the_buffers(dtype, moments, wide_grad):
    """adam.c reads every buffer of a unit once, and writes all but the gradient; masters spare it the parameter."""
    spec = registry.build(read_config(locate("tiny-tasks")))
    with ModelStore(spec, layout_of(dtype, generations=2, wide_grad=wide_grad, moments=moments)) as store:
        state = store.units[1]
        both = [*state.moments.values(), state.remainder, state.masters]
        read = [state.grad, *both, *(state.params[:1] if state.masters is None else [])]
        written = [state.params[1], *both]
        moved = sum(buffer.nbytes for buffer in (*read, *written) if buffer is not None)
        assert update_bytes(dtype, moments, wide_grad=wide_grad) == moved / state.unit.numel
