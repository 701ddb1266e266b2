"""The EOS ids of a model, and those that training adds."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from rptrain.data.eos import added, eos_ids, generation_config, sentence, stops
from rptrain.utils.errors import UserError

CONFIG = {"architectures": ["LlamaForCausalLM"], "eos_token_id": 2, "pad_token_id": 0}
TOWER = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "eos_token_id": None,
    "text_config": {"model_type": "mistral", "eos_token_id": [2, 3]},
}


def tokenizer(eos: int | None) -> SimpleNamespace:
    return SimpleNamespace(eos_token_id=eos, convert_ids_to_tokens=lambda token: f"<|{token}|>")


def write(folder: Path, **keys: object) -> None:
    (folder / "generation_config.json").write_text(json.dumps(keys))


def test_files_and_the_tokenizer_name_eos_ids(tmp_path: Path):
    assert eos_ids(tmp_path, {}, None) == eos_ids(tmp_path, {}, tokenizer(None)) == frozenset()
    assert eos_ids(tmp_path, CONFIG, tokenizer(5)) == {2, 5}
    write(tmp_path, eos_token_id=[7, 2])
    assert eos_ids(tmp_path, CONFIG, tokenizer(5)) == {2, 5, 7}
    assert eos_ids(tmp_path, TOWER, None) == {2, 3, 7}
    write(tmp_path, eos_token_id=9, temperature=0.5)
    assert eos_ids(tmp_path, {"eos_token_id": None}, None) == {9}
    write(tmp_path, temperature=0.5)
    assert eos_ids(tmp_path, CONFIG, None) == {2}


@pytest.mark.parametrize("value", ["2", [2, "3"], [[2]], {"a": 1}, 2.0, True, [None]])
def test_other_values_are_refused(tmp_path: Path, value: object):
    with pytest.raises(UserError, match=r"/config\.json: eos_token_id has .*: set it to a token id or a list"):
        eos_ids(tmp_path, CONFIG | {"eos_token_id": value}, None)
    write(tmp_path, eos_token_id=value)
    with pytest.raises(UserError, match=r"/generation_config\.json: eos_token_id has "):
        eos_ids(tmp_path, CONFIG, None)


@pytest.mark.parametrize(("text", "message"), [("{", "is not valid JSON"), ("[]", "must hold a JSON object")])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str, message: str):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(UserError, match=rf"generation_config\.json {message}"):
        eos_ids(tmp_path, CONFIG, None)


@pytest.mark.parametrize(
    ("generation", "eos", "expected"),
    [
        (None, 2, (5, 6)),
        ({"eos_token_id": [2, 6]}, 2, (5,)),
        ({"eos_token_id": 1}, 2, (5, 6, 2)),  # transformers ignores the id in config.json
        ({"temperature": 0.5}, 2, (5, 6, 2)),
        (None, 4, (5, 6, 4)),
        (None, None, (5, 6)),
    ],
)
def test_what_generate_of_transformers_lacks(tmp_path: Path, generation, eos, expected):
    if generation is not None:
        write(tmp_path, **generation)
    assert added([5, 6], stops(tmp_path, CONFIG), tokenizer(eos)) == expected


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, {"pad_token_id": 0, "eos_token_id": [2, 7]}),
        ({"eos_token_id": 3}, {"eos_token_id": [3, 7]}),
        ({"eos_token_id": [7, 3], "top_p": 0.9}, {"eos_token_id": [7, 3], "top_p": 0.9}),
        ({"top_p": 0.9}, {"eos_token_id": [2, 7], "top_p": 0.9}),
        ({"_from_model_config": True, "eos_token_id": None}, {"eos_token_id": [2, 7]}),
    ],
)
def test_added_ids_follow_the_models_own(tmp_path: Path, generation, expected):
    if generation is not None:
        write(tmp_path, **generation)
    assert generation_config(tmp_path, CONFIG, []) == {}
    [(name, content)] = generation_config(tmp_path, CONFIG, [7]).items()
    assert name == "generation_config.json" and json.loads(content) == expected


def test_what_is_said():
    one, two = sentence([7], tokenizer(2)), sentence([7, 8], tokenizer(2))
    assert one.startswith("replies end with <|7|>, which is not an EOS token of the model: the export's generation_con")
    assert one.endswith("will list it, and generate and chat stop on it")
    assert two.startswith("replies end with <|7|> or <|8|>, which are not EOS tokens") and two.endswith("stop on them")
