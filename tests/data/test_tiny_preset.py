import json
from importlib.resources import files
from pathlib import Path

import pytest

from benchmarks import make_tiny_tasks
from rptrain.config.schema import Data, TrainSet
from rptrain.data.loader import load_tokenizer, prepare
from rptrain.data.tasks import questions
from rptrain.kernels.batch import IGNORED

PRESET = Path(str(files("rptrain.models.presets"))) / "tiny-tasks"


@pytest.fixture(scope="module")
def tiny():
    return load_tokenizer(PRESET)


def test_the_committed_files_are_what_the_script_makes(tmp_path):
    make_tiny_tasks.make(tmp_path)
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_bytes() for path in PRESET.iterdir()}


def test_config_and_tokenizer_agree(tiny):
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = json.loads((PRESET / "config.json").read_text())
    assert config["vocab_size"] == len(tiny)
    assert (config["eos_token_id"], config["pad_token_id"]) == (tiny.eos_token_id, tiny.pad_token_id)
    assert tiny.eos_token == "<|end|>"
    model = AutoModelForCausalLM.from_config(Qwen3Config.from_pretrained(PRESET))
    assert sum(parameter.numel() for parameter in model.parameters()) == 407_424


def test_one_token_for_a_phrase_and_for_each_character(tiny):
    for question in questions("test", 60):
        text = tiny.apply_chat_template(question.messages, tokenize=False)
        tokens = tiny(text, add_special_tokens=False)["input_ids"]
        size = len(question.answer)
        assert len(tokens) == 2 * size + 5 and tokens[-1] == tiny.eos_token_id
        assert tiny.decode(tokens[-size - 1 : -1]) == question.answer
        assert tiny.decode(tokens) == text


def test_any_printable_text_comes_back(tiny):
    text = "".join(map(chr, range(32, 127))) + "  two  spaces, n't !\nSort the digits: 21"
    tokens = tiny(text, add_special_tokens=False)["input_ids"]
    assert tiny.decode(tokens) == text and tiny.unk_token_id not in tokens
    assert tiny.decode(tiny("né", add_special_tokens=False)["input_ids"]) == "n<|unknown|>"


def test_generation_prompt(tiny):
    question = questions("test", 1)[0]
    prompt = tiny.apply_chat_template(question.messages[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == f"<|user|>{question.prompt}<|end|><|assistant|>"


def test_the_built_in_tasks_are_supervised_in_the_answers(tiny):
    rows = prepare(Data(train=[TrainSet(path="builtin:tasks", split="test")], max_length=26), tiny)
    labels = rows.take(range(len(rows)))[1]
    answers = tiny.decode(labels[labels != IGNORED]).removesuffix("<|end|>").split("<|end|>")
    assert sorted(answers) == sorted(question.answer for question in questions("test", 500))
    assert rows.tokens > 0.96 * len(rows) * 26
