"""Text models inside larger ones go through training, resuming and export, and their other parts stay as they are."""

import json
import shutil
from collections.abc import Mapping
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rptrain.checkpoint.export import export
from rptrain.models.families import registry
from rptrain.models.locate import read_config
from rptrain.models.weights import pretrained
from rptrain.preflight.checks import run_checks
from rptrain.preflight.model import training_model
from rptrain.utils.errors import UserError

from .. import run_tools as tools
from .test_run_exports import our_logits

TEXT = {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3", "tie_word_embeddings": False}
SCALED_QUERIES = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
TEXT |= {"rope_parameters": {**SCALED_QUERIES, "llama_4_scaling_beta": 0.4}}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "tie_word_embeddings": False}
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


HEAD, EMBEDDING = "language_model.lm_head.weight", "language_model.model.embed_tokens.weight"


def write_tower(folder: Path, text: Mapping[str, Any], tied: bool, max_shard_size: str = "1GB") -> None:
    """A model with this text model and a vision tower, as transformers saves it."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    tools.write_model(folder, **text)
    config = Mistral3Config(text_config=read_config(folder), vision_config=VISION, tie_word_embeddings=tied)
    torch.manual_seed(3)
    model = Mistral3ForConditionalGeneration(config)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size=max_shard_size)


@pytest.fixture(scope="module")
def tower(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tower") / "model"
    write_tower(folder, TEXT, False)
    return folder


@pytest.fixture(scope="module", params=["apart", "tied", "shards"])
def source(request, tmp_path_factory) -> Path:
    """A directory whose model has a text model and a vision tower, as transformers saves it, and with "shards" as
    Mistral Small is published: the head is apart, and the config does not say so.
    """
    folder = tmp_path_factory.mktemp("tower") / "model"
    tied, shards = request.param == "tied", request.param == "shards"
    write_tower(folder, MISTRAL if shards else TEXT, tied, "20KB" if shards else "1GB")
    assert len([*folder.glob("*.safetensors")]) == (3 if shards else 1)
    described = json.loads((folder / "config.json").read_text())
    if shards:
        del described["text_config"]["tie_word_embeddings"], described["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(described))
    (folder / "preprocessor_config.json").write_text("{}")
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


@pytest.mark.sample(1, gate=3)
def test_trained_resumed_and_exported(folder) -> None:
    same_logits(theirs(folder / "model"), folder / "model")
    run = tools.train_here(folder, "train.max_steps=2")
    again = tools.train_here(folder, "train.max_steps=3", f"save.resume={run.checkpoints()[-1]}")
    exported = export(again.path, folder / "exported", "bfloat16")
    for directory in (again.model_path, exported):
        assert others(directory) == others(folder / "model")
        assert tensors(directory).keys() == tensors(folder / "model").keys()
        assert (directory / "preprocessor_config.json").exists()
        described = read_config(directory)
        assert described["tie_word_embeddings"] == described["text_config"]["tie_word_embeddings"]
        model = theirs(directory)
        assert model.config.architectures == ["Mistral3ForConditionalGeneration"]
    same_logits(theirs(again.model_path), again.model_path)
    before, after = (tensors(path)["language_model.model.norm.weight"] for path in (folder / "model", again.model_path))
    assert not torch.equal(before, after)


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
    files = pretrained.check(other, registry.build(registry.model_config(other)))
    assert {*files.carried} == {renamed(name) for name in others(folder / "model")}


@pytest.mark.sample(1, gate=3)
def test_an_adapter_is_of_the_text_model_only(folder) -> None:
    """The vision tower has modules of the same names, which get no adapter."""
    from peft import PeftModel

    run = tools.train_here(folder, "lora.r=2", "optim.learning_rate=3e-2")
    assert not (run.model_path / "preprocessor_config.json").exists()
    model = PeftModel.from_pretrained(theirs(folder / "model"), run.model_path)
    adapted = [name for name, _ in model.named_parameters() if "lora_A" in name]
    assert adapted and all(".language_model." in name for name in adapted)
    merged = export(run.path, folder / "merged", merge=True)
    assert others(merged) == others(folder / "model")
    same_logits(model, merged)


@pytest.mark.sample(1, gate=3)
def test_a_run_without_weights_exports_the_text_model(folder) -> None:
    from transformers import AutoModelForCausalLM

    run = tools.train_here(folder, "train.max_steps=2", "model.init=random")
    again = tools.train_here(folder, "train.max_steps=3", "model.init=random", f"save.resume={run.checkpoints()[-1]}")
    for directory in (again.model_path, export(again.path, folder / "exported")):
        model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
        assert type(model).__name__ in ("Ministral3ForCausalLM", "MistralForCausalLM")
        assert not (directory / "preprocessor_config.json").exists()
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        same_logits(model.eval(), directory)


@pytest.mark.sample(2, gate=6)
@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_a_quantized_base_leaves_the_other_parts_alone(folder, base) -> None:
    run = tools.train_here(folder, "lora.r=2", f"lora.base={base}")
    assert others(export(run.path, folder / "merged", merge=True)) == others(folder / "model")


def test_frozen_and_file_backed_weights_by_both_names(folder) -> None:
    names = '["language_model.model.embed_tokens.weight", "model.language_model.layers.0.*"]'
    run = tools.train_here(folder, f"train.freeze={names}", "model.hold=map")
    before, after = tensors(folder / "model"), tensors(run.model_path)
    kept = {name for name, tensor in before.items() if torch.equal(tensor, after[name])}
    assert {name for name in before if ".layers.0." in name or "embed" in name} <= kept
    assert others(run.model_path) == others(folder / "model")
    assert "language_model.model.norm.weight" not in kept


@pytest.mark.sample(2, gate=4)
@pytest.mark.parametrize("kind", ["none", "equal", "different", "last-row-differs"])
def test_a_head_is_tied_as_in_transformers(kind, tower, tmp_path, monkeypatch) -> None:
    """By the setting of the whole config, of text_config (None: missing), and the head in the files."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    monkeypatch.setattr(pretrained, "CHECKED", 100)  # numbers compared at a time
    stored, described = tensors(tower), json.loads((tower / "config.json").read_text())
    embedding = stored[EMBEDDING]
    heads = {"equal": embedding, "different": embedding + 1, "last-row-differs": embedding.clone()}
    heads["last-row-differs"][-1, -1] += 1
    head = {HEAD: heads[kind].clone()} if kind != "none" else {}
    save_file({name: tensor for name, tensor in stored.items() if name != HEAD} | head, tmp_path / "model.safetensors")

    for whole, text in product((None, True, False), repeat=2):
        config = deepcopy(described)
        for part, tied in ((config, whole), (config["text_config"], text)):
            del part["tie_word_embeddings"]
            part |= {} if tied is None else {"tie_word_embeddings": tied}
        (tmp_path / "config.json").write_text(json.dumps(config))
        spec = registry.build(registry.model_config(tmp_path))
        model, info = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
        assert spec.tied == (model.lm_head.weight is model.get_input_embeddings().weight)
        if missing := info["missing_keys"]:
            assert missing == {pretrained.TIED_HEAD}
            with pytest.raises(UserError, match=r"lm_head\.weight is missing"):
                pretrained.check(tmp_path, spec)
        else:
            pretrained.check(tmp_path, spec)
        random = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(tmp_path))
        assert registry.build(registry.text_only(config)).tied == random.config.tie_word_embeddings
        assert (random.lm_head.weight is random.get_input_embeddings().weight) == random.config.tie_word_embeddings


@pytest.mark.parametrize("files", [1, 2])
def test_a_tensor_under_both_names_is_refused(files, tower, tmp_path) -> None:
    again = {"lm_head.weight": tensors(tower)[HEAD]}
    if files == 1:
        save_file(tensors(tower) | again, tmp_path / "model.safetensors")
        said = f"{HEAD} and lm_head.weight in {tmp_path}/model.safetensors are the same tensor of the model"
    else:
        save_file(tensors(tower), tmp_path / "a.safetensors")
        save_file(again, tmp_path / "b.safetensors")
        names = {"a": "a.safetensors", "b": "b.safetensors"}
        (tmp_path / pretrained.INDEX).write_text(json.dumps({"weight_map": names}))
        said = f"{HEAD} in {tmp_path}/a.safetensors and lm_head.weight in {tmp_path}/b.safetensors are the same tensor"
    spec = registry.build(registry.model_config(tower))
    with pytest.raises(UserError) as caught:
        pretrained.check(tmp_path, spec)
    assert said in str(caught.value)


def test_a_missing_shard_is_refused_after_the_plan(tower, tmp_path) -> None:
    shutil.copytree(tower, tmp_path / "model")
    stored = [*tensors(tower)]
    names = {name: f"model-0000{1 + (name == EMBEDDING)}-of-00002.safetensors" for name in stored}
    (tmp_path / "model/model.safetensors").rename(tmp_path / "model/model-00001-of-00002.safetensors")
    (tmp_path / "model" / pretrained.INDEX).write_text(json.dumps({"weight_map": names}))
    tools.write_config(tmp_path)
    shown = tools.invoke("plan", "--config", tmp_path / "run.toml")
    assert shown.exit_code == 2
    plan, refusal = shown.output.split("The run cannot start: ")
    assert "exported model" in plan
    assert "lacks 1 of 2 shards: model-00002-of-00002.safetensors" in " ".join(refusal.split())


def test_a_plan_of_a_resumed_run_names_missing_weights(source, tmp_path) -> None:
    shutil.copytree(source, tmp_path / "model")
    run = tools.train_here(tmp_path, "train.max_steps=2")
    for file in (tmp_path / "model").glob("*.safetensors"):
        file.unlink()
    resolved = tools.write_config(tmp_path, "train.max_steps=3", f"save.resume={run.checkpoints()[-1]}")
    refusals = run_checks(resolved, resolved.config, *training_model(resolved.config)).refusals
    assert [refusal.key for refusal in refusals] == ["model.path"] and "safetensors" in refusals[0].message
