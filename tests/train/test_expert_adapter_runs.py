"""Whole runs that train adapters of MLPs with experts: resumed, exported, merged, continued, planned, asked."""

import json
import signal

import pytest
import torch
from safetensors.torch import load_file

from rptrain.checkpoint.export import export
from rptrain.runs.records import events
from rptrain.utils.errors import UserError

from .. import run_tools as tools
from ..cases import long

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
WEIGHTS = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")  # of the first layer, and of the shared expert
WITH_WEIGHTS = (*LORA[:2], f"lora.target_parameters={['experts.gate_up_proj', 'down_proj', *WEIGHTS]}", LORA[-1])
MODELS = {"qwen3-moe": (EXPERTS, LORA), "glm4-moe": (tools.GLM, WITH_WEIGHTS)}
models = pytest.mark.parametrize(("folder", "lora"), MODELS.values(), ids=MODELS, indirect=["folder"])
IDS = torch.arange(20).view(2, 10)


@pytest.fixture
def folder(tmp_path, request):
    tools.write_model(tmp_path / "model", **getattr(request, "param", EXPERTS))
    return tmp_path


@models
def test_stock_peft_computes_what_was_trained_and_what_is_merged(folder, lora):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    def model(directory):
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, experts_implementation="eager")

    run = tools.train_here(folder, *lora)
    merged = export(run.path, folder / "merged", merge=True)
    with torch.no_grad():
        plain = model(folder / "model").eval()(IDS).logits
        adapted = PeftModel.from_pretrained(model(folder / "model"), run.model_path).eval()(IDS).logits
        torch.testing.assert_close(model(merged).eval()(IDS).logits, adapted, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(plain, adapted, rtol=1e-3, atol=1e-3)
    found = load_file(run.model_path / "adapter_model.safetensors")
    at = "base_model.model.model.layers.1.mlp"
    assert found[f"{at}.experts.base_layer.lora_B.weight"].shape == (24, 8)
    assert all(tensor.any() for tensor in found.values()), "every B has moved away from zero"
    if lora is not LORA:
        assert found[f"{at}.shared_experts.down_proj.lora_B.weight"].shape == (16, 2)
        assert found[f"{at.replace('1', '0')}.down_proj.lora_A.weight"].shape == (2, 24)
    asked = (["a", "bc"], 6, 0.0, 0, True)
    assert (
        tools.generated(run.path, *asked) == tools.generated(run.model_path, *asked) == tools.generated(merged, *asked)
    )


@pytest.mark.long
@models
def test_killed_and_resumed_on_another_number_of_workers(folder, lora, trainers):
    kind = (*lora, "optim.update=async", "model.dtype=bfloat16")
    assert trainers.train(folder, *kind, "engine.devices=cpu:1", event=5) == -signal.SIGKILL
    run = tools.train_here(folder, *kind)
    assert [event.step for event in tools.events(run, events.Resumed)] == [4]
    whole = tools.train_here(folder, *kind, "engine.devices=cpu:1", "log.run_name=whole")
    assert tools.steps(run) == tools.steps(whole)
    assert tools.state(run) == tools.state(whole)


@pytest.mark.parametrize(
    ("folder", "lora"), [MODELS["qwen3-moe"], long(*MODELS["glm4-moe"])], ids=MODELS, indirect=["folder"]
)
def test_an_adapter_is_continued(folder, lora):
    first = tools.train_here(folder, *lora)
    more = (f"lora.adapter={first.model_path}", "log.run_name=again", "optim.learning_rate=1e-30")
    again = tools.train_here(folder, *lora, *more)
    before, after = (load_file(run.model_path / "adapter_model.safetensors") for run in (first, again))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    with pytest.raises(UserError, match=r"mlp\.(experts\.base_layer|gate_proj)\.lora_A\.weight is not part of it"):
        tools.train_here(folder, *lora, *more, "lora.target_parameters=['down_proj']")


@pytest.mark.long
@pytest.mark.parametrize(
    ("folder", "lora", "elements"),
    [
        (*MODELS["qwen3-moe"], 2 * 4 * (16 + 24 + 12 + 16)),
        long(*MODELS["glm4-moe"], 4 * (16 + 24 + 12 + 16) + 3 * (16 + 24) + 3 * (16 + 12)),
    ],
    ids=MODELS,
    indirect=["folder"],
)
def test_plan_and_bench_count_them(folder, lora, elements):
    """`elements`: for each rank."""
    tools.write_config(folder)
    given = ("--config", folder / "run.toml", "model.dtype=bfloat16", "--json")

    def moments(*overrides):
        plan = json.loads(tools.invoke("plan", *given, *overrides, "lora.r=64").output)
        return next(part["nbytes"] for part in plan["memory"][0]["parts"] if part["name"] == "optimizer state")

    expected, pages = 8 * 64 * elements, 2 * 2 * 4096
    assert expected <= moments(*lora) - moments(lora[1]) <= expected + pages
    result = tools.invoke("bench", *given, *lora, "--steps", "2", "--warmup", "1", "--floor")
    assert result.exit_code == 0, result.output
