"""The Python code that loads an export, by the files that it has."""

import json
from pathlib import Path

import pytest

from rptrain.checkpoint.atomic_dir import MANIFEST
from rptrain.checkpoint.export_progress import loading_code

SEVERAL = {"architectures": ["Mistral3ForConditionalGeneration"]}
TEXT = {"architectures": ["LlamaForCausalLM"]}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/a").mkdir(parents=True)
    return tmp_path / "runs/a"


@pytest.mark.parametrize(
    ("config", "model"), [(TEXT, "AutoModelForCausalLM"), (SEVERAL, "AutoModelForImageTextToText")]
)
def test_a_model_with_its_tokenizer(directory: Path, config: dict[str, object], model: str):
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer_config.json").write_text("{}")
    assert loading_code(directory).splitlines() == [
        f"from transformers import {model}, AutoTokenizer",
        "",
        'path = "runs/a"',
        f"model = {model}.from_pretrained(path)",
        "tokenizer = AutoTokenizer.from_pretrained(path)",
    ]


def test_an_adapter_of_a_model_with_a_vision_tower_outside_of_the_current_directory(
    directory: Path, monkeypatch: pytest.MonkeyPatch
):
    base = directory.parent / 'base "b"'
    base.mkdir()
    (base / "config.json").write_text(json.dumps(SEVERAL))
    (directory / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    monkeypatch.chdir(base)
    assert loading_code(directory).splitlines() == [
        "from peft import PeftModel",
        "from transformers import AutoModelForImageTextToText",
        "",
        f'base = "{directory.parent}/base \\"b\\""',
        f'path = "{directory}"',
        "model = AutoModelForImageTextToText.from_pretrained(base)",
        "model = PeftModel.from_pretrained(model, path)",
    ]


def test_an_adapter_with_eos_ids_of_its_own(directory: Path):
    """PEFT and transformers read only the generation_config.json of its base."""
    (directory / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "a/b"}))
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert loading_code(directory).splitlines() == [
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM, GenerationConfig",
        "",
        'base = "a/b"',
        'path = "runs/a"',
        "model = AutoModelForCausalLM.from_pretrained(base)",
        "model.generation_config = GenerationConfig.from_pretrained(path)",
        "model = PeftModel.from_pretrained(model, path)",
    ]


def test_an_adapter_names_the_architecture_of_a_base_on_the_hub(directory: Path):
    (directory / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "a/b"}))
    (directory / MANIFEST).write_text(json.dumps({"architecture": SEVERAL["architectures"][0]}))
    assert "model = AutoModelForImageTextToText.from_pretrained(base)" in loading_code(directory)


@pytest.mark.parametrize("config", ["", "[]", '{"architectures": []}', '{"architectures": null}'])
def test_a_base_whose_config_cannot_be_read(directory: Path, config: str):
    (directory / "config.json").write_text(config)
    assert "model = AutoModelForCausalLM.from_pretrained(path)" in loading_code(directory)
