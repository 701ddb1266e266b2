"""The bundled chat templates: what they write, what of it is supervised, and what they refuse."""

import json
from pathlib import Path

import pytest

from rptrain.data import templates
from rptrain.data.formats import Example, Tally
from rptrain.data.render import render_conversations
from rptrain.data.template import EncodeOptions, encode, load_template
from rptrain.utils.errors import UserError

from .tokenizer import make

CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "two and two?"},
    {"role": "assistant", "content": " four"},
    {"role": "user", "content": "and four?"},
    {"role": "assistant", "content": "eight"},
]
WRITTEN = {
    "alpaca": "<s>be brief\n\n### Instruction:\ntwo and two?\n\n### Response:\n⟦ four</s>⟧\n\n"
    "### Instruction:\nand four?\n\n### Response:\n⟦eight</s>⟧\n\n",
    "chatml": "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\ntwo and two?<|im_end|>\n"
    "<|im_start|>assistant\n⟦ four<|im_end|>⟧\n<|im_start|>user\nand four?<|im_end|>\n"
    "<|im_start|>assistant\n⟦eight<|im_end|>⟧\n",
    "gemma": "<s><start_of_turn>user\nbe brief\n\ntwo and two?<end_of_turn>\n"
    "<start_of_turn>model\n⟦ four<end_of_turn>⟧\n<start_of_turn>user\nand four?<end_of_turn>\n"
    "<start_of_turn>model\n⟦eight<end_of_turn>⟧\n",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nbe brief<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\ntwo and two?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n⟦ four<|eot_id|>⟧"
    "<|start_header_id|>user<|end_header_id|>\n\nand four?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n⟦eight<|eot_id|>⟧",
    "mistral": "<s>[INST] be brief\n\ntwo and two?[/INST]⟦  four</s>⟧[INST] and four?[/INST]⟦ eight</s>⟧",
    "vicuna": "<s>be brief USER: two and two? ASSISTANT:⟦  four</s>⟧USER: and four? ASSISTANT:⟦ eight</s>⟧",
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def base():
    """A tokenizer with its own beginning and end of a text, and without a template."""
    tokenizer = make(None)
    more = ["<start_of_turn>", "<end_of_turn>"]
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": more})
    return tokenizer


def written(tokenizer, template, messages, tools=None):
    """The text of a conversation, with its supervised parts in brackets."""
    tally = Tally()
    example = Example("f", 1, messages=messages, tools=tools)
    documents = list(encode([example], tokenizer, EncodeOptions(chat_template=template), tally=tally))
    if tally.first:
        raise UserError(tally.first[0])
    text, before = "", False
    for token, counts in zip(documents[0].ids.tolist(), documents[0].supervised.tolist(), strict=True):
        text += ("⟦" if counts and not before else "⟧" if before and not counts else "") + tokenizer.decode([token])
        before = counts
    return text + ("⟧" if before else "")


def test_every_template_has_a_name() -> None:
    folder = Path(templates.__file__).parent
    assert sorted(path.stem for path in folder.glob("*.jinja")) == list(templates.NAMES) == sorted(WRITTEN)


@pytest.mark.parametrize("name", templates.NAMES)
def test_what_a_template_writes_and_supervises(base, name):
    assert written(base, name, CHAT) == WRITTEN[name]
    developer = [{"role": "developer", "content": "be brief"}, *CHAT[1:]]
    assert written(base, name, developer) == WRITTEN[name]


@pytest.mark.parametrize("name", templates.NAMES)
def test_a_prompt_is_the_beginning_of_the_answered_conversation(base, name):
    text = load_template(base, name)
    prompt, whole = render_conversations(base, text, [CHAT[:4], CHAT])
    assert whole.startswith(prompt) and "eight" not in prompt and len(prompt) > len(WRITTEN[name]) / 2


@pytest.mark.parametrize("name", templates.NAMES)
def test_a_system_text_is_never_lost(base, name):
    greeted = [CHAT[0], {"role": "assistant", "content": "welcome"}, *CHAT[3:]]
    text = written(base, name, greeted)
    assert text.index("be brief") < text.index("welcome") < text.index("and four?")


@pytest.mark.parametrize("name", templates.NAMES)
def test_unknown_roles_are_refused(base, name):
    with pytest.raises(UserError, match=f'the template {name} has no role "critic"'):
        written(base, name, [*CHAT, {"role": "critic", "content": "good"}])


@pytest.mark.parametrize("name", [name for name in templates.NAMES if name != "chatml"])
def test_tools_are_refused(base, name):
    with pytest.raises(UserError, match="does not write `tools`"):
        written(base, name, CHAT, [TOOL])


def test_a_reply_needs_an_end(base):
    endless = make(None)
    endless.eos_token = None
    for name in ("alpaca", "mistral", "vicuna"):
        with pytest.raises(UserError, match=f"the template {name} ends replies with the eos_token"):
            render_conversations(endless, load_template(base, name), [CHAT])


def test_tools_in_chatml(base):
    def called(city):
        return {"type": "function", "function": {"name": "weather", "arguments": {"city": city}}}

    messages = [
        {"role": "user", "content": "Paris and Oslo?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [called("Paris"), called("Oslo")]},
        {"role": "tool", "content": "sunny"},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "", "tool_calls": [called("Rome")]},
    ]
    text = written(base, "chatml", messages, [TOOL])
    system, _, rest = text.partition("<|im_end|>\n")
    assert system.startswith("<|im_start|>system\nYou can call") and f"<tools>\n{json.dumps(TOOL)}\n</tools>" in system
    assert rest == (
        "<|im_start|>user\nParis and Oslo?<|im_end|>\n<|im_start|>assistant\n⟦I look.\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>⟧\n'
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
        '<|im_start|>assistant\n⟦<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
        "<|im_end|>⟧\n"
    )
    assert "be brief\n\nYou can call" in written(base, "chatml", [CHAT[0], *messages], [TOOL])


def test_a_file_is_used_in_place_of_a_name(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "im_start" in load_template(base, "chatml")
    (tmp_path / "chatml").write_text("{{ messages }}")
    assert load_template(base, "chatml") == "{{ messages }}"
    with pytest.raises(UserError, match="nor one of alpaca, chatml"):
        load_template(base, "chatm")


def test_a_tokenizer_without_a_template_names_those_there_are(base):
    with pytest.raises(
        UserError, match=r"no chat template: set `data.chat_template` to a Jinja file, or to one of alp"
    ):
        load_template(base, None)
