import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rptrain.models.params import CheckpointPart, Param, Unit
from rptrain.models.weights import pretrained
from rptrain.models.weights import safetensors_io as shards_module
from rptrain.utils.errors import UserError
from tests.models.conftest import stored_bytes

ARCHITECTURE = "Qwen3ForCausalLM"


@pytest.fixture
def saved(fresh, tmp_path):
    """A model and its checkpoint in several shards."""
    model = fresh(ARCHITECTURE)
    pretrained.save(tmp_path, model.spec, model.view, torch.float32, max_shard_bytes=8000)
    return model, tmp_path


def shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def same(ours, theirs, dtype: torch.dtype = torch.float32) -> bool:
    return all(
        torch.equal(tensor.to(dtype), theirs.view(index, name).to(dtype))
        for index, unit in enumerate(ours.params)
        for name, tensor in unit.items()
    )


@pytest.mark.sample(8)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("max_shard_bytes", [5e9, 8000, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_round_trip(dtype, max_shard_bytes, tied, fresh, tmp_path) -> None:
    model = fresh(ARCHITECTURE, dtype, tie_word_embeddings=tied)
    files = pretrained.save(tmp_path, model.spec, model.view, dtype, max_shard_bytes)
    assert stored_bytes(files) == model.spec.num_parameters * dtype.itemsize
    assert json.loads((tmp_path / "config.json").read_text()) == {
        **model.spec.config,
        "dtype": str(dtype).removeprefix("torch."),
    }
    with safe_open(shards(tmp_path)[0], framework="pt") as file:
        assert file.metadata() == {"format": "pt"}  # older readers refuse a file without it
    stored = {name: tensor for file in shards(tmp_path) for name, tensor in load_file(file).items()}
    assert ("lm_head.weight" in stored) != tied
    qkv = [stored[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv"]
    assert torch.equal(torch.cat(qkv), model.params[2]["qkv"])

    again = fresh(ARCHITECTURE, dtype, tie_word_embeddings=tied)
    for unit in again.params:
        for tensor in unit.values():
            tensor.fill_(float("nan"))
    pretrained.load(pretrained.check(tmp_path, again.spec), again.spec, again.view)
    assert same(model, again, dtype)


def test_shards_are_named_and_bounded(saved) -> None:
    _, directory = saved
    files = shards(directory)
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors" and len(files) > 2
    index = json.loads((directory / pretrained.INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(
        tensor.nbytes for file in files for tensor in load_file(file).values()
    )
    for file in files:
        tensors = load_file(file)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 8000 or len(tensors) == 1
        assert all(index["weight_map"][name] == file.name for name in tensors)


def test_one_file_beside_shards_is_read_with_a_warning(saved, caplog) -> None:
    model, directory = saved
    tensors = {name: tensor for file in shards(directory) for name, tensor in load_file(file).items()}
    assert pretrained.check(directory, model.spec) and not caplog.messages
    save_file(tensors, directory / pretrained.SINGLE)
    files = pretrained.check(directory, model.spec)
    assert {stored.file.name for stored in files.tensors.values()} == {pretrained.SINGLE}
    (said,) = caplog.messages
    assert said.startswith(f"{directory}: model.safetensors is read, as in transformers, and the files model-*-of-*.s")


def test_loading_converts_dtypes(saved, fresh) -> None:
    model, directory = saved
    narrow = fresh(ARCHITECTURE, torch.bfloat16)
    pretrained.load(pretrained.check(directory, narrow.spec), narrow.spec, narrow.view)
    assert same(model, narrow, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_loading_in_pieces(dtype, saved, fresh, monkeypatch) -> None:
    """That do not divide a tensor, whether straight into place or converted."""
    model, directory = saved
    again = fresh(ARCHITECTURE, dtype)
    for unit in again.params:
        for tensor in unit.values():
            tensor.fill_(float("nan"))
    monkeypatch.setattr(shards_module, "PIECE", 400)
    monkeypatch.setattr(shards_module, "CONVERTED", 28)
    pretrained.load(pretrained.check(directory, again.spec), again.spec, again.view)
    assert same(model, again, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shard_that_is_cut_short_or_gone_since_it_was_checked(dtype, saved, fresh) -> None:
    model, directory = saved
    again = fresh(ARCHITECTURE, dtype)
    files = pretrained.check(directory, model.spec)
    file = shards(directory)[1]
    whole = file.stat().st_size
    os.truncate(file, whole - 1)
    with pytest.raises(UserError, match=rf"{file.name} ends after {whole - 1} bytes"):
        pretrained.load(files, again.spec, again.view)
    file.unlink()
    with pytest.raises(UserError, match=f"cannot read .*{file.name}: No such file"):
        pretrained.load(files, again.spec, again.view)


@pytest.mark.sample(8)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 100, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_weight_that_is_no_number_is_found_when_it_is_loaded(dtype, at, value, fresh, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(pretrained, "CHECKED", 37)
    model = fresh(ARCHITECTURE, dtype)
    model.params[2]["qkv"].view(-1)[at] = value
    pretrained.save(tmp_path, model.spec, model.view, dtype)
    name = "model.layers.1.self_attn." + ("v_proj.weight" if at == -1 else "q_proj.weight")
    again = fresh(ARCHITECTURE, dtype)
    files = pretrained.check(tmp_path, again.spec)
    with pytest.raises(UserError, match=f"^{tmp_path}: {name} holds values that are infinite or not numbers"):
        pretrained.load(files, again.spec, again.view)
    pretrained.load(files, again.spec, again.view, [0, 1])


def test_a_weight_that_float16_cannot_hold(saved, fresh) -> None:
    _, directory = saved
    file = next(file for file in shards(directory) if "model.norm.weight" in load_file(file))
    save_file(load_file(file) | {"model.norm.weight": torch.full((24,), 1e5)}, file)
    narrow = fresh(ARCHITECTURE, torch.float16)
    with pytest.raises(UserError, match=r"model.norm.weight holds .* in float16: .* a model.dtype in which they fit"):
        pretrained.load(pretrained.check(directory, narrow.spec), narrow.spec, narrow.view)


def test_everything_that_does_not_fit_at_once(saved) -> None:
    model, directory = saved
    file = next(file for file in shards(directory) if "model.norm.weight" in load_file(file))
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.zeros(3)
    tensors["model.extra"] = torch.zeros(1)
    lost = next(name for name in tensors if "layers" in name)
    del tensors[lost]
    save_file(tensors, file)
    with pytest.raises(UserError) as caught:
        pretrained.check(directory, model.spec)
    message = str(caught.value)
    assert f"{lost} is missing" in message
    assert "model.extra is not part of the model" in message
    assert "model.norm.weight has shape [3], not [24]" in message


def test_a_tied_checkpoint_with_the_tensor_under_the_heads_name(fresh, tmp_path) -> None:
    model, again = (fresh(ARCHITECTURE, torch.float32, tie_word_embeddings=True) for _ in range(2))
    pretrained.save(tmp_path, model.spec, model.view, torch.float32)
    tensors = load_file(tmp_path / pretrained.SINGLE)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / pretrained.SINGLE)
    for tensor in again.params[0].values():
        tensor.zero_()
    pretrained.load(pretrained.check(tmp_path, again.spec), again.spec, again.view)
    assert same(again, model)


def renamed(directory: Path, name: Callable[[str], str], **more: torch.Tensor) -> None:
    """Gives the tensors of a checkpoint other names, and adds some."""
    file = directory / pretrained.SINGLE
    tensors = {name(key): tensor for key, tensor in load_file(file).items()}
    save_file(tensors | {key.replace("__", "."): tensor for key, tensor in more.items()}, file)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "name",
    [
        lambda name: name.removeprefix("model."),
        lambda name: f"model.{name}",
        lambda name: name.replace("lm_", "model.lm_"),
    ],
    ids=["without-prefix", "twice", "head-with-prefix"],
)
def test_names_that_transformers_accepts(name, tied, fresh, tmp_path) -> None:
    model, again = (fresh(ARCHITECTURE, torch.float32, tie_word_embeddings=tied) for _ in range(2))
    pretrained.save(tmp_path, model.spec, model.view, torch.float32)
    renamed(tmp_path, name)
    for unit in again.params:
        for tensor in unit.values():
            tensor.zero_()
    pretrained.load(pretrained.check(tmp_path, again.spec), again.spec, again.view)
    assert same(again, model)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (lambda name: f"module.{name}", "'module.', which a wrapper of the model added"),
        (lambda name: f"base_model.model.{name}", "'base_model.model.', which a wrapper"),
        (lambda name: f"inner.net.{name}", "'inner.net.', which a wrapper"),
        (lambda name: name.replace("0.mlp", "0._orig_mod.mlp"), "'_orig_mod.', which a wrapper"),
        (lambda name: name.replace("q_proj.weight", "q_proj.base_layer.weight"), "merge it into the model"),
    ],
    ids=["module", "peft", "other", "inside", "adapter"],
)
def test_names_of_wrappers_are_refused_in_a_line(name, words, fresh, tmp_path) -> None:
    model = fresh(ARCHITECTURE)
    pretrained.save(tmp_path, model.spec, model.view, torch.float32)
    renamed(tmp_path, name)
    with pytest.raises(UserError) as caught:
        pretrained.check(tmp_path, model.spec)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_tensors_outside_of_the_model_are_left_out(fresh, tmp_path, caplog) -> None:
    """With a warning, as in transformers, and in any type. Those inside of it are refused: they change its results."""
    model = fresh(ARCHITECTURE)
    pretrained.save(tmp_path, model.spec, model.view, torch.float32)
    names = pretrained.check(tmp_path, model.spec).tensors.keys()
    renamed(tmp_path, str, score__weight=torch.zeros(3, 24), steps=torch.tensor(5))
    assert pretrained.check(tmp_path, model.spec).tensors.keys() == names
    (said,) = caplog.messages
    assert all(text in said for text in ("score.weight", "steps", "left out"))
    for inside in ("model.layers.0.self_attn.q_proj.bias", "lm_head.bias", "layers.7.mlp.up_proj.weight"):
        renamed(tmp_path, str, **{inside: torch.zeros(24)})
        with pytest.raises(UserError, match=rf"{inside} is not part of the model(.*\n)*.*correct config\.json"):
            pretrained.check(tmp_path, model.spec)


def test_what_old_and_tied_checkpoints_also_hold_is_tolerated(fresh, tmp_path) -> None:
    model = fresh(ARCHITECTURE, tie_word_embeddings=True)
    pretrained.save(tmp_path, model.spec, model.view, torch.float32)
    tensors = load_file(tmp_path / pretrained.SINGLE)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    for name in ("layers.0.self_attn.rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.cos_cached", "position_ids"):
        tensors[f"model.{name}"] = torch.zeros(3, dtype=torch.int64)
    save_file(tensors, tmp_path / pretrained.SINGLE)
    assert "lm_head.weight" not in pretrained.check(tmp_path, model.spec).tensors


@pytest.mark.parametrize("left", [0, 5, 60, -4])
def test_a_shard_cut_short_is_named(left, saved) -> None:
    model, directory = saved
    file = shards(directory)[1]
    whole = file.read_bytes()
    file.write_bytes(whole[:left])
    with pytest.raises(UserError, match=file.name) as caught:
        pretrained.check(directory, model.spec)
    if left == -4:
        assert f"{len(whole)} bytes expected, {len(whole) - 4} there" in str(caught.value)


def entry(**changes) -> bytes:
    header = {"model.a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changes}}
    return json.dumps(header).encode()


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (b"{", "header is malformed"),
        (b"[]", "header is malformed"),
        (b'{"a": {}}', "header is malformed"),
        (entry(data_offsets=[0]), "header is malformed"),
        (entry(shape=None), "header is malformed"),
        (entry(dtype=3), "header is malformed"),
        (entry(dtype=["F32"]), "header is malformed"),
        (entry(shape=[1.5]), "header is malformed"),
        (entry(shape=[True]), "header is malformed"),
        (entry(shape=[math.inf]), "header is malformed"),
        (entry(shape="1"), "header is malformed"),
        (entry(data_offsets=[0, 4.5]), "header is malformed"),
        (entry(data_offsets=[0, math.inf]), "header is malformed"),
        (entry().replace(b"4", b"1e999"), "header is malformed"),
        (b"[" * 100_000, "header is malformed"),
        (b'{"a":' * 100_000, "header is malformed"),
        (entry()[:-1] + b"," + entry()[1:], "header is malformed: an object has the key 'model.a' twice"),
        (entry(shape=[2]), "does not fit its shape"),
        (entry(data_offsets=[4, 8]), "does not fit its shape"),
        (entry(dtype="F8_E4M3", shape=[4]), "stored as F8_E4M3"),
        (entry(dtype="F4", shape=[8]), "stored as F4"),
        (entry(dtype="F16", data_offsets=[0, 2]), "is damaged: .* expected, .* there"),
    ],
    ids=[
        *("cut", "list", "no-keys", "one-offset", "no-shape", "dtype-number", "dtype-list", "shape-fraction"),
        *("shape-bool", "shape-infinity", "shape-text", "offset-fraction", "offset-infinity", "offset-overflow"),
        *("deep-list", "deep-object", "same-key", "larger-shape", "outside", "fp8", "unknown-dtype", "file-too-long"),
    ],
)
def test_damaged_headers(header, problem, saved) -> None:
    model, directory = saved
    shards(directory)[0].write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
    with pytest.raises(UserError, match=problem):
        pretrained.check(directory, model.spec)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            b"version https://git-lfs.example/spec/v1\noid sha256:00\n",
            r"has not fetched; fetch it again \(git lfs pull\)",
        ),
        (b"<!DOCTYPE html><html></html>", "a web page; fetch it again"),
        (b"\n<html>", "a web page; fetch it again"),
        (b"", "it is empty; fetch it again"),
        (b"\xff" * 100, "file$"),
    ],
    ids=["git-lfs", "html", "short", "empty", "noise"],
)
def test_what_lies_there_in_place_of_a_shard(content, said, saved) -> None:
    model, directory = saved
    file = shards(directory)[0]
    file.write_bytes(content)
    with pytest.raises(UserError, match=rf"{file.name} is not a safetensors .*{said}"):
        pretrained.check(directory, model.spec)


def test_a_tensor_in_two_shards(saved) -> None:
    model, directory = saved
    first, second = shards(directory)[:2]
    tensors = load_file(first)
    save_file(load_file(second) | tensors, second)
    with pytest.raises(UserError, match=rf" is in both .*{first.name} and .*{second.name}: fetch") as caught:
        pretrained.check(directory, model.spec)
    assert any(str(caught.value).startswith(name) for name in tensors)


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        ({"weight_map": {"a": "../../secret.safetensors"}}, "outside its directory"),
        ({"weight_map": {"a": "/etc/passwd"}}, "outside its directory"),
        ({"weight_map": {"a": "gone.safetensors"}}, r"lacks 1 of 1 shards: gone\.safetensors"),
        ({"weight_map": {"a": 3}}, "no weight_map"),
        ({}, "no weight_map"),
    ],
)
def test_bad_indices(index, problem, saved) -> None:
    model, directory = saved
    (directory / pretrained.INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=problem):
        pretrained.check(directory, model.spec)


def test_no_weights(fresh, tmp_path) -> None:
    spec = fresh(ARCHITECTURE).spec
    with pytest.raises(UserError, match=r"neither model\.safetensors nor"):
        pretrained.check(tmp_path, spec)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(UserError, match="pickled"):
        pretrained.check(tmp_path, spec)


def test_saving_over_weights_is_refused(saved) -> None:
    model, directory = saved
    with pytest.raises(UserError, match="already holds weights"):
        pretrained.save(directory, model.spec, model.view, torch.float32)


def test_initialization_depends_on_seed_and_name_only(fresh, monkeypatch) -> None:
    model, again, other = fresh(ARCHITECTURE), fresh(ARCHITECTURE, num_hidden_layers=3), fresh(ARCHITECTURE)
    pretrained.initialize(model.spec, model.view, 7)
    pretrained.initialize(again.spec, again.view, 7)
    pretrained.initialize(other.spec, other.view, 8)
    for index in (0, 1, 2):
        for name, tensor in model.params[index].items():
            assert torch.equal(tensor, again.params[index][name])
            norm = name.endswith("norm")
            assert torch.equal(tensor, other.params[index][name]) == norm
            assert not norm or (tensor == 1).all()
    assert torch.equal(model.params[-1]["head"], again.params[-1]["head"])
    first, second = model.params[1]["gate_up"].split(20)
    assert not torch.equal(first, second)
    drawn = torch.cat([tensor.flatten() for unit in model.params for tensor in unit.values() if tensor.dim() > 1])
    assert drawn.mean().abs() < 0.02 and abs(drawn.std() - 0.3) < 0.01


def test_logarithms_of_uniform_numbers(fresh) -> None:
    spec, low, high, count = fresh(ARCHITECTURE).spec, 0.01, 16.0, 5000
    param = Param("a_log", (count,), (CheckpointPart("A_log", count),), log_uniform=(low, high))
    spec = replace(spec, units=(*spec.units, Unit("decay", (param,))))

    def drawn(seed):
        made = torch.zeros(count)
        pretrained.initialize(spec, lambda unit, name: made, seed, [len(spec.units) - 1])
        return made

    values = drawn(3).double().exp().sort().values
    assert low <= values[0] and values[-1] <= high
    assert (values - torch.linspace(low, high, count, dtype=torch.float64)).abs().max() < 0.4, "uniform"
    assert torch.equal(drawn(3), drawn(3)) and not torch.equal(drawn(3), drawn(4))


def in_one_file(directory: Path, to: Path, tensors) -> Path:
    """The checkpoint's config with these tensors."""
    to.mkdir()
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, to / "model.safetensors")
    (to / "config.json").write_text((directory / "config.json").read_text())
    return to


@pytest.mark.parametrize("checkpoint", ["qwen3-moe", "qwen3-moe-some-dense"], indirect=True)
def test_experts_in_one_tensor_are_those_in_many(checkpoint, native, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    model, directory = checkpoint
    held = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    held |= {} if model.config.tie_word_embeddings else {"lm_head.weight": model.lm_head.weight}
    at = "model.layers.1.mlp.experts"
    assert held[f"{at}.gate_up_proj"].shape == (5, 14, 24) and held[f"{at}.down_proj"].shape == (5, 24, 7)
    stacked = in_one_file(directory, tmp_path / "stacked", held)
    ours, theirs = native(stacked), native(directory)
    assert same(ours, theirs)
    pretrained.save(tmp_path / "saved", ours.spec, ours.view, torch.float32)
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(torch.equal(tensor, held[name]) for name, tensor in again.state_dict().items() if name in held)


@pytest.mark.parametrize("checkpoint", ["qwen3-moe"], indirect=True)
def test_stacked_experts_that_do_not_fit_are_named(checkpoint, native, tmp_path) -> None:
    model, directory = checkpoint
    at = "model.layers.1.mlp.experts"
    turned = model.state_dict() | {f"{at}.down_proj": torch.zeros(5, 7, 24)}
    with pytest.raises(UserError, match=rf"{at}.down_proj has shape \[5, 7, 24\], not \[5, 24, 7\]"):
        native(in_one_file(directory, tmp_path / "turned", turned))
    both = model.state_dict() | {f"{at}.3.down_proj.weight": torch.zeros(24, 7)}
    with pytest.raises(UserError, match=rf"{at}.0.down_proj.weight is missing"):
        native(in_one_file(directory, tmp_path / "both", both))
