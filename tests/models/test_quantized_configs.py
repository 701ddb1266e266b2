"""Weights that are stored quantized: what their refusal says to do, and that it works."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rptrain.models.families import registry
from rptrain.models.families.config import TO_16_BITS
from rptrain.models.locate import PRESETS, read_config
from rptrain.models.weights import pretrained
from rptrain.utils.errors import UserError
from tests.families import VARIANTS

from .conftest import hugging_face

MINIMAX = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        (MINIMAX, ["to FP8 with a scale for each block of 128 × 128", TO_16_BITS]),
        ({"quant_method": "fp8", "weight_block_size": None}, ["to FP8 with scales", TO_16_BITS]),
        ({"quant_method": "gptq", "bits": 4}, ["('gptq')", "weights that they were made from"]),
        ("fp8", ["weights that they were made from"]),
    ],
    ids=["blocks", "tensors", "gptq", "text"],
)
def test_a_refusal_names_what_is_stored_and_what_to_use(stored: Any, words: list[str]) -> None:
    config = read_config(PRESETS / "minimax-m2") | {"quantization_config": stored}
    with pytest.raises(UserError) as caught:
        registry.build(config)
    (problem,) = str(caught.value).split("\n- ")[1:]
    assert problem.startswith("quantization_config: the weights are quantized") and "\n" not in problem
    assert [word for word in words if word not in problem] == []


def test_the_copy_of_transformers_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model in FP8 with blocks, as MiniMax-M2 is published, on a machine without a GPU."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    hugging_face(tmp_path / "model", **VARIANTS["minimax-m2"])
    monkeypatch.chdir(tmp_path)
    original, stored = load_file("model/model.safetensors"), dict[str, torch.Tensor]()
    for name, tensor in original.items():
        stored[name] = tensor
        if "proj." in name or ".experts." in name:
            rows, columns = tensor.shape
            blocks = tensor.view(rows // 4, 4, columns // 4, 4)
            scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
            stored[name] = (blocks / scales[:, None, :, None]).view(rows, columns).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scales
    save_file(stored, "model/model.safetensors", {"format": "pt"})
    config = json.loads(Path("model/config.json").read_text())
    config["quantization_config"] = MINIMAX | {
        "weight_block_size": [4, 4],
        "modules_to_not_convert": ["gate", "lm_head"],
    }
    Path("model/config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="block of 4 × 4"):
        registry.build(config)

    names = {"AutoModelForCausalLM": AutoModelForCausalLM, "FineGrainedFP8Config": FineGrainedFP8Config}
    eval(TO_16_BITS, names | {"FOLDER": "model", "COPY": "copy"})
    spec = registry.build(registry.model_config(tmp_path / "copy"))
    pretrained.check(tmp_path / "copy", spec)
    for name, tensor in load_file("copy/model.safetensors").items():
        torch.testing.assert_close(tensor.float(), original[name], rtol=0.1, atol=0.02)
