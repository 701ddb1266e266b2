"""Whole runs of adapters on a base in 4 or 8 bits: resumed, exported, merged, asked, planned, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from rptrain.checkpoint.export import export
from rptrain.checkpoint.frozen import spec_of
from rptrain.checkpoint.state import read_state
from rptrain.kernels.quant import dequantize, format_of, quantize
from rptrain.runs.records import events
from rptrain.utils.errors import UserError

from .. import run_tools as tools

NARROW = ("lora.r=3", "lora.lora_alpha=6", "lora.base=nf4", "save.save_steps=2", "optim.learning_rate=0.05")
ASKED = (["a", "bc"], 6, 0.0, 0, True)


def dequantized(tensor, base):
    fmt = format_of(base, tensor.shape[-1])
    return dequantize(*quantize(tensor, fmt), fmt, torch.empty(tensor.shape))


def test_a_resumed_run_goes_on_to_the_same_bits(folder):
    whole = tools.train_here(folder, *NARROW, "engine.devices=cpu:1")
    more = (f"save.resume={whole.checkpoint_path(2)}", "log.run_name=more", "engine.devices=cpu:2")
    again = tools.train_here(folder, *NARROW, *more)
    assert [event.step for event in tools.events(again, events.Resumed)] == [2]
    assert {step: tools.steps(whole)[step] for step in range(3, 7)} == tools.steps(again)
    assert tools.state(again) == tools.state(whole)
    meta = read_state(whole.checkpoint_path(2))["meta"]
    with pytest.raises(UserError, match=r"lora\.double_quant, which was removed"):  # as earlier versions wrote it
        spec_of(whole.checkpoint_path(2), meta | {"frozen": meta["frozen"] | {"base": "nf4-double"}})
    plainly = tools.train_here(folder, *NARROW, "lora.base=bf16", "log.run_name=plainly")
    assert tools.steps(plainly)[1] != tools.steps(whole)[1]
    with pytest.raises(UserError, match=r'lora\.base was "nf4", is "int8"'):
        tools.train_here(folder, *NARROW, *more, "lora.base=int8")


@pytest.mark.sample(1, gate=3)
@pytest.mark.parametrize("base", ["nf4", "int8", "fp8"])
def test_merging_and_answers_start_from_the_base_that_was_trained_on(folder, base):
    run = tools.train_here(folder, *NARROW, f"lora.base={base}")
    names = load_file(run.model_path / "adapter_model.safetensors").keys()
    plainly = tools.train_here(folder, *NARROW, "lora.base=bf16", "log.run_name=plainly")
    assert names == load_file(plainly.model_path / "adapter_model.safetensors").keys()
    configs = [json.loads((r.model_path / "adapter_config.json").read_text()) for r in (run, plainly)]
    assert configs[0] == configs[1]
    adapter = load_file(run.model_path / "adapter_model.safetensors")
    before = load_file(folder / "model/model.safetensors")
    after = load_file(export(run.path, folder / "merged", merge=True) / "model.safetensors")
    for name, tensor in before.items():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{key}.lora_A.weight" in adapter:
            tensor = (
                dequantized(tensor, base) + 6 / 3 * adapter[f"{key}.lora_B.weight"] @ adapter[f"{key}.lora_A.weight"]
            )
        torch.testing.assert_close(after[name], tensor, rtol=1e-6, atol=1e-6)
    answers = [tools.generated(source, *ASKED) for source in (run.checkpoints()[-1], folder / "merged")]
    assert answers[0] == answers[1] != tools.generated(folder / "model", *ASKED)


@pytest.mark.long
def test_a_base_in_fp8_has_the_losses_of_products_in_fp8_of_the_files(folder):
    """On any number of workers, and after a resume. Without these products it is dequantized, and they differ."""
    file = tools.write_model(folder / "even", intermediate_size=32) / "model.safetensors"  # sizes of products in FP8
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    kind = (*NARROW, f"model.path={folder}/even", "model.dtype=bfloat16", "lora.base=fp8")
    found = {}
    for name, *more in (
        ("device", "engine.fp8=true", "lora.base=bf16"),
        ("held", "engine.fp8=true"),
        ("three", "engine.fp8=true", "engine.devices=cpu:3"),
        ("dequantized", "engine.fp8=false"),
    ):
        found[name] = tools.train_here(folder, *kind, *more, f"log.run_name={name}")
    steps = {name: tools.steps(run) for name, run in found.items()}
    assert steps["device"] == steps["held"] == steps["three"] != steps["dequantized"]
    assert tools.state(found["three"]) == tools.state(found["held"])
    resumed = ("log.run_name=more", f"save.resume={found['held'].checkpoint_path(2)}", "engine.fp8=true")
    again = tools.train_here(folder, *kind, *resumed)
    assert {step: steps["held"][step] for step in range(3, 7)} == tools.steps(again)


@pytest.mark.long
def test_questions_are_asked_of_the_dequantized_weights(folder):
    run = tools.train_here(folder, *NARROW, "eval.questions=3", "train.max_steps=2")
    assert len(tools.events(run, events.Evaluation)) == 2


def test_plan_shows_the_base_and_counts_its_bytes(folder):
    tools.write_config(folder)
    given = (
        "plan",
        "--config",
        folder / "run.toml",
        "model.path=qwen3-1.7b",
        "model.dtype=bfloat16",
        "train.method=lora",
    )
    sizes = {}
    for base in ("bf16", "nf4", "mxfp4", "int8", "fp8"):
        found = json.loads(tools.invoke(*given, f"lora.base={base}", "--json").output)
        assert found["model"]["base"] == base
        (sizes[base],) = (p["nbytes"] for p in found["memory"][0]["parts"] if p["name"].startswith("frozen weights"))
    matrices = 28 * 2048 * (2 * 2048 + 2 * 1024 + 3 * 6144)
    for base, each in (("nf4", 0.5625), ("mxfp4", 0.53125), ("int8", 1.03125)):
        assert sizes["bf16"] - sizes[base] == pytest.approx((2 - each) * matrices, abs=28 * 4096)
    scales = 28 * (2048 + 2 * 1024 + 2048 + 2 * 6144 + 2048)
    assert sizes["bf16"] - sizes["fp8"] == pytest.approx(matrices - 4 * scales, abs=28 * 4096)
    text = tools.invoke(*given, "lora.base=nf4").output
    assert "bfloat16, the base in nf4" in text and "frozen weights, matrices in nf4" in text


def test_mistakes_end_with_2(folder):
    tools.write_config(folder)
    for override, message in (
        ("train.method=full", "`lora.base`: only frozen weights can be quantized"),
        ("lora.base=mxfp4", 'no matrix of this model consists of whole blocks of mxfp4; use "bf16"'),
        ("lora.base=nf5", "lora.base"),
        ("lora.base=fp8 model.hold=map", 'files do not hold fp8, so model.hold = "map" cannot read it'),
        ("lora.double_quant=true", "unknown key `lora.double_quant`: it was removed"),
    ):
        result = tools.invoke("--config", folder / "run.toml", "lora.base=nf4", *override.split())
        assert result.exit_code == 2 and message in result.output, result.output


def test_dora_begins_at_the_lengths_of_the_dequantized_rows(folder):
    """So that, before the first update, it changes nothing."""
    once = ("train.max_steps=1", "save.save_steps=0")
    plainly = tools.train_here(folder, *NARROW, *once)
    dora = tools.train_here(folder, *NARROW, *once, "lora.use_dora=true", "log.run_name=dora")
    assert tools.steps(dora)[1][0] == pytest.approx(tools.steps(plainly)[1][0], rel=1e-6)
