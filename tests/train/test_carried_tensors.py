"""Tensors of a model that training leaves out go through training, resuming and export as they are."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rptrain.checkpoint.export import export
from rptrain.models.weights.safetensors_io import DTYPES, FLOATS, as_bytes, read_header, write
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records import events
from rptrain.train.trainer import Trainer
from rptrain.utils.errors import UserError

from .. import run_tools as tools

EXTRA = {  # of the layer behind the last one
    "model.layers.2.eh_proj.weight": torch.arange(24.0, dtype=torch.bfloat16).view(4, 6),
    "model.layers.2.shared_head.norm.weight": torch.tensor([float("nan"), 1.0, -0.0]),
    "model.layers.2.steps": torch.tensor(7),
} | {
    f"model.layers.2.{name}": torch.tensor([1, 0, 3]).to(dtype) for name, dtype in DTYPES.items() if name not in FLOATS
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tools.write_model(tmp_path / "model", **tools.GLM)
    weights = tmp_path / "model/model.safetensors"
    save_file(load_file(weights) | EXTRA, weights, {"format": "pt"})
    return tmp_path


def carried(directory: Path) -> dict[str, bytes]:
    tensors = {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return {name: bytes(as_bytes(tensors[name])) for name in EXTRA}


LORA = ("lora.r=2",)


@pytest.mark.parametrize("settings", [(), LORA], ids=["full", "lora"])
def test_they_are_in_the_export_of_a_run_that_was_resumed(folder, settings) -> None:
    run = tools.train_here(folder, "train.max_steps=2", *settings)
    again = tools.train_here(folder, "train.max_steps=3", f"save.resume={run.checkpoints()[-1]}", *settings)
    before = carried(folder / "model")
    if not settings:
        assert carried(again.model_path) == before
    for dtype in (None, "float16"):
        to = folder / f"exported-{dtype}"
        assert carried(export(again.path, to, dtype, merge=bool(settings))) == before


def test_a_run_with_other_ones_is_refused(folder) -> None:
    run = tools.train_here(folder, "train.max_steps=2")
    weights = folder / "model/model.safetensors"
    tensors = load_file(weights)
    tensors["model.layers.2.eh_proj.weight"][0, 0] = 7
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(UserError, match=r"eh_proj.weight changed since the run started"):
        export(run.path, folder / "exported")
    assert not (folder / "exported").exists()
    resume = ("train.max_steps=3", f"save.resume={run.checkpoints()[-1]}")
    with pytest.raises(UserError, match=r"the tensor .*eh_proj.weight changed since the run started"):
        tools.train_here(folder, *resume)
    del tensors["model.layers.2.eh_proj.weight"]
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(UserError, match=r"eh_proj.weight is missing from .*model"):
        export(run.path, folder / "exported")
    with pytest.raises(UserError, match=r"the tensor .*eh_proj.weight was removed since the run started"):
        tools.train_here(folder, *resume)


def test_a_changed_export_is_not_trained_on(folder) -> None:
    run = tools.train_here(folder, "train.max_steps=1")
    (shard,) = [file for file in run.model_path.glob("*.safetensors") if "model.layers.2.steps" in load_file(file)]
    tensors = load_file(shard)
    tensors["model.layers.2.eh_proj.weight"][0, 0] = 7
    save_file(tensors, shard)
    with pytest.raises(UserError, match=r"eh_proj.weight differs from what was exported: restore the file"):
        tools.train_here(folder, f"model.path={run.model_path}", "train.max_steps=1", "log.run_name=next")


def test_a_model_that_is_gone_when_the_run_ends(folder, monkeypatch) -> None:
    tools.write_config(folder)
    run, file = RunDir(folder / "runs/run"), folder / "model/model.safetensors"

    def move(self: Trainer, *state: Any) -> None:
        file.rename(folder / "moved")
        export_model(self, *state)

    export_model = Trainer._export
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_export", move)
        told = tools.invoke("--config", folder / "run.toml")
    problem = f"cannot read {file}: No such file or directory.\nTraining is complete, and only the exported model is"
    command = f"rptrain --config {run.config_path} save.resume={run.path}"
    said = f"{problem} missing. checkpoint-6 is complete: fix the problem, then resume from it with: {command}"
    assert (told.exit_code, told.stderr.splitlines()[-2:]) == (1, said.splitlines())
    assert [event.message for event in tools.events(run, events.Failed)] == [said]
    (folder / "moved").rename(file)
    assert tools.invoke(*command.split()[1:]).exit_code == 0
    assert carried(run.model_path) == carried(folder / "model")


def test_a_run_with_none_left_or_with_new_ones_is_refused(folder) -> None:
    weights = folder / "model/model.safetensors"
    tensors = load_file(weights)
    own = {name: tensor for name, tensor in tensors.items() if name not in EXTRA}
    for before, after, what in ((tensors, own, "removed"), (own, tensors, "added")):
        save_file(before, weights, {"format": "pt"})
        run = tools.train_here(folder, "train.max_steps=2", f"log.run_name={what}")
        save_file(after, weights, {"format": "pt"})
        with pytest.raises(UserError, match=rf"the tensor model\.layers\.2\.\S+ was {what} since the run started"):
            tools.train_here(folder, "train.max_steps=3", f"save.resume={run.checkpoints()[-1]}")


def test_all_tensors_of_an_export_are_aligned(folder) -> None:
    weights = folder / "model/model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in reversed(load_file(weights).items())}
    write(weights, {name: (tuple(each.shape), each.dtype) for name, each in tensors.items()}, tensors.values())
    assert not all(stored.offset % stored.dtype.itemsize == 0 for stored in read_header(weights).values())
    run = tools.train_here(folder, "train.max_steps=2")
    files = [read_header(file) for file in run.model_path.glob("*.safetensors")]
    assert len(files) == 2 and files[0].keys() | files[1].keys() > EXTRA.keys()
    for name, stored in (files[0] | files[1]).items():
        assert stored.offset % stored.dtype.itemsize == 0, name


def test_changed_ones_are_noticed_before_anything_else_is_read(folder, monkeypatch) -> None:
    run = tools.train_here(folder, "train.max_steps=2")
    weights = folder / "model/model.safetensors"
    save_file(load_file(weights) | {"model.layers.2.steps": torch.tensor(8)}, weights, {"format": "pt"})
    monkeypatch.setattr("rptrain.checkpoint.export._read_flat", None)  # reads the trained weights
    with pytest.raises(UserError, match=rf"^{weights}: model.layers.2.steps changed since the run started"):
        export(run.path, folder / "exported", "float32")


@pytest.mark.parametrize("dtype", [dtype for name, dtype in DTYPES.items() if name not in FLOATS], ids=str)
def test_the_models_own_weights_are_floats(folder, dtype) -> None:
    weights = folder / "model/model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(dtype)
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(UserError, match=r"model.norm.weight is stored as .*unquantized weights"):
        tools.train_here(folder, "train.max_steps=1")
