"""Go templates of Ollama, which must give what the chat template gives."""

import re

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rptrain.data import templates
from rptrain.gguf.turns import PROBES, find_turns

BOS = "<s>"
QWEN = (
    "{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are Q.<|im_end|>\n' }}{% endif %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)
THINKING = templates.text_of("chatml").rstrip() + "{{ '<think>\n' }}"
LONG = templates.text_of("chatml").rstrip() + "{{ 'hurry' if messages | length > 3 }}"
REFUSING = "{{ raise_exception('no system texts') if messages[0].role == 'system' }}{{ messages }}"
CONVERSATIONS = (
    *PROBES,
    (("system", "Be brief."), ("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4"), ("user", "5")),
)


def renderer(template: str):
    def refuse(said: str) -> str:
        raise ValueError(said)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    compiled = environment.from_string(template)

    def render(conversations):
        chats = [[{"role": role, "content": text} for role, text in each] for each in conversations]
        return [
            compiled.render(messages=chat, bos_token=BOS, eos_token="</s>", add_generation_prompt=True)
            for chat in chats
        ]

    return render


def run_go(template: str, conversation, system: str) -> str:
    """What Ollama makes of a conversation: a template for each turn, and in the last one nothing after .Response."""

    def fill(text: str, **values: str) -> str:
        def either(found: re.Match[str]) -> str:
            return found[2] if values[found[1]] else ""

        text = re.sub(r"\{\{ if \.(\w+) \}\}(.*?)\{\{ end \}\}", either, text, flags=re.DOTALL)
        return re.sub(r"\{\{ \.(\w+) \}\}", lambda found: values[found[1]], text)

    done, prompt, answer = "", "", ""
    for role, text in conversation:
        if role == "system":
            system = text
        elif role == "user":
            if answer:
                done += fill(template, System=system, Prompt=prompt, Response=answer)
                system, answer = "", ""
            prompt = text
        else:
            answer = text
    return done + fill(template.partition("{{ .Response }}")[0], System=system, Prompt=prompt)


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma", "mistral", "vicuna", "alpaca", "qwen"])
def test_the_go_template_gives_the_text_of_the_chat_template(name):
    render = renderer(QWEN if name == "qwen" else templates.text_of(name))
    turns = find_turns(render, BOS)
    assert turns is not None and turns.default_system == ("You are Q." if name == "qwen" else "")
    for conversation, text in zip(CONVERSATIONS, render(CONVERSATIONS), strict=True):
        said = [(role, turns.space * (role == "assistant") + words) for role, words in conversation]
        assert run_go(turns.go_template(), said, turns.default_system) == text.removeprefix(BOS)
        assert turns.render(conversation) == text.removeprefix(BOS)


@pytest.mark.parametrize(
    "template",
    [THINKING, LONG, REFUSING, "{{ messages }}", "{{ messages[0].content }}{{ '{{' }}", ""],
    ids=["thinking", "long", "refusing", "data", "marks", "empty"],
)
def test_a_template_that_does_more_has_no_go_template(template):
    assert find_turns(renderer(template), BOS) is None


def test_bos_stays_where_nobody_else_puts_it():
    render = renderer(templates.text_of("llama3"))
    left_out, kept = find_turns(render, BOS), find_turns(render, "")
    assert left_out is not None and BOS not in left_out.go_template()
    assert kept is None, "the Go template would repeat it in every turn"
