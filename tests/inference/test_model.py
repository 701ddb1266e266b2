"""Which tokens end the answers of a model."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from rptrain.checkpoint.adapter import Adapter
from rptrain.checkpoint.export import ModelInMemory, export_store
from rptrain.inference.model import find_model
from rptrain.models.families.registry import build
from rptrain.models.locate import read_config
from rptrain.models.transforms.lora import LoRA, with_lora
from rptrain.utils.errors import UserError

from .. import run_tools as tools
from .letters import END, Letters


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tools.write_model(tmp_path / "model", eos_token_id=[2, 3])


def write(directory: Path, eos: object) -> None:
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))


def test_the_ends_of_a_model_directory(directory: Path):
    write(directory, [2, 9])
    assert find_model(directory).ends(Letters()) == {2, 3, 9, END}
    (directory / "generation_config.json").unlink()
    assert find_model(directory).ends(Letters()) == {2, 3, END}
    write(directory, "<|end|>")
    with pytest.raises(UserError, match=r"model/generation_config\.json: eos_token_id has '<\|end\|>'"):
        find_model(directory)


def test_the_ends_of_an_adapter_and_of_its_base(directory: Path, tmp_path: Path):
    """PEFT loads an adapter with a generation_config.json."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    write(directory, [2, 9])
    settings = LoRA(r=2)
    spec = with_lora(build(read_config(directory)), settings)
    params = [unit.views(torch.ones(unit.numel)) for unit in spec.units]
    made = Adapter(settings, str(directory))
    to = tmp_path / "adapter"
    export_store(ModelInMemory(lambda unit, name: params[unit][name], spec, made), directory, to)
    assert not (to / "generation_config.json").exists()
    shutil.rmtree(to)
    export_store(ModelInMemory(lambda unit, name: params[unit][name], spec, made, ends=[7]), directory, to)
    assert json.loads((to / "generation_config.json").read_text()) == {"eos_token_id": [2, 9, 7]}
    assert find_model(to).ends(Letters()) == {2, 3, 9, 7, END}
    assert find_model(directory).ends(Letters()) == {2, 3, 9, END}
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(directory), to)
