"""What a person gets wrong ends with 2 before memory is taken: one table of inputs, and the key or place that is named.

What each message says is the program's; that it names where to look is tested.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from . import run_tools as tools

Spoil = Callable[[Path], object]  # changes the folder, which has a `model` and a `run.toml`


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def taken(*arguments: object, **named: object) -> None:
        raise AssertionError("memory was taken for a run that cannot be")

    tools.write_model(tmp_path / "model")
    tools.write_config(tmp_path)
    monkeypatch.setattr("rptrain.train.session.ModelStore", taken)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def change(file: str, **changes: object) -> Spoil:
    """Other values of keys in a JSON file."""

    def spoil(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil


def write(file: str, content: str | bytes) -> Spoil:
    return lambda folder: (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())


def cut(file: str, size: int) -> Spoil:
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:size])


def delete(file: str) -> Spoil:
    return lambda folder: (folder / file).unlink()


def twice(file: str, key: str) -> Spoil:
    """A key of an object in a JSON file once more, before all others."""
    return lambda folder: (folder / file).write_text(f'{{"{key}": 1, {(folder / file).read_text().lstrip()[1:]}')


def pipe(file: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        os.mkfifo(folder / file)

    return spoil


def sparse(file: str) -> Spoil:
    """12 GiB that take no space on the disk."""

    def spoil(folder: Path) -> None:
        (folder / file).touch()
        os.truncate(folder / file, 12 << 30)

    return spoil


def own_template(value: object) -> Spoil:
    """A chat template in tokenizer_config.json alone."""

    def spoil(folder: Path) -> None:
        delete(TEMPLATE)(folder)
        change("model/tokenizer_config.json", chat_template=value)(folder)

    return spoil


def chat(question: str = "Spell backwards: ab", answer: str = "ba") -> str:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages}, ensure_ascii=False) + "\n"


CHAT = chat()
ONLY_A_QUESTION = '{"messages": [{"role": "user", "content": "ab"}]}\n'
LONE_SURROGATE = '{"messages": [{"role": "user", "content": "\\ud83d"}]}\n'
TEMPLATE, WEIGHTS = "model/chat_template.jinja", "model/model.safetensors"
ASKED, TASKS = "eval.questions=3", "data.train.0.path=builtin:tasks"
NOBODY = "~nosuchuser/x"
DEEP = {"config": '{"a":' * 900 + "1" + "}" * 900, "tokenizer": "[" * 100_000}

# Overrides, and what is named of them: mostly their key.
VALUES = [
    ("train.micro_batch_size=24", "train.micro_batch_size"),
    ("engine.round_size=3", "engine.round_size"),
    ("engine.devices=mps", "engine.devices"),
    ("engine.devices=cuda:0,0", "engine.devices"),
    ("data.max_length=1", "data.max_length"),
    ("optim.learning_rate=nan", "optim.learning_rate"),
    ("optim.learning_rate=0", "optim.learning_rate"),
    ("optim.betas=[0.9]", "optim.betas"),
    ("train.num_epochs=inf", "train.num_epochs"),
    ("train.max_steps=1e3", "train.max_steps"),
    ("log.run_name=a/b", "log.run_name"),
    ('log.run_name="a\\u0000b"', "log.run_name"),
    ("save.resume=nowhere", "nowhere"),
    ("engine.host_limit=1KiB", "engine.host_limit"),
    ("train.0=1", "train.0"),
    ("nonsense", "nonsense"),
    (f"model.path={NOBODY}", "model.path"),
    (f"lora.adapter={NOBODY}", "lora.adapter"),
    (f"save.output_dir={NOBODY}", "save.output_dir"),
    (f"data.train.0.path={NOBODY}", "data.train.0.path"),
    ("data.train.0.path=builtin:task", "builtin:task"),
    ("save.output_dir=run.toml", "save.output_dir"),
    ("save.output_dir=run.toml/inside", "save.output_dir"),
    ("save.output_dir=/proc/inside", "save.output_dir"),
    (f"save.output_dir={'x' * 300}", "save.output_dir"),
    ("data.train.0.path=model", "model"),
    (f"data.train.0.path={'x' * 5000}", "data.train.0.path"),
    (f"model.path={'x' * 5000}", "xxx"),
]
# What is wrong in the model's folder, and what is named.
MODELS = {
    "no-folder": (lambda folder: shutil.rmtree(folder / "model"), "model"),
    "no-config": (delete("model/config.json"), "model"),
    "cut-config": (write("model/config.json", "{"), "config.json"),
    "key-twice": (twice("model/config.json", "hidden_size"), "hidden_size"),
    "list": (write("model/config.json", "[]"), "config.json"),
    "architecture": (change("model/config.json", architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel"),
    "no-architecture": (change("model/config.json", architectures=[[1]]), "config.json"),
    "many-layers": (change("model/config.json", num_hidden_layers=10**9), "num_hidden_layers"),
    "no-width": (change("model/config.json", hidden_size=0), "hidden_size"),
    "a-layer-more": (change("model/config.json", num_hidden_layers=4), "model.layers.3.input_layernorm.weight"),
    "wider": (change("model/config.json", hidden_size=32), "model.embed_tokens.weight"),
    "no-weights": (delete(WEIGHTS), "model.safetensors"),
    "cut-weights": (cut(WEIGHTS, -10), "model.safetensors"),
    "empty-weights": (cut(WEIGHTS, 0), "model.safetensors"),
    "pipe": (pipe("model/LICENSE"), "model/LICENSE"),
    "pipe-beside": (pipe("model/generation_config.json"), "model/generation_config.json"),
    "pipe-tokenizer": (pipe("model/tokenizer.json"), "model/tokenizer.json"),
    "large-config": (sparse("model/config.json"), "config.json"),
    "large-license": (sparse("model/LICENSE"), "LICENSE"),
    "large-run": (sparse("run.toml"), "run.toml"),
}
# What is wrong with the tokenizer or the chat template, found with conversations of a file or with questions.
TOKENIZERS = {
    "deleted": (delete("model/tokenizer.json"), "tokenizer.json"),
    "cut-to-a-bracket": (write("model/tokenizer.json", "{"), "tokenizer"),
    "empty-object": (write("model/tokenizer.json", "{}"), "tokenizer"),
    "cut": (cut("model/tokenizer.json", 1000), "tokenizer"),
    "no-model": (change("model/tokenizer.json", model={}), "tokenizer"),
    "config-cut": (write("model/tokenizer_config.json", "{"), "tokenizer"),
    "max-length": (change("model/tokenizer_config.json", model_max_length="x"), "tokenizer"),
    "deep-config": (write("model/tokenizer_config.json", DEEP["config"]), "tokenizer"),
    "deep": (write("model/tokenizer.json", DEEP["tokenizer"]), "tokenizer"),
    "large-config": (sparse("model/tokenizer_config.json"), "tokenizer_config.json"),
    "end-token": (change("model/config.json", eos_token_id="x"), "eos_token_id"),
    "null": (change("model/config.json", use_cache=None), "use_cache"),
    "no-template": (delete(TEMPLATE), "data.chat_template"),
    "number-as-template": (own_template(5), "data.chat_template"),
    "templates-without-default": (own_template([{"name": "tool_use", "template": "x"}]), "data.chat_template"),
    "template-divides-by-zero": (write(TEMPLATE, "{{ 1 / 0 }}"), "chat template"),
    "template-with-half-characters": (write(TEMPLATE, "{{ '\\ud800' }}"), "chat template"),
    "template-without-end": (write(TEMPLATE, "{% if %}"), "chat template"),
}
# Data files, and the line, key or file that is named.
DATA = [
    ("empty.jsonl", "", "empty.jsonl"),
    ("blank.jsonl", "\n\n", "blank.jsonl"),
    ("empty.json", "[]", "empty.json"),
    ("bad.jsonl", CHAT * 98 + "{\n" * 2, "bad.jsonl:99"),
    ("bad.jsonl", CHAT * 98 + "{\n" * 2, "data.max_bad_rows"),
    ("deep.jsonl", CHAT * 10 + '{"a":' * 100_000 + "\n", "deep.jsonl:11"),
    ("deep.json", "[" * 100_000, "deep.json"),
    ("half.jsonl", CHAT * 10 + LONE_SURROGATE, "half.jsonl:11"),
    ("questions.jsonl", ONLY_A_QUESTION * 10, "supervised"),
    ("long.jsonl", chat("Spell backwards: " + "ab" * 40) * 10, "data.max_length"),
    ("latin.jsonl", chat("é").encode("latin-1") * 10, "latin.jsonl"),
    ("latin.txt", "é".encode("latin-1"), "latin.txt"),
    ("noise.jsonl", bytes(range(256)) * 4, "noise.jsonl"),
    ("table.csv", "question,answer\na,b\n", "table.csv"),
    ("other.jsonl", '{"question": "a"}\n' * 10, "question"),
    ("roles.jsonl", CHAT.replace("user", "tool") * 10, "tool"),
    ("spaces.txt", " \n", "spaces.txt"),
]
# Commands that do not train.
COMMANDS = [
    (("generate", NOBODY, "--prompt", "a"), NOBODY),
    (("export", "model", "--to", NOBODY), NOBODY),
    (("export", "nothing", "--to", "x"), "nothing"),
    (("--config", "none.toml"), "none.toml"),
    (("generate", "model", "--prompt", "a", "--temperature", "inf"), "--temperature"),
    (("generate", "model", "--prompt", "a", "--temperature", "nan"), "--temperature"),
    (("plan", "--config", "run.toml", "lora.target_modules=['qkv_proj']"), "qkv_proj"),
    (("--config", "run.toml", ASKED, "data.chat_template=none.jinja"), "none.jinja"),
    (("--config", "run.toml", ASKED, f"data.chat_template={WEIGHTS}"), WEIGHTS),
    (("--config", "run.toml", TASKS, "data.max_length=64", "data.chat_template='{{ 1 }}'"), "content"),
    (("--config", "run.toml", "train.method=lora", "model.path=tiny-tasks"), "pretrained weights"),
    (("--config", "run.toml", "train.method=lora", "train.freeze=['*']"), "train.freeze"),
    (("plan", "--config", "run.toml", "model.hold=map"), "model.hold"),
    (("train", "--config", "run.toml", "model.hold=map", "lora.r=2", "lora.base=nf4"), "lora.base"),
    (("train", "--config", "run.toml", "model.hold=map", "lora.r=2", "model.init=random"), "model.hold"),
    (("train", "--config", "run.toml", "model.hold=map", "lora.r=2", "model.dtype=bfloat16"), "model.dtype"),
    (("bench", "--config", "run.toml", "model.hold=map", "lora.r=2"), "model.hold"),
]


def refused(named: str, *arguments: str) -> str:
    result = tools.invoke(*arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert "Traceback" not in result.stderr and "Error(" not in result.stderr
    assert named in result.stderr, result.stderr
    return result.stderr


@pytest.mark.parametrize(("override", "named"), VALUES)
def test_values(folder, override, named):
    refused(named, "--config", "run.toml", override)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("spoil", "named"), MODELS.values(), ids=MODELS)
def test_models(folder, spoil, named):
    spoil(folder)
    refused(named, "--config", "run.toml")


@pytest.mark.sample(16, gate=36)
@pytest.mark.parametrize("data", ["file", "questions"])
@pytest.mark.parametrize(("spoil", "named"), TOKENIZERS.values(), ids=TOKENIZERS)
def test_tokenizers(folder, spoil, named, data):
    spoil(folder)
    write("chats.jsonl", CHAT * 10)(folder)
    given = [ASKED] if data == "questions" else ["data.train.0.path=chats.jsonl", "data.max_length=64"]
    refused(named, "--config", "run.toml", *given)


def test_a_tokenizer_of_another_model(folder):
    shutil.rmtree(folder / "model")
    tools.write_model(folder / "model", vocab_size=10)
    write("chats.jsonl", CHAT * 10)(folder)
    refused("vocab_size", "--config", "run.toml", "data.train.0.path=chats.jsonl", "data.max_length=64")


@pytest.mark.parametrize(("name", "content", "named"), DATA)
def test_data_files(folder, name, content, named):
    write(name, content)(folder)
    refused(named, "--config", "run.toml", f"data.train.0.path={name}", "data.max_length=64")


@pytest.mark.sample(8, gate=17)
@pytest.mark.parametrize(("arguments", "named"), COMMANDS)
def test_commands(folder, arguments, named):
    refused(named, *arguments)
