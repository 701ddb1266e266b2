"""Qwen3.5 with its vision tower and its layer for multi-token prediction: both classes, and what stays as it is."""

import json
import shutil
import signal
from collections.abc import Mapping
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rptrain.checkpoint.export import export
from rptrain.inference.model import find_model
from rptrain.models.families import registry
from rptrain.models.locate import read_config
from rptrain.models.weights import pretrained
from rptrain.runs.records import events

from .. import run_tools as tools
from ..families import FAMILIES
from .test_run_exports import our_logits
from .test_text_towers import IDS, same_logits, tensors

pytestmark = pytest.mark.long
INSIDE = "model.language_model."
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_heads": 2,
    "patch_size": 4,
    "num_position_embeddings": 16,
}
CLASSES = {"qwen3_5_text": ("Qwen3_5Config", "qwen3_5"), "qwen3_5_moe_text": ("Qwen3_5MoeConfig", "qwen3_5_moe")}


def write_tower(folder: Path, kind: str, *, tied: bool) -> None:
    """A model as it is published: the experts of a layer in one tensor, and a layer for multi-token prediction."""
    import transformers

    settings = {**FAMILIES[kind].run, "tie_word_embeddings": tied, "model_type": kind}
    tools.write_model(folder, architectures=[registry.MODEL_TYPES[kind]], **settings)
    text = read_config(folder)
    name, _ = CLASSES[kind]
    vision = {**VISION, "out_hidden_size": text["hidden_size"]}
    config = getattr(transformers, name)(text_config=text, vision_config=vision, tie_word_embeddings=tied)
    torch.manual_seed(3)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    stored = stacked(tensors(folder))
    hidden = text["hidden_size"]
    stored |= {
        "mtp.fc.weight": torch.randn(hidden, 2 * hidden).bfloat16(),
        "mtp.layers.0.input_layernorm.weight": torch.randn(hidden),
        "mtp.norm.weight": torch.full((hidden,), torch.nan),  # its bytes are copied, whatever they are
    }
    save_file(stored, folder / "model.safetensors")
    (folder / "preprocessor_config.json").write_text("{}")


def stacked(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with those of a layer's experts in one."""
    found, experts = dict[str, Tensor](), dict[str, list[Tensor]]()
    for name, tensor in sorted(stored.items()):
        at, _, rest = name.partition(".experts.")
        if not rest:
            found[name] = tensor
        elif rest.endswith("gate_proj.weight"):
            up = stored[name.replace("gate_proj", "up_proj")]
            experts.setdefault(f"{at}.experts.gate_up_proj", []).append(torch.cat([tensor, up]))
        elif rest.endswith("down_proj.weight"):
            experts.setdefault(f"{at}.experts.down_proj", []).append(tensor)
    return found | {name: torch.stack(matrices) for name, matrices in experts.items()}


@pytest.fixture(scope="module", params=["qwen3_5_text", "qwen3_5_moe_text"])
def source(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tower") / "model"
    write_tower(folder, request.param, tied=request.param == "qwen3_5_text")
    return folder


@pytest.fixture
def folder(source, tmp_path) -> Path:
    (tmp_path / "model").symlink_to(source)
    return tmp_path


def others(directory: Path) -> dict[str, bytes]:
    """The bytes of the tensors outside of the text model, by name."""
    found = {name: tensor for name, tensor in tensors(directory).items() if name.startswith(("mtp.", "model.visual."))}
    assert {name.partition(".")[0] for name in found} == {"mtp", "model"}
    return {name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in found.items()}


def theirs(directory: Path, kind: str):
    import transformers

    model, info = getattr(transformers, kind).from_pretrained(directory, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    model.set_experts_implementation("eager")
    return model.eval()


def test_trained_resumed_and_exported(folder) -> None:
    same_logits(theirs(folder / "model", "AutoModelForImageTextToText"), folder / "model")
    run = tools.train_here(folder, "train.max_steps=2")
    again = tools.train_here(folder, "train.max_steps=3", f"save.resume={run.checkpoints()[-1]}")
    exported = export(again.path, folder / "exported", "bfloat16")
    before = tensors(folder / "model")
    for directory in (again.model_path, exported):
        assert others(directory) == others(folder / "model")
        assert stacked(tensors(directory)).keys() == before.keys()
        model = theirs(directory, "AutoModelForImageTextToText")
        assert model.config.architectures == read_config(folder / "model")["architectures"]
    same_logits(theirs(again.model_path, "AutoModelForImageTextToText"), again.model_path)
    after = tensors(again.model_path)
    for name in ("norm.weight", "layers.0.linear_attn.A_log", "layers.0.linear_attn.dt_bias"):
        assert not torch.equal(after[INSIDE + name], before[INSIDE + name]), name


@pytest.mark.parametrize("update", ["async", "sync"])
def test_killed_and_resumed(folder, trainers, update) -> None:
    """On another number of workers; the decay's parameters and their moments go on in float32."""
    kind = (f"optim.update={update}", "model.dtype=bfloat16", "train.max_steps=4", "save.save_steps=2")
    assert trainers.train(folder, *kind, "engine.devices=cpu:1", event=3) == -signal.SIGKILL
    run = tools.train_here(folder, *kind)
    assert [event.step for event in tools.events(run, events.Resumed)] == [2]
    whole = tools.train_here(folder, *kind, "log.run_name=whole")
    assert tools.steps(run) == tools.steps(whole)
    assert tools.state(run) == tools.state(whole)


def test_exports_keep_the_types_of_the_decay(source, tmp_path) -> None:
    """As published: everything in 16 bits but A_log and the norms of delta nets, of which the latter are trained so."""
    shutil.copytree(source, tmp_path / "model")
    wide = ("A_log", "linear_attn.norm.weight")
    stored = {name: tensor if name.endswith(wide) else tensor.bfloat16() for name, tensor in tensors(source).items()}
    save_file(stored, tmp_path / "model/model.safetensors")
    run = tools.train_here(tmp_path, "train.max_steps=1", "model.dtype=bfloat16")
    after = stacked(tensors(run.model_path))
    narrowed = {name for name, tensor in stored.items() if after[name].dtype != tensor.dtype}
    assert narrowed == {name for name in stored if name.endswith(wide[1])}
    assert others(run.model_path) == others(tmp_path / "model")


def test_the_files_of_the_whole_model_as_the_text_model(folder) -> None:
    """Under the class of the text model, as transformers saves it if it was loaded from the whole one."""
    whole = folder / "model"
    (folder / "text").mkdir()
    text = registry.text_only(read_config(whole))
    (folder / "text/config.json").write_text(json.dumps(text))
    (folder / "text/model.safetensors").symlink_to(whole / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / "text" / name).symlink_to(whole / name)
    assert torch.equal(our_logits(folder / "text", IDS), our_logits(whole, IDS))
    run = tools.train_here(folder, f"model.path={folder}/text", "train.max_steps=1", "model.follow_links=true")
    assert others(run.model_path) == others(whole)
    same_logits(theirs(run.model_path, "AutoModelForCausalLM"), run.model_path)


def test_it_answers_in_the_type_of_its_text_model(folder) -> None:
    """As published: the whole config names no type, and a file may begin with a tensor in float32."""
    described = json.loads((folder / "model/config.json").read_text())
    del described["dtype"]
    described["text_config"]["dtype"] = "bfloat16"
    (folder / "published").mkdir()
    (folder / "published/config.json").write_text(json.dumps(described))
    (folder / "published/model.safetensors").symlink_to(folder / "model/model.safetensors")
    assert find_model(folder / "published").dtype == torch.bfloat16


def test_an_adapter_is_of_the_text_model_only(folder) -> None:
    from peft import PeftModel

    run = tools.train_here(folder, "lora.r=2", "optim.learning_rate=3e-2")
    model = PeftModel.from_pretrained(theirs(folder / "model", "AutoModelForImageTextToText"), run.model_path)
    adapted = [name for name, _ in model.named_parameters() if "lora_A" in name]
    assert adapted and all(".language_model." in name for name in adapted)
    merged = export(run.path, folder / "merged", merge=True)
    assert others(merged) == others(folder / "model")
    same_logits(model, merged)


@pytest.mark.parametrize("head", ["none", "equal", "different"])
def test_a_head_is_tied_as_in_transformers(head, tmp_path) -> None:
    """By the setting of the whole config, of text_config (None: missing), and the head in the files."""
    from transformers import AutoModelForImageTextToText

    write_tower(tmp_path / "model", "qwen3_5_text", tied=True)
    described = json.loads((tmp_path / "model/config.json").read_text())
    stored = load_file(tmp_path / "model/model.safetensors")
    embedding = stored[f"{INSIDE}embed_tokens.weight"]
    if head != "none":
        stored |= {"lm_head.weight": embedding + (head == "different")}
    save_file(stored, tmp_path / "model.safetensors")
    for whole, text in product((None, True, False), repeat=2):
        config: dict[str, Any] = deepcopy(described)
        for part, tied in ((config, whole), (config["text_config"], text)):
            del part["tie_word_embeddings"]
            part |= {} if tied is None else {"tie_word_embeddings": tied}
        (tmp_path / "config.json").write_text(json.dumps(config))
        spec = registry.build(registry.model_config(tmp_path))
        model, info = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
        assert spec.tied == (model.lm_head.weight is model.get_input_embeddings().weight), (whole, text)
        assert not info["unexpected_keys"]
        assert bool(info["missing_keys"]) == (pretrained.TIED_HEAD in info["missing_keys"])
