"""Whole runs that freeze weights: killed and resumed, exported, asked; their checkpoints leave the frozen ones out."""

import signal

import pytest
import torch
from safetensors.torch import load_file, save_file

from rptrain.checkpoint.export import export
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records import events
from rptrain.utils.errors import UserError

from .. import run_tools as tools

FREEZE = 'train.freeze=["model.embed_tokens.weight", "model.layers.1.*", "*.mlp.*"]'
EVERY_TWO = ("save.save_steps=2", FREEZE)


def is_frozen(name):
    return ".mlp." in name or name == "model.embed_tokens.weight" or name.startswith("model.layers.1.")


@pytest.mark.long
@pytest.mark.parametrize(("init", "update", "dtype"), [("auto", "async", "bfloat16"), ("random", "sync", "float32")])
def test_killed_and_resumed(folder, trainers, update, dtype, init):
    kind = (f"optim.update={update}", f"model.dtype={dtype}", f"model.init={init}", *EVERY_TWO)
    assert trainers.train(folder, *kind, "engine.devices=cpu:1", event=5) == -signal.SIGKILL
    run = tools.train_here(folder, *kind)
    assert [event.step for event in tools.events(run, events.Resumed)] == [4]
    whole = tools.train_here(folder, *kind, "log.run_name=whole")
    assert tools.steps(run) == tools.steps(whole)
    assert tools.state(run) == tools.state(whole)


def test_frozen_weights_are_those_of_the_model_and_the_rest_are_trained(folder):
    run = tools.train_here(folder, *EVERY_TWO)
    before, after = (load_file(path / "model.safetensors") for path in (folder / "model", run.model_path))
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if is_frozen(name)}


def test_checkpoints_leave_frozen_units_out(folder):
    run = tools.train_here(folder, *EVERY_TWO)
    names = {file.name.split("-", 1)[1].removesuffix(".safetensors") for file in run.checkpoints()[-1].glob("units/*")}
    assert names == {"norm", "layers.0.trained", "layers.2.trained"}


@pytest.mark.parametrize("init", ["auto", "random"])
def test_a_checkpoint_is_exported_and_asked_as_the_run_is(folder, init):
    run = tools.train_here(folder, *EVERY_TWO, f"model.init={init}", "model.dtype=bfloat16")
    exported = export(run.path, folder / "exported", "bfloat16")
    assert (exported / "model.safetensors").read_bytes() == (run.model_path / "model.safetensors").read_bytes()
    wide = load_file(export(run.path, folder / "wide", "float32") / "model.safetensors")
    narrow = load_file(exported / "model.safetensors")
    assert all(torch.equal(wide[name], narrow[name].float()) for name in wide if is_frozen(name))
    assert not all(torch.equal(wide[name], narrow[name].float()) for name in wide)
    asked = (["a", "bc"], 5, 0.0, 0, True)
    assert tools.generated(run.checkpoints()[-1], *asked) == tools.generated(run.model_path, *asked)


@pytest.mark.long
def test_frozen_weights_that_are_not_as_they_were_are_refused(folder, trainers):
    """For a resumed run, and for an export from a checkpoint, which the model's files are needed for too."""
    assert trainers.train(folder, *EVERY_TWO, event=5) == -signal.SIGKILL
    file = folder / "model/model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.2.mlp.up_proj.weight"][0, 0] += 1
    save_file(tensors, file)
    for attempt in (
        lambda: tools.train_here(folder, *EVERY_TWO),
        lambda: export(folder / "runs/run", folder / "exported"),
    ):
        with pytest.raises(
            UserError, match=r"weights of layers\.2 changed since the run started: restore the files in"
        ):
            attempt()
    file.unlink()
    for attempt in (
        lambda: tools.train_here(folder, *EVERY_TWO),
        lambda: export(folder / "runs/run", folder / "exported"),
    ):
        with pytest.raises(UserError, match=r"holds neither model\.safetensors"):
            attempt()


@pytest.mark.long
def test_a_run_keeps_what_it_froze(folder, trainers):
    assert trainers.train(folder, *EVERY_TWO, event=5) == -signal.SIGKILL
    with pytest.raises(UserError, match=r"cannot be resumed with changed settings.*train\.freeze.* was "):
        tools.train_here(folder, "save.save_steps=2")
    assert RunDir(folder / "runs/run").checkpoints()


def test_a_pattern_of_nothing_is_found_before_memory_is_taken(folder):
    result = tools.invoke("plan", "--config", config(folder), 'train.freeze=["model.layers.7.*"]')
    assert result.exit_code == 2
    assert "'model.layers.7.*' matches no tensor of the model; the closest names are model.layers." in result.output


def test_bench_of_frozen_weights(folder):
    result = tools.invoke("bench", "--config", config(folder), FREEZE, "--steps", "2", "--warmup", "1", "--json")
    assert result.exit_code == 0, result.output


def config(folder):
    tools.write_config(folder)
    return folder / "run.toml"
