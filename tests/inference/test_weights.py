"""Weights on a device and streamed to it: the same numbers wherever they are, quantized ones included."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from rptrain.checkpoint.export import export
from rptrain.engine.memory.page_locking import Locking
from rptrain.inference import weights
from rptrain.inference.generate import Request, generate_text
from rptrain.inference.load import LoadedChat
from rptrain.inference.model import Model, find_model
from rptrain.inference.placement import FreeMemory
from rptrain.inference.weights import Resident, Streamed, dense
from rptrain.models.decode.generate import generate
from rptrain.utils.errors import UserError

from .. import run_tools as tools

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7], [8]]


@pytest.mark.long
@pytest.mark.sample(2)
@pytest.mark.parametrize("base", ["bf16", "nf4", "mxfp4"])
def test_a_checkpoint_answers_the_same_wherever_its_weights_are(tmp_path: Path, base: str) -> None:
    """An odd number of blocks: every second pass over them begins in the other of two slots."""
    tools.write_model(tmp_path / "model", hidden_size=64, intermediate_size=64)
    run = tools.train_here(tmp_path, "lora.r=3", "optim.learning_rate=0.1", f"lora.base={base}", "train.max_steps=2")
    model = find_model(run.checkpoints()[-1])
    assert any(unit.quantized for unit in model.spec.units) is (base != "bf16")
    expected = dense(model, CPU)
    found = generate(model.spec, expected, PROMPTS, 5)
    for place in (Resident(model, CPU), Streamed(model, CPU)):
        for _ in range(2):
            for index, unit in enumerate(model.spec.units):
                for name, tensor in place(index).items():
                    assert torch.equal(tensor, expected(index)[name]), (type(place), unit.name, name)
        assert generate(model.spec, place, PROMPTS, 5) == found
    exported = export(run.path, tmp_path / "exported")
    for source in (run.path, run.model_path, exported):
        model = find_model(source)
        assert any(unit.quantized for unit in model.spec.units) is (base != "bf16"), source
        for place in (dense(model, CPU), Resident(model, CPU)):
            assert generate(model.spec, place, PROMPTS, 5) == found


def test_a_link_out_of_the_run_does_not_answer_and_an_older_checkpoint_neither(tmp_path: Path) -> None:
    tools.write_model(tmp_path / "model")
    run = tools.train_here(tmp_path, "train.max_steps=2")
    (run.path / "model").rename(tmp_path / "elsewhere")
    find_model(run.path)
    (run.path / "model").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"model leads to .*/elsewhere, outside of .*: put the file or folder there"):
        find_model(run.path)


def test_two_blocks_at_most_are_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools.write_model(tmp_path / "model")
    model = find_model(tmp_path / "model")
    copies: list[tuple[int, int]] = []
    copy = Streamed._copy
    monkeypatch.setattr(weights.Streamed, "_copy", lambda self, *given: (copies.append(given), copy(self, *given))[1])
    place = Streamed(model, CPU)
    generate(model.spec, place, PROMPTS, 2)
    assert len(model.spec.layers) == 3 and copies[:5] == [(0, 1), (1, 0), (2, 1), (0, 0), (1, 1)]
    assert len(place._slots) == 2


def test_weights_are_freed_without_another_error_after_their_gpu_failed() -> None:
    stream = Mock(synchronize=Mock(side_effect=torch.AcceleratorError("CUDA error: device lost")))
    weights._end_copies(stream)
    assert stream.synchronize.called


def test_what_copies_of_pageable_memory_cost_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Partly(Streamed):
        """A GPU's, on the CPU."""

        locking = Locking(3 << 20, (range(1 << 20),))

        def __init__(self, model: Model, device: torch.device) -> None:
            assert device.type == "cuda"
            super().__init__(model, CPU)

    tools.write_model(tmp_path / "model")
    room = FreeMemory(1 << 40, 1e10, "RTX 4090", 1 << 40, 1e12, 1e10)
    expected = generate_text(Request(tmp_path / "model", ["a b"], 3), room, "cpu")
    monkeypatch.setattr(weights, "Streamed", Partly)
    monkeypatch.setattr(weights, "try_out", lambda device: None)
    said: list[str] = []
    assert generate_text(Request(tmp_path / "model", ["a b"], 3, tell=said.append), room, "streamed") == expected
    assert len(said) == 1 and said[0].startswith("2.00 MiB of the 3.00 MiB")
    assert LoadedChat(tmp_path / "model", room, "streamed").placement.reason == f"chosen; {said[0]}"


@pytest.mark.long
@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [None, "float16"])
@pytest.mark.parametrize("shard", ["5GB", "30KB"])
def test_the_dtype_is_that_of_transformers(tmp_path: Path, shard: str, dtype: str | None) -> None:
    """That of config.json, or that of the first tensor by name, which is not the first one in the file."""
    from transformers import AutoModelForCausalLM

    written, folder = tools.write_model(tmp_path / "written", tie_word_embeddings=False), tmp_path / "model"
    AutoModelForCausalLM.from_pretrained(written).save_pretrained(folder, max_shard_size=shard)
    described = json.loads((written / "config.json").read_text()) | {"dtype": dtype}
    (folder / "config.json").write_text(json.dumps(described))
    file = min(folder.glob("*.safetensors"))
    tensors = load_file(file)
    first, *_, last = sorted(tensors)
    tensors[last] = tensors[last].double()
    for stored in (torch.float32, torch.bfloat16):
        tensors[first] = tensors[first].to(stored)
        save_file(tensors, file, {"format": "pt"})
        expected = torch.float16 if dtype else stored
        assert find_model(folder).dtype == AutoModelForCausalLM.from_pretrained(folder).dtype == expected
