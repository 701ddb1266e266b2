"""Whole runs with units in a type of their own: resumed, exported in the types of the model's files, asked."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from rptrain.checkpoint.consistent import read_model
from rptrain.checkpoint.export import export
from rptrain.checkpoint.state import dtype_of
from rptrain.models.weights.pretrained import stored_bytes

from .. import own_types
from .. import run_tools as tools
from ..cases import long

BF16 = ("model.dtype=bfloat16", "train.max_steps=4", "save.save_steps=2")
SINKS = [f"model.layers.{layer}.self_attn.sinks" for layer in range(2)]
OTHERS = 'train.freeze=["*_proj*","*norm*","*router*","*embed*","lm_head*"]'
LORA = "lora.r=2"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model in bfloat16, except for the sinks of its first layer."""
    own_types.use_own_sinks(monkeypatch)
    kind = {"model_type": "gpt_oss", "architectures": [own_types.SINKS], "attention_bias": True}
    sizes = {"tie_word_embeddings": False, "num_hidden_layers": 2, "num_local_experts": 3, "num_experts_per_tok": 2}
    file = tools.write_model(tmp_path / "model", **kind, **sizes) / "model.safetensors"
    tensors = load_file(file)
    save_file({name: w if name == SINKS[0] else w.bfloat16() for name, w in tensors.items()}, file, {"format": "pt"})
    return tmp_path


def types(directory):
    tensors = load_file(directory / "model.safetensors")
    assert {tensor.dtype for name, tensor in tensors.items() if name not in SINKS} == {tensors["lm_head.weight"].dtype}
    return [str(tensors[name].dtype).removeprefix("torch.") for name in ("lm_head.weight", *SINKS)]


@pytest.mark.parametrize(("update", "more"), [("async", ()), long("sync", (OTHERS,))], ids=["all", "only"])
def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(folder, update, more):
    kind = (*BF16, f"optim.update={update}", *more)
    run = tools.train_here(folder, *kind)
    again = tools.train_here(folder, *kind, f"save.resume={run.checkpoint_path(2)}", "engine.devices=cpu:1")
    assert again.path != run.path
    assert tools.state(again) == tools.state(run)
    state, spec = read_model(run.checkpoint_path(4))
    assert dtype_of(state) == torch.bfloat16
    stored = {unit["param"]["dtype"] for name, unit in state["units"].items() if name.endswith(".sinks.safetensors")}
    assert stored == {"F32"} and spec.narrow == (SINKS[1],)


def test_exports_have_the_types_of_the_models_files(folder):
    run = tools.train_here(folder, *BF16)
    assert types(run.model_path) == ["bfloat16", "float32", "bfloat16"]
    same = export(run.path, folder / "same")
    assert (same / "model.safetensors").read_bytes() == (run.model_path / "model.safetensors").read_bytes()
    assert types(export(run.path, folder / "half", "float16")) == ["float16", "float32", "float16"]
    wide = export(run.path, folder / "wide", "float32")
    assert types(wide) == ["float32"] * 3
    _, spec = read_model(run.checkpoint_path(4))
    for directory, dtype in ((same, torch.bfloat16), (wide, torch.float32)):
        written = load_file(directory / "model.safetensors").values()
        assert stored_bytes(spec, dtype) == sum(tensor.nbytes for tensor in written)
    ours, exact, before = (load_file(path / "model.safetensors") for path in (same, wide, folder / "model"))
    assert torch.equal(ours[SINKS[0]], exact[SINKS[0]])
    assert not torch.equal(ours[SINKS[1]].float(), exact[SINKS[1]]), "it is trained in float32"
    assert torch.equal(ours[SINKS[1]], exact[SINKS[1]].bfloat16())
    assert all((exact[name] - before[name]).abs().max() > 1e-3 for name in SINKS)
    again = tools.train_here(folder, *BF16, f"save.resume={run.checkpoint_path(4)}", "train.max_steps=5")
    assert types(again.model_path) == ["bfloat16", "float32", "bfloat16"]


@pytest.mark.long
def test_exports_of_a_run_from_random_weights_have_their_own_types(folder):
    run = tools.train_here(folder, *BF16, "model.init=random")
    assert types(run.model_path) == ["bfloat16", "float32", "float32"]
    asked = (["a", "bc"], 5, 0.0, 0, True)
    assert tools.generated(run.checkpoint_path(4), *asked) == tools.generated(run.model_path, *asked)


@pytest.mark.long
def test_a_frozen_base_keeps_them(folder):
    run = tools.train_here(folder, *BF16, LORA)
    merged, before = export(run.path, folder / "merged", merge=True), load_file(folder / "model/model.safetensors")
    assert types(merged) == ["bfloat16", "float32", "bfloat16"]
    after = load_file(merged / "model.safetensors")
    assert all(torch.equal(after[name], before[name]) for name in SINKS)
    answers = tools.generated(run.path, ["a"], 3, 0.0, 0, True)
    assert answers == tools.generated(run.checkpoint_path(4), ["a"], 3, 0.0, 0, True)
