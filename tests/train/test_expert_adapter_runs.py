"""Whole runs that train adapters of experts: resumed, exported, merged, gone on from, planned, asked."""

import json
import signal

import pytest
import torch
from safetensors.torch import load_file

from rptrain.checkpoint.export import export
from rptrain.runs import events
from rptrain.utils.errors import UserError

from .. import run_tools as tools

LORA = (
    "lora.r=2",
    "lora.target_modules=['q_proj']",
    "lora.target_parameters=['mlp.experts.gate_up_proj', 'mlp.experts.down_proj']",
    "save.save_steps=2",
)
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "norm_topk_prob": True,
    "num_hidden_layers": 2,
}
IDS = torch.arange(20).view(2, 10)


@pytest.fixture
def folder(tmp_path):
    tools.write_model(tmp_path / "model", **EXPERTS)
    return tmp_path


def test_stock_peft_computes_what_was_trained_and_what_is_merged(folder):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    def model(directory):
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, experts_implementation="eager")

    run = tools.train_here(folder, *LORA)
    merged = export(run.path, folder / "merged", merge=True)
    with torch.no_grad():
        plain = model(folder / "model").eval()(IDS).logits
        adapted = PeftModel.from_pretrained(model(folder / "model"), run.model_path).eval()(IDS).logits
        torch.testing.assert_close(model(merged).eval()(IDS).logits, adapted, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(plain, adapted, rtol=1e-3, atol=1e-3)
    found = load_file(run.model_path / "adapter_model.safetensors")
    at = "base_model.model.model.layers.0.mlp.experts"
    assert found[f"{at}.base_layer.lora_B.weight"].shape == (24, 8) and found[f"{at}.lora_B.weight"].any()
    asked = (["a", "bc"], 6, 0.0, 0, True)
    assert (
        tools.generated(run.path, *asked) == tools.generated(run.model_path, *asked) == tools.generated(merged, *asked)
    )


@pytest.mark.long
def test_killed_and_resumed_on_another_number_of_workers(folder, trainers):
    kind = (*LORA, "optim.update=async", "model.dtype=bfloat16")
    assert trainers.train(folder, *kind, "engine.devices=cpu:1", event=5) == -signal.SIGKILL
    run = tools.train_here(folder, *kind)
    assert [event.step for event in tools.events(run, events.Resumed)] == [4]
    whole = tools.train_here(folder, *kind, "engine.devices=cpu:1", "log.run_name=whole")
    assert tools.steps(run) == tools.steps(whole)
    assert tools.state(run) == tools.state(whole)


def test_an_adapter_is_gone_on_from(folder):
    first = tools.train_here(folder, *LORA)
    more = (f"lora.adapter={first.model_path}", "log.run_name=again", "optim.learning_rate=1e-30")
    again = tools.train_here(folder, *LORA, *more)
    before, after = (load_file(run.model_path / "adapter_model.safetensors") for run in (first, again))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(UserError, match=r"experts.base_layer.lora_A.weight is not part of it"):
        tools.train_here(folder, *LORA, *more, "lora.target_parameters=['down_proj']")


def test_plan_and_bench_count_them(folder):
    tools.write_config(folder)
    given = ("--config", folder / "run.toml", "model.dtype=bfloat16", "--json")

    def moments(*overrides):
        plan = json.loads(tools.invoke("plan", *given, *overrides, "lora.r=64").output)
        return next(part["nbytes"] for part in plan["memory"][0]["parts"] if part["name"] == "optimizer state")

    ranks, layers, pages = 4 * 64, 2, 2 * 2 * 4096
    expected = 8 * layers * ranks * (16 + 24 + 12 + 16)
    assert expected <= moments(*LORA) - moments(LORA[1]) <= expected + pages
    result = tools.invoke("bench", *given, *LORA, "--steps", "2", "--warmup", "1", "--floor")
    assert result.exit_code == 0, result.output
