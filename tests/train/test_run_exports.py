"""What a run leaves: transformers reads it and answers as we do, in other types too."""

import json
from pathlib import Path

import pytest
import torch

from rptrain.kernels.batch import MicroBatch
from rptrain.models.families import registry
from rptrain.models.layers.rope import RotaryTables
from rptrain.models.weights import pretrained

from .. import run_tools as tools
from ..cases import grid, long
from ..families import FAMILIES


def our_logits(directory: Path, ids: torch.Tensor) -> torch.Tensor:
    """[tokens, vocabulary] of one sequence, by our layers, from the weights in a model directory."""
    spec = registry.build(registry.model_config(directory))
    files = pretrained.check(directory, spec)
    dtype = files.tensors[spec.units[0].params[0].parts[0].key].dtype
    params = [unit.views(torch.zeros(unit.numel, dtype=unit.dtype_in(dtype))) for unit in spec.units]
    pretrained.load(files, spec, lambda unit, name: params[unit][name])

    def of(layer) -> dict[str, torch.Tensor]:
        return {name: tensor for unit in layer.units for name, tensor in params[unit].items()}

    positions = torch.arange(len(ids))
    rotations = RotaryTables(spec.rotaries, torch.float32, torch.device("cpu")).at(positions)
    ends = torch.tensor([0, len(ids)], dtype=torch.int32)
    mb = MicroBatch(1, len(ids), positions, torch.full_like(ids, -100), ends, len(ids), True, rotations)
    x = params[0]["embed"][ids]
    for layer in spec.layers:
        x = layer.forward(of(layer), x, mb)
    return spec.head.logits(of(spec.head), x)


QUESTIONS = ["Spell backwards: abc", "Sort the digits: 41", "Write in capitals: xyz"]


MODELS = {kind: {"tie_word_embeddings": False, **cases.run} for kind, cases in FAMILIES.items()}


@pytest.mark.sample(8, gate=len(MODELS) + 1)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *(long(kind, "float32") if FAMILIES[kind].slow else (kind, "float32") for kind in MODELS),
        long("qwen3", "bfloat16"),
        grid("llama", "float16"),
    ],
    ids=[*MODELS, "qwen3-bf16", "llama-fp16"],
)
def test_transformers_reads_what_we_write(tmp_path, kind, dtype):
    """The model folder and an export are the same model, in which nothing is missing, to transformers and to us."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    architectures = [registry.MODEL_TYPES[kind]]
    tools.write_model(tmp_path / "model", model_type=kind, architectures=architectures, **MODELS[kind])
    run = tools.train_here(tmp_path, f"model.dtype={dtype}", "optim.learning_rate=3e-2")
    exported = tmp_path / "exported"
    written = tools.invoke("export", run.path, "--to", exported)
    assert (written.exit_code, written.stdout) == (0, f"{exported}\n")
    assert (exported / "model.safetensors").read_bytes() == tools.state(run)["model.safetensors"]

    prompts = [*QUESTIONS[:2], f"{{}} {QUESTIONS[2]}"]
    texts = {}
    for directory in (run.model_path, exported):
        model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
        model.eval()
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert str(model.dtype) == f"torch.{dtype}"
        assert model.config.tie_word_embeddings is MODELS[kind]["tie_word_embeddings"]
        tokenizer = AutoTokenizer.from_pretrained(directory)
        ids = torch.tensor(tokenizer(" ".join(prompts), add_special_tokens=False)["input_ids"])
        tolerance = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.01}[dtype]
        with torch.no_grad():
            theirs = model(ids[None]).logits[0]
        assert theirs.std() > 0.1  # not all alike
        torch.testing.assert_close(our_logits(directory, ids), theirs, rtol=tolerance, atol=tolerance)
        texts[directory] = [their_answer(model, tokenizer, prompt) for prompt in prompts]
    assert texts[run.model_path] == texts[exported]
    assert len(set(texts[exported])) > 1

    if dtype == "float32":  # in 16 bits their sums and ours differ, and a tie may be broken otherwise
        for source in (run.path, run.checkpoints()[-1], exported, run.model_path):
            assert our_answers(source, prompts) == texts[exported]
    else:
        answers = [our_answers(source, prompts) for source in (run.path, run.checkpoints()[-1], exported)]
        assert answers[0] == answers[1] == answers[2]


def their_answer(model, tokenizer, prompt: str) -> str:
    chat = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def our_answers(source: Path, prompts: list[str]) -> list[str]:
    return tools.generated(source, prompts, 12, 0.0, 0, raw=False)


def test_a_template_of_ones_own_goes_along(folder):
    """Into the data, the questions that are asked, the checkpoints and the model."""
    template = "{% for m in messages %}<|{{ m.role }}|>[{{ m.content }}]<|end|>{% endfor %}"
    template += "{% if add_generation_prompt %}<|assistant|>[{% endif %}"
    (folder / "own.jinja").write_text(template)
    (folder / "model/chat_template.jinja").unlink()
    sizes = ("data.max_length=64", "train.max_steps=1", "eval.questions=3")
    run = tools.train_here(
        folder, tools.write_chats(folder / "chats.jsonl"), f"data.chat_template={folder}/own.jinja", *sizes
    )
    for directory in (run.model_path, run.checkpoints()[-1] / "base"):
        assert (directory / "chat_template.jinja").read_text() == template
    assert our_answers(run.path, QUESTIONS) == our_answers(run.checkpoints()[-1], QUESTIONS)


def test_a_template_of_ones_own_replaces_the_models_in_the_export_of_an_earlier_checkpoint(folder, monkeypatch):
    """Earlier versions left the model's own in the tokenizer_config.json of checkpoints, which other readers prefer."""
    template = "{% for m in messages %}<|{{ m.role }}|>[{{ m.content }}]<|end|>{% endfor %}"
    file = folder / "model/tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": "old"}))
    monkeypatch.setattr("rptrain.checkpoint.state.with_replaced", lambda files, *_: files)
    chats = tools.write_chats(folder / "chats.jsonl")
    (folder / "own.jinja").write_text(template)
    own = f"data.chat_template={folder}/own.jinja"
    run = tools.train_here(folder, chats, own, "data.max_length=64", "train.max_steps=1")
    saved, exported = (
        json.loads((directory / "tokenizer_config.json").read_text())["chat_template"]
        for directory in (run.checkpoints()[-1] / "base", run.model_path)
    )
    assert (saved, exported) == ("old", template)
    assert (run.model_path / "chat_template.jinja").read_text() == template


def test_generate_as_a_command(folder):
    run = tools.train_here(folder, "train.max_steps=1")
    prompts = [argument for question in QUESTIONS for argument in ("--prompt", question)]
    shown = tools.invoke("generate", run.path, *prompts, "--max-new-tokens", "12", "--json")
    expected = our_answers(run.path, QUESTIONS)
    assert json.loads(shown.stdout) == [
        {"prompt": question, "text": text} for question, text in zip(QUESTIONS, expected, strict=True)
    ]


def test_an_export_in_another_type_comes_from_the_exact_weights(folder):
    """A bfloat16 run holds float32 master weights; a float32 export shows them, not the rounded ones."""
    from safetensors.torch import load_file

    from rptrain.checkpoint.export import export

    run = tools.train_here(folder, "model.dtype=bfloat16")
    exact = load_file(export(run.path, folder / "exact", "float32") / "model.safetensors")
    rounded = load_file(run.model_path / "model.safetensors")
    assert exact.keys() == rounded.keys()
    for name, tensor in exact.items():
        up = ((tensor.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
        assert torch.equal(up, rounded[name]), name
    assert any(not torch.equal(tensor, rounded[name].float()) for name, tensor in exact.items())
