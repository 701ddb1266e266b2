import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rptrain.engine.memory.moments import layout
from rptrain.engine.memory.step_layout import accumulate_dtype
from rptrain.engine.memory.unit_state import UnitState
from rptrain.engine.optim.adam import split
from rptrain.models.families import registry

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture
def model_dir(tmp_path):
    """A base model's files but for its weights."""
    directory = tmp_path / "base model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    (directory / "pytorch_model.bin").write_text("weights of another kind")
    return directory


@pytest.fixture
def spec():
    return registry.build(CONFIG)


def make_units(spec, dtype=torch.bfloat16, generations=1, seed=0, moments="fp32"):
    """Every buffer full of random numbers; of two generations the second is the current one."""
    generator = torch.Generator().manual_seed(seed)

    def random(numel, kind):
        return torch.randn(numel, generator=generator, dtype=torch.float64).to(kind)

    units = []
    for unit in spec.units:
        params = [random(unit.numel, dtype) for _ in range(generations)]
        remainder = None
        if dtype == torch.bfloat16:
            remainder = torch.empty(unit.numel, dtype=torch.int16)
            split(random(unit.numel, torch.float32), params[-1], remainder)
        buffers = {
            name: (10 * random(unit.numel // shared, torch.float64)).abs().to(kind)
            for name, kind, shared in layout(moments, accumulate_dtype(dtype))
        }
        masters = random(unit.numel, torch.float32) if dtype == torch.float16 else None
        if masters is not None:
            params[-1].copy_(masters)
        units.append(UnitState(unit, params, random(unit.numel, dtype), buffers, remainder, generations - 1, masters))
    return units


def kept(units):
    """What a checkpoint is to bring back of each unit."""
    return [
        [unit.params[unit.current], unit.params[unit.before], *unit.moments.values()]
        + [rest for rest in (unit.remainder, unit.masters) if rest is not None]
        for unit in units
    ]


def same_bits(left, right):
    pairs = [pair for ours, theirs in zip(left, right, strict=True) for pair in zip(ours, theirs, strict=True)]
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


@pytest.fixture
def states():
    return SimpleNamespace(make=make_units, kept=kept, same_bits=same_bits)


@pytest.fixture
def damage():
    """Flips one bit of a file."""

    def flip(file: Path, at: float = 0.5):
        content = bytearray(file.read_bytes())
        content[int(at * (len(content) - 1))] ^= 1
        file.write_bytes(content)

    return flip
