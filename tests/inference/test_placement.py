"""Where a model answers, why, and how fast that is expected to be."""

from dataclasses import replace

import pytest
import torch

from rptrain.inference.placement import FREE, LAUNCH, TRAFFIC, Room, Sizes, choose
from rptrain.models.registry import build, locate, read_config
from rptrain.utils.errors import UserError

GIB = 1 << 30
SIZES = Sizes(weights=15 * GIB, cache=1 * GIB, read=15 * GIB, layers=10)
ROOM = Room(host=64 * GIB, host_rate=50e9, gpu="RTX 4090", vram=24 * GIB, vram_rate=1000e9)
SMALL_GPU = replace(ROOM, vram=int(16 * GIB / FREE) - 1)


@pytest.mark.parametrize(
    ("room", "wanted", "kind", "reason"),
    [
        (ROOM, "auto", "gpu", "fits the free memory of RTX 4090"),
        (ROOM, "cpu", "cpu", "chosen"),
        (SMALL_GPU, "auto", "cpu", "too little for the model"),
        (replace(ROOM, gpu="", vram=0), "auto", "cpu", "has no CUDA GPU"),
        (replace(ROOM, training="tuned"), "auto", "cpu", "tuned trains on this machine"),
        (replace(ROOM, training="tuned"), "gpu", "gpu", "chosen"),
    ],
)
def test_the_placement_and_its_reason(room: Room, wanted: str, kind: str, reason: str) -> None:
    found = choose(SIZES, room, wanted)
    assert found.kind == kind and reason in found.reason and found.device.type == ("cuda" if kind == "gpu" else "cpu")


@pytest.mark.parametrize(
    ("room", "wanted", "message"),
    [
        (SMALL_GPU, "gpu", "takes 15.0 GiB, .* free on RTX 4090: use the placement cpu"),
        (replace(ROOM, gpu="", vram=0), "gpu", "no CUDA GPU"),
        (replace(SMALL_GPU, host=16 * GIB), "auto", "16.0 GiB of host memory is free: free memory$"),
        (replace(ROOM, host=16 * GIB, training="tuned"), "auto", "or use the placement gpu while tuned trains"),
        (ROOM, "disk", "unknown placement 'disk': use one of auto, gpu, cpu"),
    ],
)
def test_a_model_that_does_not_fit(room: Room, wanted: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        choose(SIZES, room, wanted)


def test_the_speed_is_that_of_reading_the_weights() -> None:
    on_gpu = choose(SIZES, ROOM)
    assert on_gpu.tokens_per_second == pytest.approx(1 / (15 * GIB / (TRAFFIC * 1000e9) + 10 * LAUNCH))
    assert str(on_gpu) == "15.0 GiB on the GPU, about 48 tokens/s expected"
    assert str(choose(SIZES, ROOM, "cpu")) == "15.0 GiB on the CPU, about 3.1 tokens/s expected"


def test_a_token_reads_the_head_and_the_experts_that_it_is_routed_to() -> None:
    dense = build(read_config(locate("qwen3-1.7b")))
    sizes = Sizes.of(dense, torch.bfloat16)
    assert sizes.weights == 2 * dense.num_parameters == sizes.read, "the embedding is the head"
    spec = build(read_config(locate("qwen3-235b-a22b")))
    active = Sizes.of(spec, torch.bfloat16).read / 2 + spec.vocab_size * spec.hidden_size
    assert active == pytest.approx(22e9, rel=0.02)
