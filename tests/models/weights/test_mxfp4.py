"""Checkpoints of GPT-OSS as they are published, with experts in 4 bits."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rptrain.engine.memory.store import ModelStore
from rptrain.kernels.quant import MXFP4, dequantize, quantize
from rptrain.models.families import registry
from rptrain.models.locate import read_config
from rptrain.models.transforms.lora import LoRA, with_lora, without_adapters
from rptrain.models.transforms.quantize import with_base
from rptrain.models.weights import mxfp4, pretrained, quantized
from rptrain.models.weights.safetensors_io import read_header
from rptrain.utils.errors import UserError
from tests.models.conftest import stored_bytes

from ...layouts import layout_of

SIZES = {"model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
PACKED = ("gate_up_proj", "down_proj")


@pytest.fixture
def published(fresh, tmp_path):
    """A model's checkpoint with random experts in 4 bits, blocks and scales in two files, and its tensors."""
    model = fresh("GptOssForCausalLM", **SIZES)
    pretrained.save(tmp_path, model.spec, model.view, torch.bfloat16)
    (file,) = tmp_path.glob("*.safetensors")
    tensors, generator = load_file(file), torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.endswith(PACKED)]:
        experts, inner, outer = tensors.pop(name).shape
        shape = (experts, outer, inner // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(118, 124, shape, dtype=torch.uint8, generator=generator)
    file.unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    store(tmp_path, tensors)
    return tmp_path, tensors


def store(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    """In two files, of which one has all scales."""
    files = {name: f"{name.endswith('_scales')}.safetensors" for name in tensors}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in files if files[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def test_experts_are_dequantized_as_transformers_does(published, native) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    directory, tensors = published
    ours = native(directory, torch.bfloat16)
    files = pretrained.check(directory, ours.spec)
    assert stored_bytes(files) == sum(tensor.nbytes for tensor in tensors.values())
    for layer, params in enumerate(ours.params[1:3]):
        at = f"model.layers.{layer}.mlp.experts"
        for name, key in (("experts_gate_up", "gate_up_proj"), ("experts_down", "down_proj")):
            blocks, scales = (tensors[f"{at}.{key}_{kind}"] for kind in ("blocks", "scales"))
            expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
            assert torch.equal(params[name], expected) and params[name].std() > 0
        assert torch.equal(params["router"], tensors[f"model.layers.{layer}.mlp.router.weight"])


def test_what_is_saved_is_in_16_bits_and_says_so(published, native, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    ours = native(published[0], torch.bfloat16)
    to = tmp_path / "saved"
    pretrained.save(to, ours.spec, ours.view, torch.bfloat16)
    assert "quantization_config" not in read_config(to)
    again, info = AutoModelForCausalLM.from_pretrained(to, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(again.model.layers[1].mlp.experts.down_proj, ours.params[2]["experts_down"])


def held(directory: Path, base: str) -> ModelStore:
    """A store of the checkpoint with its base in a format."""
    own = registry.build(read_config(directory))
    store = ModelStore(with_base(with_lora(own, LoRA(r=2)), base), layout_of(torch.bfloat16, generations=1))
    pretrained.load(pretrained.check(directory, own), without_adapters(store.spec), store.stored_view)
    return store


@pytest.mark.parametrize("base", ["mxfp4", "nf4"])
def test_a_base_in_4_bits_keeps_the_experts_codes_as_they_are(published, native, base) -> None:
    directory, tensors = published
    dequantized = native(directory, torch.bfloat16)
    with held(directory, base) as store:
        for unit in (1, 2):
            at = f"model.layers.{unit - 1}.mlp.experts"
            for name, key in (("experts_gate_up", "gate_up_proj"), ("experts_down", "down_proj")):
                kept = store.units[unit].quantized[name]
                assert torch.equal(kept.codes, tensors[f"{at}.{key}_blocks"].flatten())
                assert torch.equal(kept.scales, tensors[f"{at}.{key}_scales"].flatten())
                assert torch.equal(store.view(unit, name), dequantized.params[unit][name])
            others = {"nf4": {"qkv", "o"}, "mxfp4": set()}[base]
            assert store.units[unit].quantized.keys() == {"experts_gate_up", "experts_down"} | others


def test_experts_in_16_bits_are_quantized_in_the_published_order(published, native, tmp_path, monkeypatch) -> None:
    """Blocks of 32 inputs of an output, also where a thread reads a few rows at a time."""
    whole = native(published[0], torch.bfloat16)
    for params in whole.params[1:3]:
        params["experts_gate_up"].normal_(generator=torch.Generator().manual_seed(2))
    pretrained.save(tmp_path / "wide", whole.spec, whole.view, torch.bfloat16)
    for read in (1, 1 << 18):
        monkeypatch.setattr(quantized, "READ", read)
        with held(tmp_path / "wide", "mxfp4") as store:
            kept = store.units[1].quantized["experts_gate_up"]
            codes, scales = quantize(whole.params[1]["experts_gate_up"].mT, MXFP4)
            assert torch.equal(kept.codes, codes) and torch.equal(kept.scales, scales)
            assert torch.equal(store.view(2, "experts_down"), whole.params[2]["experts_down"])  # was in 4 bits before


def test_what_does_not_fit(published) -> None:
    directory, tensors = published
    at = "model.layers.0.mlp.experts"
    tensors[f"{at}.down_proj_blocks"] = tensors[f"{at}.down_proj_blocks"][:, :, :, :8].contiguous()
    tensors[f"{at}.down_proj_scales"] = tensors[f"{at}.down_proj_scales"].half()
    tensors[f"{at}.gate_up_proj"] = torch.zeros(5, 64, 64)
    del tensors[f"{at}.gate_up_proj_scales"]
    store(directory, tensors)
    with pytest.raises(UserError) as caught:
        pretrained.check(directory, registry.build(read_config(directory)))
    assert str(caught.value).partition("\nTensors inside")[0].split("\n- ")[1:] == [
        f"{at}.gate_up_proj_scales is missing",
        f"{at}.gate_up_proj is not part of the model",
        f"{at}.down_proj_blocks has shape [5, 64, 1, 8], not [5, 64, 1, 16]",
        f"{at}.down_proj_scales must be bytes",
    ]


def test_bytes_are_for_experts_only(published) -> None:
    directory, tensors = published
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.uint8)
    store(directory, tensors)
    with pytest.raises(UserError, match=r"model\.norm\.weight is stored as U8"):
        pretrained.check(directory, registry.build(read_config(directory)))


@pytest.mark.parametrize("inner", [32, 48, 96])
def test_rows_may_end_inside_a_block(inner, tmp_path, monkeypatch) -> None:
    """Codes of 300 rows of two experts, of which a thread dequantizes 256 at a time."""
    experts, outer, width = 2, 300, -(-inner // 32)
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (experts, outer, width, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(118, 124, (experts, outer, width), dtype=torch.uint8, generator=generator)
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / "w.safetensors")
    stored = read_header(tmp_path / "w.safetensors")
    target = torch.empty(experts, inner, outer)
    for piece in mxfp4.pieces(stored["w_blocks"], stored["w_scales"], target):
        mxfp4.load(piece)
    rows = dequantize(blocks.flatten(), scales.flatten(), MXFP4, torch.empty(experts * outer, width * 32))
    assert torch.equal(target, rows[:, :inner].reshape(experts, outer, inner).transpose(1, 2))
