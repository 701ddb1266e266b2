"""Whole runs that train adapters: killed and resumed, on other workers, exported, merged, continued, asked."""

import json
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file

from rptrain.checkpoint.export import export
from rptrain.checkpoint.export_progress import base_format, loading_code
from rptrain.runs.records import events
from rptrain.utils.errors import UserError

from .. import run_tools as tools
from ..cases import grid

LORA = (
    "lora.r=3",
    "lora.lora_alpha=6",
    "lora.lora_dropout=0.2",
    "lora.modules_to_save=['model.norm']",
    "save.save_steps=2",
)
IDS = torch.arange(20).view(2, 10)


def logits(directory, folder=None):
    """Of stock transformers; with `folder`, of stock PEFT on the model in it."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model" if folder else directory, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, directory) if folder else model
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.mark.parametrize(("update", "dtype"), [("async", "bfloat16"), grid("sync", "float32")])
def test_killed_and_resumed_on_another_number_of_workers(folder, trainers, update, dtype):
    kind = (f"optim.update={update}", f"model.dtype={dtype}", *LORA)
    assert trainers.train(folder, *kind, "engine.devices=cpu:1", event=5) == -signal.SIGKILL
    run = tools.train_here(folder, *kind, "engine.devices=cpu:2")
    assert [event.step for event in tools.events(run, events.Resumed)] == [4]
    whole = tools.train_here(folder, *kind, "engine.devices=cpu:1", "log.run_name=whole")
    assert tools.steps(run) == tools.steps(whole)
    assert tools.state(run) == tools.state(whole)


def test_what_a_run_leaves(folder):
    run = tools.train_here(folder, *LORA)
    assert tools.steps(run)[6][0] != tools.steps(run)[1][0]
    names = {file.name.split("-", 1)[1].removesuffix(".safetensors") for file in run.checkpoints()[-1].glob("units/*")}
    assert names == {"norm", "layers.0.lora", "layers.1.lora", "layers.2.lora"}
    tensors = load_file(run.model_path / "adapter_model.safetensors")
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in tensors
    assert len(tensors) == 3 * 7 * 2 + 1
    assert all(tensor.any() for tensor in tensors.values()), "every B has moved away from zero"
    config = json.loads((run.model_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder / "model")
    present = {path.name for path in run.model_path.iterdir()}
    assert "tokenizer.json" in present and not present & {"config.json", "model.safetensors"}


@pytest.mark.long
@pytest.mark.parametrize("kind", [(), ("lora.use_dora=true", "lora.lora_dropout=0")], ids=["lora", "dora"])
def test_stock_peft_computes_what_was_trained_and_what_is_merged(folder, kind):
    from transformers import AutoModelForCausalLM

    run = tools.train_here(folder, *LORA, *kind)
    merged = export(run.path, folder / "merged", merge=True)
    adapted = logits(run.model_path, folder)
    torch.testing.assert_close(logits(merged), adapted, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits(folder / "model"), adapted, rtol=1e-3, atol=1e-3)
    if not kind:  # transformers finds the base by itself, but reads no magnitudes
        with torch.no_grad():
            assert torch.equal(AutoModelForCausalLM.from_pretrained(run.model_path).eval()(IDS).logits, adapted)


def test_exports_are_made_of_the_master_weights(folder):
    run = tools.train_here(folder, *LORA, "model.dtype=bfloat16")
    exported = export(run.checkpoints()[-1], folder / "exported")
    name = "adapter_model.safetensors"
    assert (exported / name).read_bytes() == (run.model_path / name).read_bytes()
    wide = load_file(export(run.path, folder / "wide", "float32") / name)
    narrow = load_file(exported / name)
    assert all(torch.equal(wide[key].bfloat16(), narrow[key]) for key in wide)
    assert not all(torch.equal(wide[key], narrow[key].float()) for key in wide)
    merged = load_file(export(run.path, folder / "merged", "float32", merge=True) / "model.safetensors")
    base, at = load_file(folder / "model/model.safetensors"), "model.layers.1.self_attn.k_proj"
    low, high = (wide[f"base_model.model.{at}.lora_{ab}.weight"] for ab in "AB")
    expected = base[f"{at}.weight"].bfloat16().float() + 6 / 3 * high @ low
    torch.testing.assert_close(merged[f"{at}.weight"], expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(merged["model.norm.weight"], wide["base_model.model.model.norm.weight"])
    half = load_file(export(run.path, folder / "half", merge=True) / "model.safetensors")
    assert all(torch.equal(half[key], tensor.bfloat16()) for key, tensor in merged.items())


def test_an_adapter_is_exported_without_its_base(folder):
    run = tools.train_here(folder, *LORA)
    (folder / "model/model.safetensors").unlink()
    exported = export(run.path, folder / "exported")
    assert weights_of(exported) == weights_of(run.model_path)
    with pytest.raises(UserError, match=r"model holds neither model\.safetensors nor"):
        export(run.path, folder / "merged", merge=True)
    (folder / "model").rename(folder / "moved")
    with pytest.raises(UserError, match=r"the model's folder .*/model does not exist: restore it"):
        export(run.path, folder / "merged", merge=True)


def weights_of(directory):
    return (directory / "adapter_model.safetensors").read_bytes()


def test_the_told_code_loads_an_adapter_and_the_merged_model(folder):
    run = tools.train_here(folder, *LORA, "optim.learning_rate=0.1")
    logits = []
    for to, merge in ((folder / "exported", False), (folder / "merged", True)):
        loaded: dict = {}
        exec(loading_code(export(run.path, to, "float32", merge=merge)), loaded)
        with torch.no_grad():
            logits.append(loaded["model"].float()(IDS).logits)
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-4)


def test_answers_of_a_run_a_checkpoint_and_the_merged_model(folder):
    run = tools.train_here(folder, *LORA, "optim.learning_rate=0.1")
    asked = (["a", "bc"], 6, 0.0, 0, True)
    merged = export(run.path, folder / "merged", merge=True)
    answers = [tools.generated(source, *asked) for source in (run.path, run.checkpoints()[-1], run.model_path, merged)]
    assert answers[0] == answers[1] == answers[2] == answers[3] != tools.generated(folder / "model", *asked)


@pytest.mark.sample(1, gate=2)
@pytest.mark.parametrize("base", ["bf16", "nf4"])
def test_where_the_base_of_an_adapter_is_can_be_written_into_it(folder, base):
    run = tools.train_here(folder, *LORA, f"lora.base={base}")
    asked = (["a"], 2, 0.0, 0, True)
    answers = tools.generated(run.model_path, *asked)
    (folder / "model").rename(folder / "elsewhere")
    with pytest.raises(UserError, match=r"set base_model_name_or_path in .* to its directory \(no model '"):
        tools.generated(run.model_path, *asked)
    file = run.model_path / "adapter_config.json"
    text = file.read_text()
    file.write_text(text.replace(f"{folder}/model", "~nosuchuser/model"))
    with pytest.raises(UserError, match=r"to its directory \(~nosuchuser/model: the user"):
        tools.generated(run.model_path, *asked)
    file.write_text(text.replace(f"{folder}/model", f"{folder}/elsewhere"))
    assert tools.generated(run.model_path, *asked) == answers
    assert base_format(run.model_path) == base, "whatever was written into the adapter"


@pytest.mark.sample(1, gate=2)
@pytest.mark.parametrize("kind", [(), ("lora.use_dora=true", "lora.lora_dropout=0")], ids=["lora", "dora"])
def test_an_adapter_is_continued(folder, kind):
    first = tools.train_here(folder, *LORA, *kind)
    again = tools.train_here(
        folder, *LORA, *kind, f"lora.adapter={first.model_path}", "log.run_name=again", "optim.learning_rate=1e-30"
    )
    before, after = (load_file(run.model_path / "adapter_model.safetensors") for run in (first, again))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.long
def test_a_resumed_run_needs_the_adapter_that_it_began_with_no_more(folder, trainers):
    first = tools.train_here(folder, *LORA)
    more = (f"lora.adapter={first.model_path}", "log.run_name=again")
    assert trainers.train(folder, *LORA, *more, event=5) == -signal.SIGKILL
    shutil.rmtree(first.model_path)
    again = tools.train_here(folder, *LORA, *more)
    assert [event.step for event in tools.events(again, events.Resumed)] == [4]


def test_an_adapter_that_does_not_fit_is_found_before_memory_is_taken(folder):
    first = tools.train_here(folder, *LORA)
    more = (f"lora.adapter={first.model_path}", "log.run_name=again")
    with pytest.raises(UserError, match=r"lora.r is 4, the adapter's is 3. Set them to the same values"):
        tools.train_here(folder, *LORA, *more, "lora.r=4")
    with pytest.raises(UserError, match=r"up_proj.lora_A.weight is not part of it"):
        tools.train_here(folder, *LORA, *more, "lora.target_modules=['q_proj']")
    with pytest.raises(UserError, match=r"is not an adapter: it has no adapter_config.json"):
        tools.train_here(folder, *LORA, *more, f"lora.adapter={folder}")
    tools.write_model(folder / "other", intermediate_size=32)
    with pytest.raises(UserError, match=r"up_proj.lora_B.weight has shape \[24, 3\], not \[32, 3\]"):
        tools.train_here(folder, *LORA, *more, f"model.path={folder}/other")
    assert not (folder / "runs/again").exists()


@pytest.mark.long
@pytest.mark.parametrize("base", ["bf16", "nf4"])
def test_a_base_that_is_not_as_it_was_is_refused(folder, base):
    """Found by the weights, or by the codes and scales."""
    run = tools.train_here(folder, *LORA, f"lora.base={base}")
    file = folder / "model/model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.2.mlp.up_proj.weight"][0, 0] += 1
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"frozen weights of layers\.2 changed since the run started"):
        export(run.path, folder / "merged", merge=True)
    assert not (folder / "merged").exists()


@pytest.mark.long
def test_plan_counts_two_bytes_a_frozen_parameter_and_bench_runs(folder):
    tools.write_config(folder)
    given = ("--config", folder / "run.toml", *LORA, "model.dtype=bfloat16", "--json")
    plan = json.loads(tools.invoke("plan", *given).output)
    parts = {part["name"]: part["nbytes"] for part in plan["memory"][0]["parts"]}
    files = load_file(folder / "model/model.safetensors").values()
    base = 2 * sum(tensor.numel() for tensor in files)
    assert base - 2 * 16 <= parts["frozen weights"] <= base + 5 * 4096  # without the norm; in whole pages
    result = tools.invoke("bench", *given, "--steps", "2", "--warmup", "1", "--floor")
    assert result.exit_code == 0, result.output


@pytest.mark.long
def test_the_bundled_example_is_continued_with_adapters(tmp_path):
    """Trained whole for some steps, then adapted: `rptrain --config` on what the first run left."""
    example = tools.Path(__file__).parents[2] / "rptrain.toml"
    shared = (f"save.output_dir={tmp_path}/runs", "eval.questions=0", "train.max_steps=4", "engine.devices=cpu:2")
    assert tools.invoke("--config", example, *shared, "--json").exit_code == 0
    text = example.read_text().replace('"tiny-tasks" #', f'"{tmp_path}/runs/tiny-tasks/model" #')
    config = tmp_path / "adapt.toml"
    config.write_text(text.replace('method = "full"', 'method = "lora"') + "\n[lora]\nr = 4\nlora_dropout = 0.1\n")
    result = tools.invoke("--config", config, *shared, "log.run_name=adapted", "--json")
    assert result.exit_code == 0, result.output
    model = tools.Path(json.loads(result.output)["model"])
    assert len(load_file(model / "adapter_model.safetensors")) == 2 * 7 * 2
    asked = tools.invoke("generate", model, "--prompt", "Spell backwards: abcd", "--max-new-tokens", "3")
    assert asked.exit_code == 0, asked.output
