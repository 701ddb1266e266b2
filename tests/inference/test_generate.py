"""The memory that generating takes, and the device that it runs on."""

import pytest
import torch

from rptrain.inference import generate
from rptrain.inference.generate import ROOM, _check_lengths, _device
from rptrain.inference.model import EXTENDED, Model
from rptrain.models.layers.cache import Cache, cache_bytes
from rptrain.models.layers.generate import stream
from rptrain.models.registry import build, locate, read_config
from rptrain.utils.errors import UserError


@pytest.fixture(scope="module")
def spec():
    return build(read_config(locate("tiny-tasks")))


@pytest.fixture
def model(spec, tmp_path):
    return Model(spec, torch.float32, tmp_path, tmp_path, load=lambda: pytest.fail("loaded"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_memory_of_keys_and_values(dtype, spec):
    """The cache grows to the limit, and not above it."""
    params = [unit.views(torch.zeros(unit.numel, dtype=dtype)) for unit in spec.units]
    cache = Cache(spec, 2, dtype, torch.device("cpu"), limit=12)
    for _ in stream(spec, params.__getitem__, [[1] * 3, [2] * 7], 6, cache=cache):
        pass
    assert cache.nbytes == cache_bytes(spec, 2, 12, dtype)
    assert [len(held) for held in cache.held] == [8, 12]


@pytest.mark.parametrize(("gpu", "host", "device"), [(1.01, 0, "cuda"), (0.99, 1.01, "cpu"), (0, 1.01, "cpu")])
def test_the_device_has_room_for_weights_and_keys_and_values(gpu, host, device, spec, model, monkeypatch):
    """`gpu` and `host` are shares of what is needed; nothing is loaded to find out."""
    weights = sum(param.numel for unit in spec.units for param in unit.params) * 4
    needed = (weights + cache_bytes(spec, 2, 14, torch.float32)) / ROOM
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu > 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(gpu * needed), 2**40))
    monkeypatch.setattr(generate, "available_bytes", lambda: int(host * needed))
    prompts = [[1] * 4, [2] * 2]
    assert _device(model, prompts, 10).type == device
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(0.99 * needed), 2**40))
    monkeypatch.setattr(generate, "available_bytes", lambda: int(0.99 * needed))
    with pytest.raises(UserError, match=r"up to 14 tokens in 2 sequences .* lower --max-new-tokens"):
        _device(model, prompts, 10)


def test_a_prompt_far_longer_than_the_context(model):
    longest = EXTENDED * model.spec.config["max_position_embeddings"]
    _check_lengths(model, [[1] * longest])
    with pytest.raises(UserError, match=rf"prompt 2 has {longest + 1:,} tokens, more than 8 times .*: shorten it"):
        _check_lengths(model, [[1], [1] * (longest + 1)])
