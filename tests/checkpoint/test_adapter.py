"""Adapters in PEFT's files: stock PEFT loads what is written, what PEFT writes is continued, and damage is found."""

import json
import logging
import re
import tomllib
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from rptrain.checkpoint import adapter
from rptrain.checkpoint.adapter import Adapter, check, read
from rptrain.checkpoint.atomic_dir import written_aside
from rptrain.checkpoint.export import ModelInMemory, export_store
from rptrain.checkpoint.verify import verify_adapter
from rptrain.models.families import registry
from rptrain.models.locate import read_config
from rptrain.models.transforms.lora import LoRA, adapter_units, merged, with_lora, without_adapters
from rptrain.models.weights import pretrained, safetensors_io
from rptrain.utils.errors import UserError
from tests.families import VARIANTS
from tests.models.conftest import COMMON, Native, make_micro_batch
from tests.models.transforms.test_lora import IDS, in_peft

SETTINGS = {
    "all-linear": LoRA(r=4, lora_alpha=8, lora_dropout=0.1),
    "rank-one-rslora": LoRA(r=1, lora_alpha=3, use_rslora=True),
    "some": LoRA(r=5, target_modules=("k_proj", "o_proj")),
    "pattern": LoRA(r=3, target_modules=r".*\.1\.self_attn\.[qv]_proj"),
    "dora": LoRA(r=3, lora_alpha=6, use_dora=True, modules_to_save=("embed_tokens",)),
    "trained-whole": LoRA(modules_to_save=("embed_tokens", "model.norm", "1.input_layernorm")),
}


@pytest.fixture(scope="session", params=["llama", "llama-tied", "qwen3", "qwen3-moe-some-dense", "gpt-oss"])
def base(request, tmp_path_factory):
    """A tiny random Hugging Face model and its directory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    sizes = {**COMMON, **VARIANTS[request.param]}
    config = AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    model.set_experts_implementation("eager")
    directory = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(directory)
    return model.eval(), directory


llama = pytest.mark.parametrize("base", ["llama"], indirect=True)


def trained(directory, settings: LoRA) -> Native:
    """The model in a directory, with random numbers in all that is trained."""
    spec = with_lora(registry.build(read_config(directory)), settings)
    own = without_adapters(spec)
    model = Native(spec, torch.float32)
    pretrained.load(pretrained.check(directory, own), own, model.view)
    generator = torch.Generator().manual_seed(2)
    for unit, params in zip(spec.units, model.params, strict=True):
        for tensor in params.values() if unit.trainable else ():
            tensor.uniform_(-0.2, 0.2, generator=generator)
    return model


def written(model: Native, settings: LoRA, directory, to) -> Adapter:
    made = Adapter(settings, str(directory))
    with written_aside(to, {"kind": "export"}, 0) as aside:
        adapter.write(aside, model.spec, model.view, made, torch.float32)
    verify_adapter(to, model.spec, made)
    return made


@pytest.mark.sample(10)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_peft_loads_what_is_written(base, settings, tmp_path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    _, directory = base
    ours = trained(directory, settings)
    written(ours, settings, directory, tmp_path / "adapter")

    def fresh():
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
        model.set_experts_implementation("eager")
        return model.eval()

    theirs = PeftModel.from_pretrained(fresh(), tmp_path / "adapter").eval()
    assert theirs.active_peft_config.base_model_name_or_path == str(directory)
    mb = make_micro_batch(ours.spec, [[11], [11]])
    expected = theirs(IDS.view(2, 11)).logits.flatten(0, 1)
    torch.testing.assert_close(ours.logits(IDS, mb), expected, rtol=1e-5, atol=1e-5)

    config = LoraConfig.from_pretrained(tmp_path / "adapter")
    again = get_peft_model(fresh(), config)
    found = set_peft_model_state_dict(again, load_file(tmp_path / "adapter/adapter_model.safetensors"))
    known = {name for name, parameter in again.named_parameters() if parameter.requires_grad}
    assert not found.unexpected_keys and not known & {*found.missing_keys}


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    "settings",
    [LoRA(r=3, lora_alpha=9), LoRA(r=3, lora_alpha=9, use_dora=True), SETTINGS["trained-whole"]],
    ids=["adapters", "dora", "trained-whole"],
)
def test_merged_equals_unmerged(base, settings, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    _, directory = base
    ours = trained(directory, settings)
    own = without_adapters(ours.spec)
    pretrained.save(tmp_path / "merged", own, merged(ours.spec, ours.view), torch.float32)
    theirs, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    theirs.set_experts_implementation("eager")
    mb = make_micro_batch(ours.spec, [[11], [11]])
    expected = ours.logits(IDS, mb)
    torch.testing.assert_close(theirs.eval()(IDS.view(2, 11)).logits.flatten(0, 1), expected, rtol=1e-5, atol=1e-5)


def assert_continued(theirs, directory, settings, folder) -> None:
    """What PEFT writes of a model in `directory` is read, and computes the same."""
    theirs.save_pretrained(folder)
    ours = trained(directory, settings)
    files = adapter.read(folder)
    adapter.check_settings(files, settings, str(directory))
    adapter.check(files, ours.spec)
    adapter.load(files, ours.spec, ours.view)
    mb = make_micro_batch(ours.spec, [[11], [11]])
    expected = theirs(IDS.view(2, 11)).logits.flatten(0, 1)
    torch.testing.assert_close(ours.logits(IDS, mb), expected, rtol=1e-5, atol=1e-5)
    again = with_lora(without_adapters(ours.spec), adapter.settings_of(files, ours.spec))
    assert adapter.shapes(again) == adapter.shapes(ours.spec)


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    "settings", [SETTINGS["some"], SETTINGS["dora"], SETTINGS["trained-whole"]], ids=["some", "dora", "trained-whole"]
)
def test_what_peft_writes_is_continued(base, settings, tmp_path) -> None:
    model, directory = base
    targets = list(settings.target_modules) if isinstance(settings.target_modules, tuple) else ["q_proj", "o_proj"]
    settings = replace(settings, lora_alpha=8, target_modules=tuple(targets))
    theirs, _ = in_peft(model, settings, targets)
    assert_continued(theirs, directory, settings, tmp_path)


@llama
@pytest.mark.parametrize(
    ("given", "setting"),
    [
        ({"target_modules": ["q_proj", "o_proj"], "layers_to_transform": [1]}, "'model"),
        (
            {"target_modules": r".*0\.self_attn\.q_proj|.*\.1\.mlp\.up_proj"},
            '["model.layers.0.self_attn.q',
        ),
        ({"target_modules": ["q_proj"], "modules_to_save": ["norm"], "rank_pattern": {"q_proj": 8}}, '["q_proj"]'),
    ],
    ids=["layers", "modules", "saved"],
)
def test_what_to_set_to_continue_an_adapter_of_peft(base, given, setting, tmp_path) -> None:
    """The error of a run that adapts other modules ends with it."""
    model, directory = base
    from peft import LoraConfig, get_peft_model

    theirs = get_peft_model(deepcopy(model), LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **given))
    theirs.save_pretrained(tmp_path / "a")
    other = with_lora(registry.build(read_config(directory)), LoRA(target_modules=("k_proj",)))
    with pytest.raises(UserError) as caught:
        check(read(tmp_path / "a"), other)
    advice = str(caught.value).splitlines()[-1]
    assert f"lora.target_modules = {setting}" in advice
    said = {
        key: tomllib.loads(f"x = {value}")["x"] for key, value in re.findall(r"lora\.(\w+) = ('.*?'|\[.*?\])", advice)
    }
    settings = LoRA(**{key: tuple(value) if isinstance(value, list) else value for key, value in said.items()})
    assert_continued(theirs.eval(), directory, settings, tmp_path / "again")


def wrapped(tensors):
    return {name.replace("base_model.", "base_model.module.", 1): tensor for name, tensor in tensors.items()}


def emptied(tensors):
    return {
        name: tensor[:0] if name.endswith("1.mlp.up_proj.lora_A.weight") else tensor for name, tensor in tensors.items()
    }


def spoiled(tensors):
    return {
        name: tensor * (float("nan") if "0.self_attn.v_proj.lora_B" in name else 1) for name, tensor in tensors.items()
    }


AT = "base_model.model.model.layers"


@pytest.mark.parametrize("base", ["llama-tied"], indirect=True)
@pytest.mark.parametrize("name", ["lm_head.lora_A.weight", "model.embed_tokens.lora_embedding_A"])
def test_an_adapter_of_a_tied_embedding_is_refused(base, name, tmp_path) -> None:
    _, directory = base
    settings = LoRA(r=2)
    model = trained(directory, settings)
    written(model, settings, directory, tmp_path / "a")
    file = tmp_path / "a/adapter_model.safetensors"
    save_file(load_file(file) | {f"base_model.model.{name}": torch.ones(2, 2)}, file)
    with pytest.raises(UserError, match=f"{name} is not part of it; the head is tied to the embedding in this model"):
        check(read(tmp_path / "a"), model.spec)
    with pytest.raises(UserError, match=f"{name.rpartition('.lora')[0]}, which can have no adapter here: merge"):
        adapter.settings_of(read(tmp_path / "a"), model.spec)


@llama
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (wrapped, f"{AT}.0.self_attn.q_proj.lora_A.weight is missing\n"),
        (wrapped, "base_model.module.model.model.layers.0.mlp.down_proj.lora_A.weight is not part of it\n"),
        (wrapped, "\n- and 18 more"),
        (emptied, f"{AT}.1.mlp.up_proj.lora_A.weight has no elements"),
        (spoiled, f"{AT}.0.self_attn.v_proj.lora_B.weight holds values that are infinite or not numbers"),
        (lambda tensors: {n: t.half() for n, t in tensors.items()} | {"x": torch.ones(1)}, "x is not part of it"),
        (lambda tensors: {n: t.half() if "0." in n else t for n, t in tensors.items()}, "float16, float32"),
    ],
    ids=["wrapper-missing", "wrapper-unexpected", "wrapper-shortened", "empty", "nan", "unexpected", "mixed"],
)
def test_damage_is_found(base, change, message, tmp_path) -> None:
    _, directory = base
    settings = LoRA(r=2)
    model = trained(directory, settings)
    made = written(model, settings, directory, tmp_path / "a")
    (tmp_path / "a/complete.json").unlink()
    file = tmp_path / "a/adapter_model.safetensors"
    save_file(change(load_file(file)), file)
    with pytest.raises(UserError) as caught:
        verify_adapter(tmp_path / "a", model.spec, made)
    assert message in str(caught.value)


@llama
@pytest.mark.parametrize(("change", "message"), [(wrapped, "is missing"), (emptied, "has no"), (spoiled, "infinite")])
def test_what_was_written_wrong_is_no_export(base, change, message, tmp_path, monkeypatch) -> None:
    _, directory = base
    settings, write = LoRA(r=2), safetensors_io.write
    model = trained(directory, settings)

    def planted(file, *rest):
        write(file, *rest)
        save_file(change(load_file(file)), file)

    monkeypatch.setattr(safetensors_io, "write", planted)
    with pytest.raises(UserError, match=message):
        made = ModelInMemory(model.view, model.spec, Adapter(settings, str(directory)))
        export_store(made, directory, tmp_path / "a")
    assert not list(tmp_path.iterdir())


@llama
def test_a_changed_file_or_config_is_found(base, damage, tmp_path) -> None:
    _, directory = base
    settings = LoRA(r=2)
    model = trained(directory, settings)
    made = written(model, settings, directory, tmp_path / "a")
    other = Adapter(LoRA(r=2, lora_alpha=16), str(directory))
    with pytest.raises(UserError, match="lora_alpha"):
        verify_adapter(tmp_path / "a", model.spec, other)
    damage(tmp_path / "a/adapter_model.safetensors", 0.9)
    with pytest.raises(UserError, match="is damaged"):
        verify_adapter(tmp_path / "a", model.spec, made)


@llama
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, 'peft_type is "IA3"; only "LORA" can be read'),
        ({"use_qalora": True, "bias": "all"}, "bias, use_qalora cannot be trained here"),
        ({"use_dora": True}, "lora.use_dora is false, the adapter's is true. Set them to the same values"),
        ({"lora_alpha": 0.5}, "lora.lora_alpha is 8, the adapter's is 0.5. Set them to the same values"),
        ({"rank_pattern": {"q_proj": 3}}, "rank_pattern cannot be trained here"),
        ({"init_lora_weights": "pissa"}, 'init_lora_weights "pissa" cannot be trained here'),
        (
            {"r": 4, "use_rslora": True},
            "lora.r is 2, the adapter's is 4; lora.use_rslora is false, the adapter's is true",
        ),
        ({"lora_alpha": 32}, "lora.lora_alpha is 8, the adapter's is 32. Set them to the same values"),
        ({"base_model_name_or_path": ["llama"]}, "adapter_config.json: base_model_name_or_path must be text, not ["),
    ],
)
def test_adapters_that_are_not_continued(base, changes, message, tmp_path) -> None:
    _, directory = base
    settings = LoRA(r=2)
    model = trained(directory, settings)
    written(model, settings, directory, tmp_path / "a")
    file = tmp_path / "a/adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(UserError) as caught:
        adapter.check_settings(adapter.read(tmp_path / "a"), settings, str(directory))
    assert message in str(caught.value)
    file.write_text(f'{{"r": 2, {file.read_text()[1:]}')
    with pytest.raises(UserError, match=r"adapter_config.json is not valid JSON: an object has the key 'r' twice"):
        adapter.read(tmp_path / "a")


@llama
@pytest.mark.parametrize(("alpha", "stored"), [(16, 16.0), (0.5, 0.5)])
def test_an_alpha_with_a_point_is_continued(base, alpha, stored, tmp_path) -> None:
    _, directory = base
    settings = LoRA(r=2, lora_alpha=alpha)
    written(trained(directory, settings), settings, directory, tmp_path / "a")
    file = tmp_path / "a/adapter_config.json"
    assert repr(json.loads(file.read_text())["lora_alpha"]) == repr(alpha)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_alpha": stored}))
    files = adapter.read(tmp_path / "a")
    adapter.check_settings(files, settings, str(directory))
    assert adapter.settings_of(files, registry.build(read_config(directory))).scale == settings.scale


@llama
def test_an_adapter_of_another_model_or_of_other_modules(base, tmp_path, caplog) -> None:
    _, directory = base
    settings = LoRA(r=2)
    model = trained(directory, settings)
    written(model, settings, directory, tmp_path / "a")
    files = adapter.read(tmp_path / "a")
    for spec, message in (
        (
            registry.build({**model.spec.config, "intermediate_size": 30}),
            "lora_A.weight has shape [2, 20], not [2, 30]",
        ),
        (
            registry.build({**model.spec.config, "num_hidden_layers": 3}),
            f"{AT}.2.self_attn.q_proj.lora_A.weight is miss",
        ),
    ):
        with pytest.raises(UserError) as caught:
            adapter.check(files, with_lora(spec, settings))
        assert message in str(caught.value) and "does not match this model" in str(caught.value)
    with pytest.raises(UserError, match=r"k_proj.lora_A.weight is not part of it"):
        adapter.check(files, with_lora(without_adapters(model.spec), LoRA(r=2, target_modules=("q_proj",))))
    with caplog.at_level(logging.WARNING):
        adapter.check_settings(files, settings, "/models/other")
    assert "and continues with /models/other" in caplog.text
    files.config.base_model_name_or_path = "a\x1b[31m\n"
    with caplog.at_level(logging.WARNING):
        adapter.check_settings(files, settings, "/models/other")
    assert "was trained on a␛[31m␊, and" in caplog.text
    for missing, message in (
        ("adapter_model.safetensors", "is not a complete adapter"),
        ("adapter_config.json", "is not an adapter"),
    ):
        (tmp_path / "a" / missing).unlink()
        with pytest.raises(UserError, match=message):
            adapter.read(tmp_path / "a")


@llama
def test_modules_that_were_trained_in_full_are_there(base, tmp_path) -> None:
    """PEFT writes the names that a person gave: those of no module say nothing."""
    _, directory = base
    settings = LoRA(r=2)
    model = trained(directory, settings)
    written(model, settings, directory, tmp_path / "a")
    files = adapter.read(tmp_path / "a")
    files.config.modules_to_save = ["classifier"]
    adapter.check(files, model.spec)
    files.config.modules_to_save = ["lm_head", "model.norm"]
    with pytest.raises(UserError, match=r"(?s)model.norm.weight is missing; modules_to_save .* names it.*lm_head"):
        adapter.check(files, model.spec)


@llama
def test_where_adapters_lie_in_a_model(base) -> None:
    _, directory = base
    spec = trained(directory, LoRA(target_modules=r".*\.1\..*_proj")).spec
    assert [spec.units[index].name for index in adapter_units(spec)] == ["layers.1.lora"]
    assert without_adapters(spec).layers == trained(directory, LoRA()).spec.layers[:0] + tuple(
        registry.build(spec.config).layers
    )


@llama
def test_values_that_are_no_numbers_are_found_when_they_are_read(base, tmp_path) -> None:
    _, directory = base
    settings = LoRA(r=2)
    model = trained(directory, settings)
    written(model, settings, directory, tmp_path / "a")
    file = tmp_path / "a/adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "lora_B" in name)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError, match="infinite or not numbers"):
        adapter.load(adapter.read(tmp_path / "a"), model.spec, model.view)
