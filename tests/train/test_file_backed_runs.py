"""Whole runs whose frozen weights stay in the model's files: the same bits, less memory, resumed, refused, planned."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from rptrain.engine.engine import Engine
from rptrain.engine.memory import store
from rptrain.engine.transfer.staging import BUFFERS
from rptrain.planner import disk
from rptrain.runs.records import events
from rptrain.utils.errors import UserError

from .. import run_tools as tools

LORA = ("lora.r=3", "lora.lora_alpha=6", "save.save_steps=2", "optim.learning_rate=0.05")
FREEZE = ('train.freeze=["model.embed_tokens.weight", "model.layers.1.*", "*.mlp.*"]', "save.save_steps=2")
HOLDS = ("memory", "map")
MAP = "model.hold=map"
NORM = 128 * 4  # bytes, padded
LAYER = (16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 24) * 4 + 4 * NORM  # with norms of queries and keys


@pytest.mark.long
@pytest.mark.parametrize("given", [LORA, FREEZE, (*LORA, "lora.use_dora=true")], ids=["lora", "freeze", "dora"])
def test_the_bits_are_those_of_a_base_in_memory_also_when_resumed(folder, given):
    """A resumed run may map what was in memory, and the other way round."""
    whole = tools.train_here(folder, *given, "eval.questions=2")
    mapped = tools.train_here(folder, *given, MAP, "log.run_name=mapped", "engine.devices=cpu:1", "eval.questions=2")
    assert tools.steps(mapped) == tools.steps(whole) and tools.state(mapped) == tools.state(whole)
    for hold in ("map", "memory"):
        more = (f"model.hold={hold}", f"save.resume={mapped.checkpoint_path(2)}", f"log.run_name={hold}")
        again = tools.train_here(folder, *given, *more)
        assert [event.step for event in tools.events(again, events.Resumed)] == [2]
        assert tools.state(again) == tools.state(whole)


def test_corrections_of_routers_are_held_in_memory(folder):
    """They are float32, and files may store them as they store the other weights."""
    shape = {"model_type": "minimax_m2", "num_local_experts": 4, "num_experts_per_tok": 2}
    tools.write_model(folder / "experts", architectures=["MiniMaxM2ForCausalLM"], **shape)
    file, generator = folder / "experts/model.safetensors", torch.Generator().manual_seed(0)
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("correction_bias")]:
        tensors[name].normal_(generator=generator)
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, file)
    given = (*LORA, f"model.path={file.parent}", "model.dtype=bfloat16")
    whole, mapped = (tools.train_here(folder, *given, f"model.hold={hold}", f"log.run_name={hold}") for hold in HOLDS)
    assert tools.steps(mapped) == tools.steps(whole) and tools.state(mapped) == tools.state(whole)


def test_a_resumed_run_maps_the_weights_it_was_trained_with(folder):
    run = tools.train_here(folder, *LORA, MAP)
    file = folder / "model/model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-300] + bytes(4) + content[-296:])
    with pytest.raises(UserError, match="changed since the run started"):
        tools.train_here(folder, *LORA, MAP, f"save.resume={run.checkpoint_path(2)}", "log.run_name=more")


def test_the_process_holds_less_by_what_is_mapped(folder, monkeypatch):
    """As planned, and as taken."""
    tools.write_model(folder / "deep", num_hidden_layers=60)
    taken = []

    class Counted(store.Arena):
        def __init__(self, nbytes):
            super().__init__(nbytes)
            taken.append(nbytes)

    monkeypatch.setattr(store, "Arena", Counted)
    monkeypatch.setattr("rptrain.engine.memory.boundary.Arena", Counted)
    monkeypatch.setattr("rptrain.engine.transfer.staging.Arena", Counted)
    few = (f"model.path={folder / 'deep'}", "train.max_steps=1", "lora.r=1", "engine.devices=cpu:1")
    found = {}
    for hold in ("memory", "map"):
        taken.clear()
        run = tools.train_here(folder, *few, f"model.hold={hold}", f"log.run_name={hold}", "engine.replan=false")
        (started,) = tools.events(run, events.ProcessStarted)
        parts = dict(started.memory[0]["parts"])
        found[hold] = parts, sum(taken)
        named = ("weights", "gradients", "optimizer state", "frozen weights", "activations", "buffers of file-backed")
        assert sum(taken) == sum(size for name, size in parts.items() if name.startswith(named))
    (planned, before), (mapped, after) = found["memory"], found["map"]
    pages = -(-LAYER // 4096) * 4096
    assert planned["frozen weights"] - mapped["frozen weights"] == 60 * pages + 4096  # and the last norm
    assert mapped["buffers of file-backed weights"] == BUFFERS * pages
    assert before - after == (60 - BUFFERS) * pages + 4096


def test_numbers_that_are_none_end_it_before_training(folder):
    file = folder / "model/model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.2.mlp.up_proj.weight"][1, 1] = torch.inf
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"layers\.2\.mlp\.up_proj\.weight holds values"):
        tools.train_here(folder, *LORA, MAP)


@pytest.mark.parametrize("saved", [True, False])
def test_a_file_that_changes_meanwhile_ends_it_with_what_to_do(folder, monkeypatch, saved):
    tools.write_config(folder)
    file, begin = folder / "model/model.safetensors", Engine.forward_backward
    called = []

    def change(engine, batch):
        called.append(engine)
        if len(called) == 5:
            os.utime(file, ns=(0, 0))
        return begin(engine, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "forward_backward", change)
        given = ("--config", folder / "run.toml", *LORA, MAP, "engine.replan=false", f"save.save_steps={2 * saved}")
        result = tools.invoke("train", *given)
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)  # and no traceback
    assert f"{file} was changed while it was in use: restore it.\n" in result.output
    said = "checkpoint-4 is complete: fix the problem, then resume" if saved else "The run has no checkpoint"
    assert said in result.output
    again = tools.train_here(folder, *LORA, MAP)
    assert bool(tools.events(again, events.Resumed)) == saved and tools.steps(again).keys() == {*range(1, 7)}


def test_plan_says_what_a_step_reads_and_what_the_disk_gives(folder, monkeypatch):
    tools.write_config(folder)
    given = ("plan", "--config", folder / "run.toml", MAP, "lora.r=2", "engine.round_size=2")
    found = json.loads(tools.invoke(*given, "--json").output)
    reading, stages = found["reading"], found["plan"]["stages"]
    blocks = sum(min(stage["last"], 2) - stage["first"] + 1 for stage in stages)
    head = sum(stage["last"] == 3 for stage in stages)
    assert (reading["mapped"], reading["limits"]) == (3 * LAYER + NORM, False)  # all of it, in memory that is free
    assert reading["bytes_per_step"] == 2 * (blocks * LAYER + head * NORM)  # two rounds
    assert reading["rate"] > 0
    text = " ".join(tools.invoke(*given).output.split())
    assert "of weights stay in the model's files, and are not counted" in text and "of these files." in text
    monkeypatch.setattr(disk, "_rate", lambda files: 1e3)
    tight = (*given, "engine.host_limit=100MiB")
    slow = json.loads(tools.invoke(*tight, "--json").output)["reading"]
    assert slow["limits"] and slow["seconds"] == reading["bytes_per_step"] / 1e3
    assert "so it takes" in " ".join(tools.invoke(*tight).output.split())
    monkeypatch.setattr(disk, "_rate", lambda files: 1e12)
    assert not json.loads(tools.invoke(*tight, "--json").output)["reading"]["limits"]
    assert json.loads(tools.invoke(*given, "--json", "model.hold=memory").output)["reading"] is None
