"""Runs whose replies end with a token that is not an EOS token of the base model: exports and answers stop on it."""

import json
from pathlib import Path

import pytest
import torch

import rptrain.train.trainer
from rptrain.checkpoint.export import export
from rptrain.checkpoint.state import read_state
from rptrain.data.eos import GENERATION
from rptrain.data.loader import load_tokenizer
from rptrain.inference.free_memory import free_memory
from rptrain.inference.generate import Request, stream_text
from rptrain.inference.load import LoadedChat
from rptrain.inference.model import find_model
from rptrain.inference.settings import AnswerSettings
from rptrain.inference.weights import dense
from rptrain.models.decode.generate import generate
from rptrain.runs.records import events
from rptrain.train.job import prepare_job

from .. import run_tools as tools

EOS, END = 1, 2  # of the base model; of its template
SAID = "replies end with <|end|>, which is not an EOS token of the model: the export's generation_config.json will list"
PROMPT, MOST = "2 + 2?", 8
CHAT = {"messages": [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": "4"}]}
SETTINGS = ("data.max_length=64", "train.max_steps=2", "train.global_batch_size=16", "eval.questions=1")
LORA = ("lora.r=2", "lora.lora_alpha=4")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tools.write_model(tmp_path / "model", eos_token_id=EOS)
    for name, keys in ((GENERATION, {"eos_token_id": EOS}), ("tokenizer_config.json", {"eos_token": "<|unknown|>"})):
        file = model / name
        file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    (tmp_path / "chats.jsonl").write_text(json.dumps(CHAT))
    return tmp_path


def settings(folder: Path) -> tuple[str, ...]:
    return f"data.train.0.path={folder}/chats.jsonl", *SETTINGS


def listed(directory: Path) -> list[int]:
    return json.loads((directory / GENERATION).read_text())["eos_token_id"]


def length(source: Path) -> int:
    """The tokens of an answer of `rptrain generate`, the one that ends it included."""
    *pieces, _ = stream_text(Request(source, [PROMPT], MOST), free_memory())
    return len(pieces)


def eos_ids(source: Path) -> frozenset[int]:
    return find_model(source).eos_ids


@pytest.mark.sample(1, gate=2)
@pytest.mark.parametrize("method", [(), LORA], ids=["full", "lora"])
def test_exports_and_answers_stop_on_the_end_of_replies(folder, method, monkeypatch, caplog):
    asked, ask = [], rptrain.train.trainer.ask_questions
    monkeypatch.setattr(rptrain.train.trainer, "ask_questions", lambda *given: asked.append(given[-1]) or ask(*given))
    run = tools.train_here(folder, *settings(folder), *method)
    assert sum(SAID in record.getMessage() for record in caplog.records) == 1
    assert asked == [{EOS, END}] * 2
    assert read_state(run.checkpoints()[-1])["meta"]["ends"] == [END]
    exports = [run.model_path, export(run.path, folder / "exported")]
    exports += [export(run.path, folder / "merged", merge=True)] if method else []
    assert [listed(directory) for directory in exports] == [[EOS, END]] * len(exports)
    sources = (run.path, run.checkpoints()[-1], *exports)
    assert {eos_ids(source) for source in sources} == {frozenset({EOS, END})}
    assert eos_ids(folder / "model") == {EOS}


def test_answers_end_where_generation_config_alone_says_so(folder):
    """Of a model, a run, its checkpoint, its adapter and its merged export; in a conversation too."""
    model = find_model(folder / "model")
    prompt = load_tokenizer(folder / "model").apply_chat_template([CHAT["messages"][0]], add_generation_prompt=True)
    (tokens,) = generate(model.spec, dense(model, torch.device("cpu")), [prompt["input_ids"]], MOST)
    count = next(place for place in range(2, MOST) if tokens[place - 1] not in tokens[: place - 1])
    text = load_tokenizer(folder / "model").decode(tokens[: count - 1], skip_special_tokens=True)
    assert length(folder / "model") == MOST
    (folder / "model" / GENERATION).write_text(json.dumps({"eos_token_id": [EOS, tokens[count - 1]]}))
    run = tools.train_here(folder, "train.max_steps=1", "optim.learning_rate=1e-30", *LORA)  # answers as its base does
    exports = [export(run.path, folder / "adapter"), export(run.path, folder / "merged", merge=True)]
    for source in (folder / "model", run.path, run.checkpoints()[-1], run.model_path, *exports):
        loaded = LoadedChat(source, free_memory())
        loaded.chat.settings = AnswerSettings(0, 1, MOST)
        said = "".join(loaded.chat.ask(PROMPT))
        assert said == tools.generated(source, [PROMPT], MOST, 0, 0, False)[0] == text
        speed = loaded.chat.tuned.speed
        assert speed is not None and (length(source), speed.tokens) == (count, count), source


def test_a_resumed_run_finds_them_in_its_data(folder):
    first = tools.train_here(folder, *settings(folder), "save.save_steps=1")
    run = tools.train_here(folder, *settings(folder), f"save.resume={first.checkpoint_path(1)}")
    assert tools.events(run, events.Resumed) and listed(run.model_path) == [EOS, END]


def test_the_plan_names_them(folder):
    tools.write_config(folder)
    planned = tools.invoke("plan", "--config", str(folder / "run.toml"), "--json", *settings(folder))
    (found,) = json.loads(planned.stdout)["data_warnings"]
    assert found.startswith(SAID)


def test_the_tokenizers_eos_is_listed_too(folder):
    """It ends texts, and `generate` of transformers only stops on what generation_config.json lists."""
    (folder / "texts.jsonl").write_text('{"text": "abc"}')
    (folder / "model" / GENERATION).write_text(json.dumps({"eos_token_id": [5]}))
    job = prepare_job(tools.write_config(folder, f"data.train.0.path={folder}/texts.jsonl").config)
    assert job.ends == (EOS,) and job.eos_ids == {EOS, 5}
    job = prepare_job(tools.write_config(folder).config)
    assert job.ends == () and job.tokenizer is None
