"""The memory that generating takes, and prompts that are refused."""

import pytest
import torch

from rptrain.inference import generate
from rptrain.inference.generate import Request, _check_lengths, generate_text
from rptrain.inference.model import EXTENDED, Model
from rptrain.inference.placement import FREE, FreeMemory
from rptrain.models.decode.cache import Cache, cache_bytes
from rptrain.models.decode.generate import stream
from rptrain.models.families.registry import build
from rptrain.models.locate import locate, read_config
from rptrain.utils.errors import UserError

from .letters import Letters


@pytest.fixture(scope="module")
def spec():
    return build(read_config(locate("tiny-tasks")))


@pytest.fixture
def model(spec, tmp_path):
    return Model(spec, torch.float32, tmp_path, tmp_path, load=lambda flats: pytest.fail("loaded"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_memory_of_keys_and_values(dtype, spec):
    """The cache grows to the limit, and not above it."""
    params = [unit.views(torch.zeros(unit.numel, dtype=unit.dtype_in(dtype))) for unit in spec.units]
    cache = Cache(spec, 2, dtype, torch.device("cpu"), limit=12)
    for _ in stream(spec, params.__getitem__, [[1] * 3, [2] * 7], 6, cache=cache):
        pass
    assert cache.nbytes == cache_bytes(spec, 2, 12, dtype)
    assert [len(known) for known in cache.tokens] == [8, 12]


def test_prompts_that_do_not_fit(spec, model, monkeypatch):
    """What is needed counts all prompts and their answers; nothing is loaded to find out."""
    needed = (model.nbytes + cache_bytes(spec, 2, 14, torch.float32)) / FREE
    monkeypatch.setattr(generate, "find_model", lambda source: model)
    monkeypatch.setattr(generate, "load_tokenizer", lambda source: Letters())
    asked = Request(model.source, ["abcd", "ab"], 10, raw=True)
    with pytest.raises(pytest.fail.Exception, match="loaded"):
        generate_text(asked, FreeMemory(int(1.01 * needed), 50e9))
    with pytest.raises(UserError, match=r"up to 14 tokens in 2 sequences .* lower --max-new-tokens, give fewer"):
        generate_text(asked, FreeMemory(int(0.99 * needed), 50e9))
    with pytest.raises(UserError, match="no CUDA GPU: use the placement cpu"):
        generate_text(asked, FreeMemory(int(1.01 * needed), 50e9), "gpu")


def test_a_prompt_far_longer_than_the_context(model):
    longest = EXTENDED * model.spec.config["max_position_embeddings"]
    _check_lengths(model, [[1] * longest])
    with pytest.raises(UserError, match=rf"prompt 2 has {longest + 1:,} tokens, more than 8 times .*: shorten it"):
        _check_lengths(model, [[1], [1] * (longest + 1)])
