"""Text models inside larger ones go through training, resuming and export, and their other parts stay as they are."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rptrain.checkpoint.export import export
from rptrain.models import registry
from rptrain.models.weights import pretrained

from .. import run_tools as tools
from .test_run_exports import our_logits

TEXT = {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3", "tie_word_embeddings": False}
GROWING = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
TEXT |= {"rope_parameters": {**GROWING, "llama_4_scaling_beta": 0.4}}
VISION = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "image_size": 16,
}


@pytest.fixture(scope="module", params=[False, True], ids=["apart", "tied"])
def source(request, tmp_path_factory) -> Path:
    """A directory whose model has a text model and a vision tower, as transformers saves it."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    folder = tmp_path_factory.mktemp("tower") / "model"
    tools.write_model(folder, **TEXT)
    text = registry.read_config(folder)
    config = Mistral3Config(text_config=text, vision_config=VISION, tie_word_embeddings=request.param)
    torch.manual_seed(3)
    model = Mistral3ForConditionalGeneration(config)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    described = json.loads((folder / "config.json").read_text())
    described["text_config"]["tie_word_embeddings"] = request.param
    (folder / "config.json").write_text(json.dumps(described))
    return folder


@pytest.fixture
def folder(source, tmp_path) -> Path:
    (tmp_path / "model").symlink_to(source)
    return tmp_path


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def others(directory: Path) -> dict[str, bytes]:
    """The bytes of the tensors outside of the text model, by name."""
    found = {name: tensor for name, tensor in tensors(directory).items() if "language_model" not in name}
    return {name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in found.items()}


def theirs(directory: Path):
    from transformers import Mistral3ForConditionalGeneration

    model, info = Mistral3ForConditionalGeneration.from_pretrained(directory, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


IDS = torch.arange(1, 20)


def same_logits(model, directory: Path) -> None:
    with torch.no_grad():
        logits = model(IDS[None]).logits[0]
    assert logits.std() > 0.1
    torch.testing.assert_close(our_logits(directory, IDS), logits, rtol=1e-4, atol=1e-4)


def test_trained_resumed_and_exported(folder) -> None:
    same_logits(theirs(folder / "model"), folder / "model")
    run = tools.train_here(folder, "train.max_steps=2")
    again = tools.train_here(folder, "train.max_steps=3", f"save.resume={run.checkpoints()[-1]}")
    exported = export(again.path, folder / "exported", "bfloat16")
    for directory in (again.model_path, exported):
        assert others(directory) == others(folder / "model")
        assert tensors(directory).keys() == tensors(folder / "model").keys()
        model = theirs(directory)
        assert model.config.architectures == ["Mistral3ForConditionalGeneration"]
    same_logits(theirs(again.model_path), again.model_path)
    before, after = (tensors(path)["language_model.model.norm.weight"] for path in (folder / "model", again.model_path))
    assert not torch.equal(before, after)
    assert "pixel" not in tools.generated(again.path, ["Sort the digits: 41"], 4, 0.0, 0, raw=False)[0]


def test_both_names_of_the_text_model_are_read(folder) -> None:
    other = folder / "other"
    other.mkdir()
    names = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."}

    def renamed(name: str) -> str:
        return next(
            (new + name.removeprefix(old) for old, new in names.items() if name.startswith(old)), f"model.{name}"
        )

    stored = tensors(folder / "model")
    save_file({renamed(name): tensor for name, tensor in stored.items()}, other / "model.safetensors")
    (other / "config.json").write_text((folder / "model/config.json").read_text())
    assert torch.equal(our_logits(other, IDS), our_logits(folder / "model", IDS))
    files = pretrained.check(other, registry.build(registry.read_config(other)))
    assert {*files.carried} == {renamed(name) for name in others(folder / "model")}


def test_an_adapter_is_of_the_text_model_only(folder) -> None:
    """The vision tower has modules of the same names, which get no adapter."""
    from peft import PeftModel

    run = tools.train_here(folder, "lora.r=2", "optim.learning_rate=3e-2")
    model = PeftModel.from_pretrained(theirs(folder / "model"), run.model_path)
    adapted = [name for name, _ in model.named_parameters() if "lora_A" in name]
    assert adapted and all(".language_model." in name for name in adapted)
    merged = export(run.path, folder / "merged", merge=True)
    assert others(merged) == others(folder / "model")
    same_logits(model, merged)


def test_a_run_without_weights_exports_the_text_model(folder) -> None:
    from transformers import AutoModelForCausalLM

    run = tools.train_here(folder, "train.max_steps=2", "model.init=random")
    again = tools.train_here(folder, "train.max_steps=3", "model.init=random", f"save.resume={run.checkpoints()[-1]}")
    for directory in (again.model_path, export(again.path, folder / "exported")):
        model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
        assert type(model).__name__ == "Ministral3ForCausalLM"
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        same_logits(model.eval(), directory)
