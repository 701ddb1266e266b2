"""Turns in the text of chat templates in the manner of well-known ones: what is supervised, and what is refused."""

import json

import pytest

from rptrain.data.render import Template
from rptrain.data.turns import Renderer

SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|observation|>",
    "<eos>", "<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|message|>",
)  # fmt: skip

CHATML = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"""

# No end token: the next role's token ends a turn. Thoughts before the last question are left out.
GLM = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{{- '<|assistant|>' }}
{%- set content, thought = m.content, m.reasoning_content or '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1] %}{% set content = content.split('</think>')[-1] %}
{%- endif %}
{{- '\\n<think>' + (thought.strip() if loop.index0 > ns.last else '') + '</think>' }}
{%- if content.strip() %}{{ '\\n' + content.strip() }}{% endif %}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>' + call.function.name }}
{%- for key, value in call.function.arguments.items() %}
{{- '\\n<arg_key>' + key + '</arg_key>' }}
{{- '\\n<arg_value>' + (value if value is string else value | tojson) + '</arg_value>' }}
{%- endfor %}
{{- '\\n</tool_call>' }}
{%- endfor %}
{%- elif m.role == 'tool' %}{{- '<|observation|>\\n' + m.content }}
{%- else %}{{- '<|' + m.role + '|>\\n' + m.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}{# tools #}"""

# Deletes whatever stands before </think>, and its generation prompt opens a thought.
R1 = """\
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{- '<|assistant|>' + m.content.split('</think>')[-1] + '<eos>' }}
{%- else %}{{- '<|user|>' + m.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|><think>\\n' }}{%- endif %}"""

# One call per message, thoughts in their own field, and other end tokens for calls and for the last turn.
HARMONY = """\
{%- for m in messages %}
{%- if m.role == 'assistant' and 'tool_calls' in m %}
{%- if m.content and m.thinking %}{{ raise_exception('Cannot pass both content and thinking') }}{% endif %}
{%- if m.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}
{{- '<|start|>assistant to=' + m.tool_calls[0].function.name + '<|channel|>commentary<|message|>' }}
{{- m.tool_calls[0].function.arguments | tojson + '<|call|>' }}
{%- elif m.role == 'assistant' %}
{%- if loop.last and 'thinking' in m %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
{%- endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}
{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}{# tools #}"""

# Takes calls without a text only, and checks their ids.
NEMO = """\
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.tool_calls is defined %}
{%- if m.content %}{{ raise_exception('calls have no text') }}{% endif %}
{{- '[TOOL_CALLS][' }}
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
{%- endfor %}{{- ']<eos>' }}
{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- else %}{{- m.content + '<eos>' }}
{%- endif %}
{%- endfor %}{# tools #}"""

# Refuses conversations without a question, so their beginnings cannot be rendered.
ASKED = "{{ raise_exception('No user query') if not messages | selectattr('role', 'equalto', 'user') | list }}" + CHATML

# Marks what is generated, with the line break after the end token.
GENERATED = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{- m.content + '<|im_end|>\\n' }}{% endgeneration %}
{%- else %}{{- m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}"""

GLM_EOS = ("<|endoftext|>", "<|user|>", "<|observation|>")


def turns(template, messages, eos=(), tools=None, learned=None, reasoning="refuse", assistant_only=True):
    """The supervised texts, the whole text and the notes."""
    made = Template(template, (("eos_token", "<|endoftext|>"),), SPECIAL, eos=(*eos, "<|endoftext|>"))
    said = [{"role": role, **(of if isinstance(of, dict) else {"content": of})} for role, of in messages]
    found = Renderer(made, reasoning).render(said, tools, learned, assistant_only)
    return (
        [found.text[start:end] for start, end in found.spans],
        found.text,
        {note.split(":")[0] for note in found.notes},
    )


def call(arguments, name="weather", **more):
    made = [{"type": "function", "id": "abcdefghi", "function": {"name": name, "arguments": arguments}}]
    return {"content": "", "tool_calls": made, **more}


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]


def test_the_token_that_follows_ends_a_turn_without_an_end_token():
    said = [("user", "q0"), ("assistant", "a0"), ("user", "0+0?"), ("assistant", "0")]
    supervised, text, notes = turns(GLM, said, GLM_EOS)
    assert supervised == ["\n<think></think>\na0<|user|>", "\n<think></think>\n0<|user|>"]
    assert text.endswith("0<|user|>") and notes == {"end_token"}


def test_a_call_without_an_end_token_is_ended_by_the_observation():
    said = [
        ("user", "sunny?"),
        ("assistant", call({"city": "Paris", "days": 3})),
        ("tool", "yes"),
        ("assistant", "It is."),
    ]
    supervised, _, _ = turns(GLM, said, GLM_EOS, TOOLS)
    assert [
        part.endswith(end) for part, end in zip(supervised, ("</tool_call><|observation|>", "<|user|>"), strict=True)
    ]
    assert turns(GLM, said[:2], GLM_EOS, TOOLS)[1].endswith("</tool_call><|observation|>")


def test_an_opening_token_of_the_assistant_ends_no_turn():
    said = [("user", "q"), ("assistant", "a"), ("assistant", "b"), ("system", "c"), ("user", "d"), ("assistant", "e")]
    supervised, _, _ = turns(GLM, said, ("<|user|>", "<|assistant|>", "<|system|>"))
    assert [part.split("</think>")[1] for part in supervised] == ["\na", "\nb", "\ne<|user|>"]


def test_the_tokenizers_eos_ends_the_last_turn_where_no_other_does():
    vicuna = "{% for m in messages %}{{ m.role | upper + ': ' + m.content + '\\n' }}{% endfor %}"
    supervised, text, _ = turns(vicuna, [("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b")])
    assert supervised == ["a\n", "b\n<|endoftext|>"] and text.endswith("b\n<|endoftext|>")
    assert turns(vicuna, [("assistant", "a"), ("user", "q")])[1].endswith("q\n"), "the last turn is not trained on"


def test_everything_is_supervised_with_its_end():
    supervised, text, _ = turns(GLM, [("user", "q"), ("assistant", "a")], GLM_EOS, assistant_only=False)
    assert supervised == [text] and text.endswith("a<|user|>")


def test_a_thought_that_the_template_deletes_is_refused():
    said = [("user", "5+9"), ("assistant", "<think>\nI add slowly.\n</think>\n\n14")]
    with pytest.raises(ValueError, match=r"leaves out the thought in `content` of turn 2: .* set data.reasoning to"):
        turns(R1, said)
    supervised, _, notes = turns(R1, said, reasoning="drop")
    assert supervised == ["\n\n14<eos>"] and notes == {"dropped_thought"}
    assert turns(R1, [said[0], ("assistant", "14")])[0] == ["14<eos>"]


def test_a_field_that_the_template_does_not_read_is_refused_dropped_or_written_into_the_content():
    said = [("user", "1+1"), ("assistant", {"content": "2", "reasoning_content": "I add slowly."})]
    with pytest.raises(ValueError, match="leaves out `reasoning_content` of turn 2"):
        turns(CHATML, said)
    assert turns(CHATML, said, reasoning="drop")[0] == ["2<|im_end|>"]
    supervised, _, notes = turns(CHATML, said, reasoning="inline")
    assert supervised == ["<think>\nI add slowly.\n</think>\n\n2<|im_end|>"] and notes == {"inlined_thought"}
    with pytest.raises(ValueError, match="the thought in `content`"):
        turns(R1, said, reasoning="inline")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_a_thought_is_found_under_any_name(name):
    said = [("user", "1+1"), ("assistant", {"content": "2", name: "I add."})]
    assert turns(GLM, said, GLM_EOS)[0] == ["\n<think>I add.</think>\n2<|user|>"]
    assert "analysis<|message|>I add.<|end|>" in turns(HARMONY, said)[0][0]


def test_thoughts_of_earlier_turns_are_left_out_and_noted():
    said = [(role, f"<think>{of}!</think>{of}" if role == "assistant" else of) for role, of in (
        ("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b"))]  # fmt: skip
    supervised, _, notes = turns(GLM, said, GLM_EOS)
    assert supervised == ["\n<think></think>\na<|user|>", "\n<think>b!</think>\nb<|user|>"] and "earlier" in notes


def test_what_is_left_out_is_named():
    silent = "{% for m in messages if m.role != 'system' %}{{ m.content + '<eos>' }}{% endfor %}"
    with pytest.raises(ValueError, match="leaves out `content` of turn 1"):
        turns(silent, [("system", "be brief"), ("user", "q"), ("assistant", "a")])
    two = call({"city": "Paris"})
    two["tool_calls"] = two["tool_calls"] * 2
    with pytest.raises(ValueError, match="leaves out the name of call 2 of turn 2"):
        turns(HARMONY, [("user", "q"), ("assistant", two)], tools=TOOLS)
    names = NEMO.replace("call.function | tojson", "{'name': call.function.name} | tojson")
    with pytest.raises(ValueError, match=r"leaves out the argument `place\.city` of call 1 of turn 2"):
        turns(names, [("user", "q"), ("assistant", call({"place": {"city": "Paris"}}))], tools=TOOLS)


def test_thinking_a_call_and_a_final_answer():
    said = [
        ("user", "sunny?"),
        ("assistant", call({"city": "Paris"}, thinking="I look.")),
        ("tool", "yes"),
        ("assistant", {"content": "It is.", "thinking": "Good."}),
    ]
    assert turns(HARMONY, said, ("<|return|>", "<|call|>"), TOOLS)[0] == [
        "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant to=weather<|channel|>commentary<|message|>"
        '{"city": "Paris"}<|call|>',
        "<|channel|>analysis<|message|>Good.<|end|><|start|>assistant<|channel|>final<|message|>It is.<|return|>",
    ]


def test_calls_that_the_template_allows_without_a_text_only():
    said = [
        ("user", "q"),
        ("assistant", call({"city": 'Paris "é"\n'})),
        ("tool", "sunny"),
        ("assistant", "it is sunny"),
    ]
    supervised, _, _ = turns(NEMO, said, ("<eos>",), TOOLS)
    made = json.dumps({"name": "weather", "arguments": {"city": 'Paris "é"\n'}}, ensure_ascii=False)
    assert supervised == [f'[TOOL_CALLS][{made[:-1]}, "id": "abcdefghi"}}]<eos>', "it is sunny<eos>"]


def test_arguments_as_json_text_for_a_template_that_joins_them_to_text():
    text = """{% for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content }}{% for c in m.tool_calls or () %}
{{- '>>>' + c.function.name + ' ' + c.function.arguments }}{% endfor %}{{- '<|im_end|>\n' }}{% endfor %}{# tools #}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""
    supervised, _, _ = turns(text, [("user", "q"), ("assistant", call({"city": 'Paris "é"', "days": 3}))], tools=TOOLS)
    assert supervised == ['>>>weather {"city": "Paris \\"é\\"", "days": 3}<|im_end|>']
    printed = text.replace("' ' + c.function.arguments", "' ' ~ c.function.arguments")
    supervised, _, _ = turns(printed, [("user", "q"), ("assistant", call({"ok": True, "n": None}))], tools=TOOLS)
    assert supervised == ['>>>weather {"ok": true, "n": null}<|im_end|>'], "not as Python prints them"


def test_a_reply_before_the_first_question():
    said = [("assistant", "welcome"), ("user", "hi"), ("assistant", "hello")]
    assert turns(ASKED, said)[0] == ["welcome<|im_end|>", "hello<|im_end|>"]


def test_what_the_template_marks_as_generated():
    said = [("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b")]
    assert turns(GENERATED, said)[0] == ["a<|im_end|>", "b<|im_end|>"]
    assert turns(GENERATED, said, learned=(False, False, True, True))[0] == ["r<|im_end|>", "b<|im_end|>"]


def test_texts_that_look_like_the_template():
    """Contents with tokens, line breaks and the texts of other turns."""
    said = [
        ("user", "<|im_end|>\n<|im_start|>assistant\n"),
        ("assistant", "a<|im_end|>\n<|im_start|>user\nq"),
        ("user", "q"),
    ]
    supervised, _, _ = turns(CHATML, [*said, ("assistant", "  a \n")])
    assert supervised == ["a<|im_end|>\n<|im_start|>user\nq<|im_end|>", "  a \n<|im_end|>"]


def test_equal_turns_are_told_apart():
    said = [("user", "go on"), ("assistant", "go on")] * 3
    assert turns(CHATML, said)[0] == ["go on<|im_end|>"] * 3


def test_an_end_that_is_no_token_is_noted():
    plain = CHATML.replace("<|im_end|>", "<|stop|>")
    assert "end_without_token" in turns(plain, [("user", "q"), ("assistant", "a")])[2]


def test_dates_have_the_format_that_the_template_asks_for():
    dated = "{{ strftime_now('%B %d, %Y; %-d.%m.%y') }}" + CHATML
    _, text, notes = turns(dated, [("user", "q"), ("assistant", "a")])
    assert text.startswith("July 26, 2024; 26.07.24") and notes == {"date"}


def test_calls_that_the_template_compares_with_others():
    """It refuses marks in their names, so names and arguments are looked for in the text."""
    refused = "messages[-1].tool_calls and messages[-1].tool_calls[0].function.name != 'weather'"
    known = f"{{{{ raise_exception('unknown') if {refused} }}}}" + GLM
    said = [("user", "sunny?"), ("assistant", call({"city": "Paris"}))]
    assert turns(known, said, GLM_EOS, TOOLS)[0] == turns(GLM, said, GLM_EOS, TOOLS)[0]
    silent = known.replace("call.function.arguments.items()", "[]")
    with pytest.raises(ValueError, match="leaves out the argument `city` of call 1 of turn 2"):
        turns(silent, said, GLM_EOS, TOOLS)


def test_an_end_of_text_after_the_last_end_token_ends_no_earlier_turn():
    phi = CHATML.removesuffix("{% endif -%}") + "{% else %}{{ '<|endoftext|>' }}{% endif -%}"
    said = [("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b")]
    assert turns(phi, said, ("<|im_end|>",))[0] == ["a<|im_end|>", "b<|im_end|>\n<|endoftext|>"]


@pytest.mark.parametrize(("eos", "first"), [(("<|end|>",), "a"), (("<|end|>", "<|user|>"), "a<|user|>")])
def test_a_token_that_opens_the_next_turn_ends_one_if_it_is_an_eos_token(eos, first):
    only_last = """\
{%- for m in messages %}
{{- '<|user|>' + m.content if m.role == 'user' else m.content + ('<|end|>' if loop.last else '') }}
{%- endfor %}"""
    said = [("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b")]
    assert turns(only_last, said, eos)[0] == [first, "b<|end|>"]


def test_a_template_that_always_writes_a_generation_prompt():
    """Replies end with their EOS token, and so does the conversation. Without one their ends are unknown."""
    eager = CHATML.replace("{%- if add_generation_prompt %}", "{%- if true %}")
    said = [("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b")]
    supervised, text, _ = turns(eager, said, ("<|im_end|>",))
    assert supervised == ["a<|im_end|>", "b<|im_end|>"] and text.endswith("b<|im_end|>")
    ended = eager.replace("+ '<|im_end|>", "+ '<|end|><|im_end|>")  # another token before it
    assert turns(ended, said, ("<|im_end|>",))[0] == ["a<|end|><|im_end|>", "b<|end|><|im_end|>"]
    with pytest.raises(ValueError, match="writes the beginning of another turn after turn 2"):
        turns(eager, said[:2], ("<|endoftext|>",))


def test_a_prompt_after_every_conversation_is_no_part_of_a_reply():
    """Replies begin with what the template writes between the prompt and their text."""
    eager = CHATML.replace("{%- if add_generation_prompt %}", "{%- if true %}").replace("+ m.content", "+ text")
    tagged = "{%- for m in messages %}{% set text = '<|start|>' + m.content if m.role == 'assistant' else m.content %}"
    said = [("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b")]
    found = turns(eager.replace("{%- for m in messages %}", tagged), said, ("<|im_end|>",))[0]
    assert found == ["<|start|>a<|im_end|>", "<|start|>b<|im_end|>"]


def test_a_tag_at_the_end_of_a_reply():
    said = [("user", "q"), ("assistant", "use /nothink"), ("user", "r"), ("assistant", "done")]
    text = GLM + "{# '/nothink' #}"
    assert turns(text, said, GLM_EOS)[0] == [
        "\n<think></think>\nuse /nothink<|user|>",
        "\n<think></think>\ndone<|user|>",
    ]


@pytest.mark.parametrize("change", ["[:16]", ".split('\\n')[0]", ".split('Answer:')[-1]"])
def test_texts_that_a_template_cuts_are_refused(change):
    cut = CHATML.replace("m.content", f"m.content{change}")
    said = [("user", "q"), ("assistant", "two and two,\nAnswer: four"), ("user", "r"), ("assistant", "b")]
    for count in (2, 4):
        with pytest.raises(ValueError, match="changes `content` of turn 2"):
            turns(cut, said[:count], ("<|im_end|>",))


@pytest.mark.parametrize("name", ["thought", "tool_plan"])
def test_other_fields_of_thoughts(name):
    with pytest.raises(ValueError, match=f"leaves out `{name}` of turn 2"):
        turns(CHATML, [("user", "q"), ("assistant", {"content": "2", name: "I add."})])
    written = CHATML.replace("+ m.content", f"+ (m.{name} or '') + m.content")
    assert turns(written, [("user", "q"), ("assistant", {"content": "2", name: "I add."})])[0] == ["I add.2<|im_end|>"]


@pytest.mark.parametrize(("role", "field"), [("system", {"tools": "[]!"}), ("user", {"name": "Ann"})])
def test_fields_of_a_message_that_the_template_does_not_read_are_noted(role, field):
    said = [(role, {"content": "s", **field}), ("user", "q"), ("assistant", "a")]
    assert turns(CHATML, said)[2] == {"unread_key"}
    (name,) = field
    assert not turns(CHATML.replace("+ m.role", f"+ m.role + (m.{name} or '')"), said)[2]


@pytest.mark.parametrize(
    ("field", "refused"),
    [
        ({"channel": "analysis"}, "a message has `channel` 'analysis', which the chat template does not read"),
        ({"channel": "final", "recipient": "functions.weather"}, "a message has `recipient` 'functions.weather'"),
        ({"channel": "final", "recipient": "all"}, ""),
    ],
)
def test_answers_to_others_than_the_user(field, refused):
    """As in exports of gpt-oss's format: without the field, a thought or a call would be trained as an answer."""
    said = [("user", "q"), ("assistant", {"content": "a", **field})]
    if refused:
        with pytest.raises(ValueError, match=refused):
            turns(CHATML, said)
        return
    assert turns(CHATML, said)[0] == ["a<|im_end|>"]


def test_a_channel_of_a_question_is_noted():
    said = [("user", {"content": "q", "channel": "#general", "recipient": "bot"}), ("assistant", "a")]
    assert turns(CHATML, said)[2] == {"unread_key"}


SPACED = """{% set last = messages | selectattr('role', 'equalto', 'user') | list | last %}{% for m in messages %}
{%- if m.role == 'user' %}{{- ('[T]' if tools and m == last else '') + '[INST]' + m.content + '[/INST]' }}
{%- else %}{{- ' ' + m.content + '<eos>' }}{% endif %}{% endfor %}"""


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("roles", ["uaua", "auua", "uaa"])
def test_a_space_before_a_reply_is_supervised_wherever_the_reply_stands(roles, tools):
    """Such as that of Mistral 7B: the model writes it after `[/INST]`."""
    said = [({"u": "user", "a": "assistant"}[role], f"{role}{number}") for number, role in enumerate(roles)]
    expected = [f" {text}<eos>" for role, text in said if role == "assistant"]
    assert turns(SPACED, said, ("<eos>",), tools)[0] == expected


@pytest.mark.parametrize(
    ("reasoning", "said", "advice"),
    [
        ("refuse", {"content": "2", "thought": "I add."}, 'or set data.reasoning to "drop" or "inline"'),
        ("refuse", {"content": "<think>I add.</think>2"}, 'or set data.reasoning to "drop"'),
        ("inline", {"content": "<think>I add.</think>2"}, 'or set data.reasoning to "drop"'),
    ],
)
def test_advice_about_thoughts_that_are_left_out(reasoning, said, advice):
    cut = CHATML.replace("m.content", "m.content.split('</think>')[-1]")
    with pytest.raises(ValueError) as raised:
        turns(cut, [("user", "q"), ("assistant", said)], reasoning=reasoning)
    assert str(raised.value).endswith(advice)


def test_calls_that_end_without_a_token_where_other_replies_have_one():
    calling = """\
{%- for m in messages %}{{- '<|' + m.role + '|>' }}
{%- if m.tool_calls %}{{- '<call>' + m.tool_calls[0].function.arguments.city + '</call>' }}
{%- else %}{{- m.content + ('<eos>' if m.role == 'assistant' else '') }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}{# tools, tool_calls, function.name #}"""
    calling = calling.replace("'<call>' +", "'<call>' + m.tool_calls[0].function.name +")
    said = [("user", "q"), ("assistant", call({"city": "Paris"})), ("user", "r"), ("assistant", "b")]
    assert turns(calling, said, ("<eos>", "<|user|>"), TOOLS)[0] == ["<call>weatherParis</call><|user|>", "b<eos>"]
    assert turns(calling, said[:2], ("<eos>", "<|user|>"), TOOLS)[0] == ["<call>weatherParis</call><|endoftext|>"]


def test_all_of_a_text_counts_wherever_its_last_turn_ends():
    eager = CHATML.replace("{%- if add_generation_prompt %}", "{%- if true %}")
    said = [("user", "q"), ("assistant", "a")]
    supervised, text, _ = turns(eager, said, ("<|endoftext|>",), assistant_only=False)
    assert supervised == [text] and text.endswith("assistant\n")


def test_a_reply_after_a_reply_begins_with_its_opening():
    """The template writes no generation prompt there."""
    careful = CHATML.replace("{%- if add_", "{%- if messages[-1].role != 'assistant' and add_")
    said = [("user", "q"), ("assistant", "a"), ("assistant", "b")]
    assert turns(careful, said, ("<|im_end|>",))[0] == ["a<|im_end|>", "b<|im_end|>"]


def test_a_call_that_is_written_differently_before_its_result_ends_with_its_eos_token():
    with_ids = """\
{%- for m in messages %}{{- '<|' + m.role + '|>' + m.content }}
{%- for one in m.tool_calls or [] %}{{- one.function.name + (one.function.arguments | tojson) }}
{%- if not last %}{{- ', "id": "x"' }}{% endif %}{{- ']' }}{%- endfor %}
{%- if m.role == 'assistant' and not loop.last %}{{- '<|end|>' }}{% endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}{# tools #}"""
    with_ids = with_ids.replace("{%- for one", "{%- set last = loop.last %}{%- for one")
    said = [("user", "q"), ("assistant", call({"city": "Paris"})), ("tool", "sunny"), ("assistant", "b")]
    assert turns(with_ids, said, ("<|end|>",), TOOLS)[0][0] == 'weather{"city": "Paris"}, "id": "x"]<|end|>'


def test_a_reply_begins_with_what_the_generation_prompt_does_not_have():
    """Its prompt opens a thought that calls do not have."""
    thinking = GLM.replace(
        "{{- '<|assistant|>' }}{%- endif %}", "{{- '<|assistant|>\\n<think>' }}{%- endif %}"
    ).replace("{{- '\\n<think>' + (thought.strip() if loop.index0 > ns.last else '') + '</think>' }}", "")
    supervised, _, notes = turns(thinking, [("user", "sunny?"), ("assistant", call({"city": "Paris"}))], GLM_EOS, TOOLS)
    assert supervised[0].startswith("<tool_call>weather\n") and "start" in notes


def test_a_template_that_needs_a_list_of_tools():
    needed = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}" + CHATML
    assert turns(needed, [("user", "q"), ("assistant", "a")])[0] == ["a<|im_end|>"]
