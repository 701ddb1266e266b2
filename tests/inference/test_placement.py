"""Where a model answers, why, and how fast that is expected to be."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.placements import spec_of
from rptrain.inference.placement import (
    CPU_LAYER,
    CPU_TRAFFIC,
    FREE,
    GPU_LAYER,
    QUANTIZED_LAYER,
    TRAFFIC,
    FreeMemory,
    Sizes,
    choose,
    speeds,
)
from rptrain.models.families.registry import build
from rptrain.models.locate import locate, read_config
from rptrain.utils.errors import UserError

GIB = 1 << 30
MEASURED = json.loads((Path(__file__).parents[2] / "benchmarks/results/placements.json").read_text())
WITHIN = 1.7  # the factor by which a speed may differ from what was expected
SIZES = Sizes(
    weights=15 * GIB, cache=1 * GIB, read=15 * GIB, layers=10, packed=15 * GIB, blocks=14 * GIB, block=2 * GIB
)
ROOM = FreeMemory(host=64 * GIB, host_rate=50e9, gpu="RTX 4090", vram=24 * GIB, vram_rate=1000e9, link_rate=25e9)
SMALL_GPU = replace(ROOM, vram=int(16 * GIB / FREE) - 1)
NF4 = replace(SIZES, packed=5 * GIB, blocks=4 * GIB, block=GIB // 2)  # a quarter of the weights' bytes


@pytest.mark.parametrize(
    ("room", "wanted", "kind", "reason"),
    [
        (ROOM, "auto", "gpu", "fits the free memory of RTX 4090"),
        (ROOM, "cpu", "cpu", "chosen"),
        (replace(SMALL_GPU, link_rate=10e9), "auto", "cpu", "too little for the model"),
        (replace(SMALL_GPU, link_rate=60e9), "auto", "streamed", "too little for the model"),
        (SMALL_GPU, "streamed", "streamed", "chosen"),
        (replace(ROOM, gpu="", vram=0), "auto", "cpu", "has no CUDA GPU"),
        (replace(ROOM, training="tuned"), "auto", "cpu", "tuned trains on this machine"),
        (replace(ROOM, training="tuned"), "gpu", "gpu", "chosen"),
    ],
)
def test_the_placement_and_its_reason(room: FreeMemory, wanted: str, kind: str, reason: str) -> None:
    found = choose(SIZES, room, wanted)
    assert found.kind == kind and reason in found.reason and found.device.type == ("cpu" if kind == "cpu" else "cuda")


@pytest.mark.parametrize(
    ("room", "wanted", "message"),
    [
        (SMALL_GPU, "gpu", "takes 15.0 GiB, .* too much for the placement gpu: 20.0 GiB is free on RTX 4090"),
        (replace(ROOM, vram=7 * GIB), "streamed", "too much for the placement streamed"),
        (replace(ROOM, gpu="", vram=0), "gpu", "no CUDA GPU"),
        (replace(SMALL_GPU, host=16 * GIB), "auto", "16.0 GiB of host memory is free: free memory$"),
        (replace(ROOM, gpu="", host=16 * GIB, training="tuned"), "auto", "is free: free memory$"),
        (replace(ROOM, host=16 * GIB, training="tuned"), "auto", "or use the placement gpu while tuned trains"),
        (ROOM, "disk", "unknown placement 'disk': use one of auto, gpu, streamed, cpu"),
    ],
)
def test_a_model_that_does_not_fit(room: FreeMemory, wanted: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        choose(SIZES, room, wanted)


def test_the_speed_is_that_of_reading_the_weights() -> None:
    on_gpu = choose(SIZES, ROOM)
    seconds = 15 * GIB / (TRAFFIC * 1000e9) + 10 * GPU_LAYER
    assert on_gpu.tokens_per_second == pytest.approx(1 / seconds)
    assert str(on_gpu) == "15.0 GiB on the GPU, about 35 tokens/s expected"
    streamed = choose(SIZES, ROOM, "streamed")
    assert streamed.tokens_per_second == pytest.approx(1 / max(seconds, 14 * GIB / 25e9))
    on_cpu = choose(SIZES, ROOM, "cpu")
    assert on_cpu.tokens_per_second == pytest.approx(1 / (15 * GIB / (CPU_TRAFFIC * 50e9) + 10 * CPU_LAYER))
    assert speeds(SIZES, ROOM) == {
        found.kind: found.tokens_per_second for found in (on_gpu, streamed, on_cpu)
    } and speeds(SIZES, replace(ROOM, gpu="")) == {"cpu": on_cpu.tokens_per_second}
    assert str(on_cpu) == "15.0 GiB on the CPU, about 1.2 tokens/s expected"


@pytest.mark.parametrize(
    "case", MEASURED["cases"], ids=lambda case: f"{case['model']}-{case['base']}-{case['placement']}"
)
def test_the_speeds_that_were_measured(case: dict[str, Any]) -> None:
    """By `benchmarks/placements.py`."""
    room = FreeMemory(**MEASURED["room"])
    expected = speeds(Sizes.of(spec_of(case["model"], case["base"]), torch.bfloat16), room)[case["placement"]]
    assert case["measured"] / WITHIN <= expected <= case["measured"] * WITHIN


def test_a_quantized_base_stays_so_on_the_gpu_and_is_dequantized_for_the_cpu() -> None:
    small = replace(ROOM, vram=8 * GIB, link_rate=10e9)
    assert choose(SIZES, small).kind == "cpu"
    found = choose(NF4, small)
    assert (found.kind, found.nbytes) == ("gpu", 5 * GIB)
    seconds = 5 * GIB / (TRAFFIC * 1000e9) + 10 * (GPU_LAYER + QUANTIZED_LAYER)
    assert found.tokens_per_second == pytest.approx(1 / seconds)
    assert choose(NF4, ROOM, "cpu").nbytes == 15 * GIB


def test_a_token_reads_the_head_and_the_experts_that_it_is_routed_to() -> None:
    dense = build(read_config(locate("qwen3-1.7b")))
    sizes = Sizes.of(dense, torch.bfloat16)
    assert sizes.weights == 2 * dense.num_parameters == sizes.read, "the embedding is the head"
    spec = build(read_config(locate("qwen3-235b-a22b")))
    active = Sizes.of(spec, torch.bfloat16).read / 2 + spec.vocab_size * spec.hidden_size
    assert active == pytest.approx(22e9, rel=0.02)
