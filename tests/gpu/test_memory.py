"""What the layers of real models keep and need on a GPU, against what plans count with."""

from dataclasses import replace

import pytest
import torch

from benchmarks.kernels.attention import micro_batch
from rptrain.engine.memory.step_layout import accumulate_dtype
from rptrain.engine.reproducible import Reproducible
from rptrain.models.families import registry
from rptrain.models.layers.rope import RotaryTables
from rptrain.models.locate import locate, read_config
from rptrain.models.transforms.fp8 import with_fp8
from rptrain.models.transforms.half_sums import with_half_sums

pytestmark = pytest.mark.gpu

ROWS, LENGTH = 4, 2048
TOKENS, DTYPE, DEVICE = ROWS * LENGTH, torch.bfloat16, torch.device("cuda")
SMALL = 48 << 20  # of matrix libraries, and partial sums of a norm's gradient: a plan leaves LIBRARIES for them


@pytest.fixture
def reproducible():
    """As in an engine: attention's backward is the deterministic one."""
    settings = Reproducible(cuda=True)
    yield
    settings.restore()


def allocated(work):
    """What `work` gives back, and the bytes that it allocated at most and left; after a pass that warms up."""
    work()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = work()
    return result, torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before


@pytest.mark.parametrize(("fp8", "half_sums"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(
    ("preset", "layer"),
    [
        ("qwen3-1.7b", -1),
        ("llama-3.1-8b", -1),
        ("gpt-oss-20b", -1),
        ("qwen3-235b-a22b", -1),
        ("glm-4.5-air", -1),  # its first layer has no experts
        ("minimax-m2", -1),
        ("qwen3.5-27b", 0),  # a gated delta net
        ("qwen3.5-27b", -1),
        ("qwen3.5-35b-a3b", 0),
    ],
)
def test_bounds_hold_with_fused_kernels(preset, layer, fp8, half_sums, reproducible):
    """A block and the head at 4 x 2,048 tokens; bounds are at most a tenth too large, with FP8 four tenths."""
    spec = registry.build(read_config(locate(preset)))
    spec, slack = (with_fp8(spec), 1.4) if fp8 else (spec, 1.1)
    spec = with_half_sums(spec) if half_sums else spec
    mb = micro_batch([[LENGTH]] * ROWS)
    rotations = RotaryTables(spec.rotaries, torch.float32, torch.device(DEVICE)).at(mb.positions)
    mb = replace(mb, rotations=rotations, labels=torch.randint(1000, (TOKENS,), device=DEVICE))
    x, dy = (torch.randn(TOKENS, spec.hidden_size, device=DEVICE, dtype=DTYPE) for _ in range(2))
    layer = spec.layers[layer]
    params, grads = tensors(spec, layer)
    (_, saved), _, left = allocated(lambda: layer.forward_saved(params, x, mb))
    kept, bound = left, layer.kept_bytes(TOKENS, DTYPE.itemsize)  # with its output, which is as large as its input
    print(f"{preset}: kept {kept:,} of {bound:,}", end="; ")
    assert 0.95 * bound <= kept <= bound + SMALL
    layer.backward(params, grads, layer.forward_saved(params, x, mb)[1], dy, mb)  # takes the libraries' workspaces
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    layer.backward(params, grads, saved, dy, mb)
    peak = torch.cuda.max_memory_allocated() - before + dy.nbytes
    bound = layer.workspace_bytes(TOKENS, DTYPE.itemsize, fused=True)
    print(f"backward {peak:,} of {bound:,}", end="; ")
    assert peak - SMALL <= bound <= slack * peak
    del saved, params, grads
    params, grads = tensors(spec, spec.head)
    _, peak, _ = allocated(lambda: spec.head.loss_backward(params, grads, x, mb, 1.0))
    bound = spec.head.workspace_bytes(TOKENS, DTYPE.itemsize, fused=True)
    print(f"head {peak + x.nbytes:,} of {bound:,}")
    assert peak + x.nbytes - SMALL <= bound <= 1.1 * (peak + x.nbytes)


def tensors(spec, layer):
    """Parameters and gradient accumulators of a layer, by name."""
    params, grads = {}, {}
    for index in layer.units:
        unit = spec.units[index]
        params |= unit.views(torch.empty(unit.numel, dtype=unit.dtype_in(DTYPE), device=DEVICE).normal_(std=0.02))
        for param in unit.in_fp8:
            buffer = torch.empty(param.fp8_bytes(columns=True), dtype=torch.uint8, device=DEVICE)
            weight = param.fp8_view(buffer, columns=True)
            weight.write(params[param.name])
            params[param.name] = weight
        grads |= unit.views(torch.zeros(unit.numel, dtype=accumulate_dtype(DTYPE), device=DEVICE))
    return params, grads
