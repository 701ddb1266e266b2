"""Adapters of MLPs' parameters in models with experts, in PEFT's files.

Stock PEFT loads them, they merge, and what PEFT writes is continued.
"""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from rptrain.checkpoint import adapter
from rptrain.models.families import registry
from rptrain.models.locate import read_config
from rptrain.models.transforms.lora import LoRA, merged, with_lora, without_adapters
from rptrain.models.weights import pretrained
from rptrain.utils.errors import UserError
from tests.checkpoint.test_adapter import assert_continued, base, trained, written
from tests.models.conftest import make_micro_batch
from tests.models.transforms.test_lora import IDS, in_peft

__all__ = ["base"]  # the fixture

DOWN = "down_proj.weight"
BOTH = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
SETTINGS = {
    "both-attention": LoRA(r=4, lora_alpha=8, target_parameters=BOTH),
    "both-rslora": LoRA(r=3, lora_alpha=5, use_rslora=True, target_modules=(), target_parameters=BOTH),
    "gate-and-up": LoRA(r=2, target_modules=("k_proj",), target_parameters=("experts.gate_up_proj",)),
    "down": LoRA(r=1, target_modules=(), target_parameters=("down_proj",), modules_to_save=("model.norm",)),
}
GLM, QWEN3 = "glm4-moe", "qwen3-moe-some-dense"
WEIGHTS = {  # of dense MLPs and of shared experts
    "glm-everything": (GLM, LoRA(r=3, target_parameters=(*BOTH, "gate_proj.weight", "up_proj.weight", DOWN))),
    "glm-shared": (GLM, LoRA(r=2, target_modules=(), target_parameters=(f"shared_experts.{DOWN}",))),
    "qwen3-dense": (QWEN3, LoRA(r=2, target_modules=("v_proj",), target_parameters=(f"mlp.{DOWN}", "down_proj"))),
}
cases = pytest.mark.parametrize(
    ("base", "settings"),
    [
        *(pytest.param(base, each, id=f"{base}-{id}") for base in (QWEN3, "gpt-oss") for id, each in SETTINGS.items()),
        *(pytest.param(*case, id=id) for id, case in WEIGHTS.items()),
    ],
    indirect=["base"],
)


def loaded(directory):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    model.set_experts_implementation("eager")
    return model.eval()


@pytest.mark.sample(7)
@cases
def test_peft_loads_what_is_written(base, settings, tmp_path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict

    _, directory = base
    ours = trained(directory, settings)
    written(ours, settings, directory, tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(loaded(directory), tmp_path / "adapter").eval()
    mb = make_micro_batch(ours.spec, [[11], [11]])
    expected = theirs(IDS.view(2, 11)).logits.flatten(0, 1)
    torch.testing.assert_close(ours.logits(IDS, mb), expected, rtol=1e-5, atol=1e-5)

    again = get_peft_model(loaded(directory), LoraConfig.from_pretrained(tmp_path / "adapter"))
    found = set_peft_model_state_dict(again, load_file(tmp_path / "adapter/adapter_model.safetensors"))
    known = {name for name, parameter in again.named_parameters() if parameter.requires_grad}
    assert not found.unexpected_keys and not known & {*found.missing_keys}


@pytest.mark.sample(7)
@cases
def test_merged_equals_unmerged(base, settings, tmp_path) -> None:
    _, directory = base
    ours = trained(directory, settings)
    pretrained.save(tmp_path / "merged", without_adapters(ours.spec), merged(ours.spec, ours.view), torch.float32)
    mb = make_micro_batch(ours.spec, [[11], [11]])
    found = loaded(tmp_path / "merged")(IDS.view(2, 11)).logits.flatten(0, 1)
    torch.testing.assert_close(found, ours.logits(IDS, mb), rtol=1e-5, atol=1e-5)


@pytest.mark.sample(7)
@cases
def test_what_peft_writes_is_continued(base, settings, tmp_path) -> None:
    model, directory = base
    if settings.target_modules == "all-linear":
        settings = replace(settings, target_modules=("q_proj", "o_proj"))
    theirs, _ = in_peft(model, settings, settings.target_modules)
    assert_continued(theirs, directory, settings, tmp_path)


@pytest.mark.parametrize("base", ["gpt-oss"], indirect=True)
def test_adapters_of_other_parameters_are_not_continued(base, tmp_path) -> None:
    _, directory = base
    made = SETTINGS["both-rslora"]
    written(trained(directory, made), made, directory, tmp_path / "a")
    files, own = adapter.read(tmp_path / "a"), registry.build(read_config(directory))
    with pytest.raises(UserError, match=r"experts.base_layer.lora_A.weight is not part of it"):
        adapter.check(files, with_lora(own, replace(made, target_parameters=BOTH[1:])))
    config = json.loads((tmp_path / "a/adapter_config.json").read_text())
    assert (config["target_modules"], config["target_parameters"]) == ([], [*BOTH])
    (tmp_path / "a/adapter_config.json").write_text(json.dumps(config | {"target_parameters": "down_proj"}))
    with pytest.raises(UserError, match="target_parameters must be a list, not"):
        adapter.settings_of(adapter.read(tmp_path / "a"), own)


@pytest.mark.parametrize("base", [GLM], indirect=True)
def test_weights_are_targets_by_their_tensors_too(base, tmp_path) -> None:
    """Earlier versions of PEFT took their modules in target_modules."""
    _, directory = base
    _, made = WEIGHTS["glm-shared"]
    written(trained(directory, made), made, directory, tmp_path / "a")
    config = json.loads((tmp_path / "a/adapter_config.json").read_text())
    assert (config["target_modules"], config["target_parameters"]) == ([], [f"shared_experts.{DOWN}"])
    named = config | {"target_modules": ["shared_experts.down_proj"], "target_parameters": None}
    (tmp_path / "a/adapter_config.json").write_text(json.dumps(named))
    files, own = adapter.read(tmp_path / "a"), registry.build(read_config(directory))
    found = adapter.settings_of(files, own)
    assert found.target_modules == ()
    assert found.target_parameters == tuple(f"model.layers.{i}.mlp.shared_experts.{DOWN}" for i in (1, 2))
    adapter.check(files, with_lora(own, found))
