"""The paper's roofline by hand, its claim for the models it names, and the verdict on plans whose limit is known."""

from dataclasses import replace

import pytest

from rptrain.models import registry
from rptrain.models.layers.moe import MoEBlock
from rptrain.schedule.costs import LayerCost
from rptrain.schedule.dispatch import Links
from rptrain.schedule.estimate import Setting
from rptrain.schedule.machine import CARDS
from rptrain.schedule.plan import Plan
from rptrain.schedule.roofline import (
    Sizes,
    backward_intensity,
    backward_upload,
    forward_flops,
    forward_intensity,
    forward_upload,
    judge,
    ridge,
)

LENGTH = 2048
DENSE = ["qwen3-1.7b", "llama-3.1-8b", "qwen3-32b"]
EXPERTS = ["gpt-oss-20b", "qwen3-235b-a22b"]
NOMINAL = {"rtx3090": 32e9, "rtx4090": 32e9, "rtx5090": 64e9, "a800": 32e9}  # PCIe 4.0 and 5.0, 16 lanes


def sizes_of(preset: str, index: int = -1) -> Sizes:
    block = registry.build(registry.read_config(registry.locate(preset))).layers[index]
    sizes = Sizes(block.hidden, block.heads, block.kv_heads, block.head_size, block.intermediate)
    if isinstance(block, MoEBlock):
        sizes = replace(sizes, experts=block.experts, active=block.active, window=block.window)
    return sizes


# Millions, by the paper's terms: parameters of the query and output, key and value, and expert projections; h; active
# experts; columns of all heads.
BY_HAND = {
    "qwen3-1.7b": (8.388608, 4.194304, 37.748736, 37.748736, 2048, 2048),
    "llama-3.1-8b": (33.554432, 8.388608, 176.160768, 176.160768, 4096, 4096),
    "qwen3-32b": (83.88608, 10.48576, 393.216, 393.216, 5120, 8192),
    "gpt-oss-20b": (23.59296, 2.94912, 796.2624, 99.5328, 2880, 4096),
    "qwen3-235b-a22b": (67.108864, 4.194304, 2415.919104, 150.994944, 4096, 8192),
}


@pytest.mark.parametrize("preset", BY_HAND)
def test_equations_2_to_7_by_hand(preset):
    outer, inner, held, used, hidden, columns = BY_HAND[preset]
    sizes = sizes_of(preset)  # of GPT-OSS, a layer that sees all keys
    tokens = 8 * LENGTH
    flops = tokens * (2e6 * (outer + inner + used) + 4 * LENGTH * columns)
    upload = 2e6 * (outer + inner + held) + 2 * tokens * hidden
    assert forward_flops(sizes, LENGTH, 8) == pytest.approx(flops, rel=1e-12)
    assert forward_upload(sizes, LENGTH, 8) == pytest.approx(upload, rel=1e-12)
    assert forward_intensity(sizes, LENGTH, 8) == pytest.approx(flops / upload, rel=1e-12)
    assert backward_upload(sizes, LENGTH, 8) == pytest.approx(upload + 2 * tokens * hidden, rel=1e-12)
    assert backward_intensity(sizes, LENGTH, 8) == pytest.approx(3 * flops / (upload + 2 * tokens * hidden), rel=1e-12)


def test_a_window_limits_the_keys_that_are_seen():
    sizes = sizes_of("gpt-oss-20b", 0)
    whole = replace(sizes, window=None)
    assert sizes.window == 128
    saved = 4 * 8 * LENGTH * (LENGTH - 128) * 4096
    assert forward_flops(whole, LENGTH, 8) - forward_flops(sizes, LENGTH, 8) == pytest.approx(saved, rel=1e-12)
    assert forward_flops(sizes, 64, 8) == forward_flops(whole, 64, 8)


@pytest.mark.parametrize("card", NOMINAL)
def test_the_claim_of_c4(card):
    """Dense blocks compute longer than they copy from a batch of 8, blocks of experts from a batch below 100."""
    point = ridge(CARDS[card].peak.bf16, NOMINAL[card])
    for preset in DENSE:
        assert forward_intensity(sizes_of(preset), LENGTH, 8) > point, preset
    for preset in EXPERTS:
        for index in (0, -1):
            sizes = sizes_of(preset, index)
            assert forward_intensity(sizes, LENGTH, 100) > point, preset
    assert forward_intensity(sizes_of("qwen3-235b-a22b"), LENGTH, 8) < point


@pytest.mark.sample(6)
@pytest.mark.parametrize("preset", BY_HAND)
@pytest.mark.parametrize("batch", [1, 8, 64, 1024])
def test_equation_7_backward_is_above_forward_as_long_as_parameters_are_the_most(preset, batch):
    sizes = sizes_of(preset)
    assert backward_intensity(sizes, LENGTH, batch) > 1.5 * forward_intensity(sizes, LENGTH, batch) > 0


def test_weights_in_4_bits_are_uploaded_as_such():
    """By hand: a byte a weight less 1.4375, and the input as before."""
    sizes = sizes_of("qwen3-1.7b")
    narrow = replace(sizes, weight=0.5625)
    matrices = 2048 * (2 * 2048 + 2 * 1024 + 3 * 6144)
    assert forward_upload(sizes, LENGTH, 2) - forward_upload(narrow, LENGTH, 2) == (2 - 0.5625) * matrices
    assert forward_upload(narrow, LENGTH, 2) == 0.5625 * matrices + 2 * 2 * LENGTH * 2048


def test_intensity_grows_with_the_batch_and_halves_with_wide_numbers():
    sizes = sizes_of("llama-3.1-8b")
    values = [forward_intensity(sizes, LENGTH, batch) for batch in (1, 2, 4, 8, 16)]
    assert values == sorted(values)
    assert forward_intensity(sizes, LENGTH, 4, 4) == pytest.approx(values[2] / 2)


# The verdict

PLAN = Plan.parse("F0-1 F2-3 FB4-4 B2-3 B0-1 | N=2 M=8 MR=8")
LINKS = Links(up=1e9, down=1e9, boundary=1000)


def verdict(lag: int, *, params: int = 0, grads: int = 0, update: float = 0.0, gather: float = 0.0):
    costs = [LayerCost(1.0, 3.0, params, grads, 0, update, reduce=2 * gather, gather=gather)] * 5
    return judge(PLAN, costs, Setting(2, 8, 8, lag, LINKS))


@pytest.mark.parametrize("lag", [0, 1])
def test_small_transfers_hide(lag):
    found = verdict(lag, params=10**8, grads=10**8)
    assert found.limit is None and found.stages == ()
    assert found.seconds == pytest.approx(found.alone, rel=0.02)


def test_the_link_that_is_the_limit_and_its_stages():
    """A slot computes 16 s (F), 24 s (FB) or 48 s (B); two layers' parameters take 100 s up, one layer's 50 s."""
    found = verdict(1, params=50 * 10**9)
    assert (found.limit, found.stages) == ("up", PLAN.stages)
    assert found.loss > 0.5
    found = verdict(1, grads=100 * 10**9)
    assert found.limit == "down"
    assert found.stages == tuple(stage for stage in PLAN.stages if stage.backward)


def test_the_optimizer_is_the_limit_in_async_where_it_takes_longer_than_a_step():
    """Computation takes 5 slots' 16 + 16 + 24 + 48 + 48 = 152 s on two devices, 76 s a step; updates take 152 s."""
    found = verdict(1, update=152 / 5)
    assert found.limit == "optimizer" and found.stages == ()
    assert found.seconds == pytest.approx(152, rel=0.01) and found.alone == pytest.approx(76, rel=0.05)
    assert verdict(1, update=1.0).limit is None
    assert verdict(0, update=10.0).limit == "optimizer"


def test_the_network_is_the_limit_where_messages_take_longer_than_a_step():
    found = verdict(1, gather=100 / 5)
    assert found.limit == "network" and found.loss == pytest.approx(300 / 76 - 1, rel=0.1)
    assert verdict(1, gather=100 / 5, update=500.0).limit == "optimizer"
    assert verdict(1, gather=0.1).limit is None
