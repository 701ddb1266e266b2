"""Turns with tools, flags and other people's keys; and what is said about those that cannot be learned."""

import json

import pytest

from rptrain.data.formats import Example, Tally, read
from rptrain.data.template import encode
from rptrain.utils.errors import UserError

from .test_template import supervised_texts

# In Qwen3's manner: earlier answers lose their thought, and a call follows the turn's content.
TOOLS = """\
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- if tools %}{{- '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and loop.index0 > ns.last %}{{- '<think>\\n' }}{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<call>' + call.function.name + call.function.arguments | tojson + '</call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
ASKED = [
    {"role": "user", "content": "two?"},
    {"role": "assistant", "tool_calls": [CALL], "content": None},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "it is two."},
    {"role": "user", "content": "sum?"},
    {"role": "assistant", "content": "let me see", "tool_calls": [CALL]},
]
DECLARED = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


@pytest.fixture
def examples(tmp_path):
    def write(*rows, format="auto"):
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        tally = Tally()
        found = list(read(tmp_path / "rows.jsonl", format, tally))
        return found, tally.first

    return write


def learned(example, tokenizer, template=None, **options):
    tally = Tally()
    documents = list(encode([example], tokenizer, chat_template=template, tally=tally, **options))
    return [supervised_texts(document, tokenizer) for document in documents], tally.first


def test_calls_of_tools_are_learned_and_their_answers_are_not(examples, tokenizer):
    ((example,), bad) = examples({"messages": ASKED, "tools": DECLARED})
    assert not bad and example.messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    (found,), _ = learned(example, tokenizer, TOOLS)
    call = '\n<call>add{"a": 2}</call><|im_end|>'
    assert found == [call, "it is two.<|im_end|>", "<think>\nlet me see" + call]
    ids = next(iter(encode([example], tokenizer, chat_template=TOOLS))).ids
    assert tokenizer.decode(ids).startswith('<|im_start|>system\n[{"type": "function"')


def test_every_way_to_write_a_call_is_the_same(examples):
    text = json.dumps({"a": 2})
    turns = [
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": text}}],
        },
        {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"a": 2}}]},
        {"from": "function_call", "value": json.dumps({"name": "add", "arguments": {"a": 2}})},
        {"from": "function_call", "value": json.dumps([{"name": "add", "arguments": text}])},
    ]
    declared = (DECLARED, json.dumps(DECLARED), [DECLARED[0]["function"]], json.dumps([DECLARED[0]["function"]]))
    found, bad = examples(*({"messages": [turn], "tools": tools} for turn, tools in zip(turns, declared, strict=True)))
    assert not bad
    for example in found:
        (call,) = example.messages[0]["tool_calls"]
        assert call["function"] == CALL["function"] and call["type"] == "function"
        assert example.tools == DECLARED and example.learned == (True,)


@pytest.mark.parametrize(
    ("row", "reason"),
    [({"messages": ASKED[:1] + ASKED[3:4], "tools": DECLARED}, "`tools`"), ({"messages": ASKED}, "`tool_calls`")],
)
def test_templates_that_would_leave_tools_out(examples, tokenizer, row, reason):
    ((example,), _) = examples(row)
    documents, (bad,) = learned(example, tokenizer)
    assert not documents and f"the chat template does not write {reason}" in bad


@pytest.mark.parametrize(
    ("key", "values", "expected"),
    [
        ("weight", [None, 0, None, 1, None, None], [(3, "it is two."), (5, "let me see")]),
        ("train", [True, False, None, True, None, False], [(0, "two?"), (3, "it is two.")]),
    ],
)
def test_flags_say_what_is_learned(examples, tokenizer, key, values, expected):
    plain = [
        {name: value for name, value in turn.items() if name != "tool_calls"} | {"content": turn["content"] or "-"}
        for turn in ASKED
    ]
    messages = [{**turn, key: value} for turn, value in zip(plain, values, strict=True)]
    ((example,), _) = examples({"messages": messages})
    assert example.messages == plain, "templates see no flags"
    (found,), _ = learned(example, tokenizer)
    assert found == [text + "<|im_end|>" for _, text in expected]


def test_the_prompt_is_not_learned(examples, tokenizer):
    rows = [{"prompt": "the sum of two", "completion": " is four"}, {"prompt": "", "completion": "hello"}]
    (prompted, bare), _ = examples(*rows)
    assert learned(prompted, tokenizer)[0] == [[" is four<|endoftext|>"]]
    assert learned(prompted, tokenizer, assistant_only_loss=False)[0] == [["the sum of two is four<|endoftext|>"]]
    assert learned(bare, tokenizer)[0] == [["hello<|endoftext|>"]]
    assert [document.divisible for document in encode([prompted, bare], tokenizer)] == [False, True]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [{"role": "user", "content": "a", "weight": 0.5}]}, "`weight` is 0.5: use true or 1"),
        ({"messages": [{"role": "assistant", "content": "a", "weight": 0, "train": True}]}, "contradict each other"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a part of type 'image_url'"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "not an object",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": "f"}]}, "`tool_calls` is not a list"),
        ({"messages": [{"from": "narrator", "value": "a"}]}, "`from` is 'narrator': it must be one of human, user"),
        ({"messages": [{"from": "function_call", "value": "add(2)"}]}, "of a function_call is not JSON"),
        ({"messages": "[{"}, "`messages` is not a list"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": "{}"}, "`tools` is not a list"),
    ],
)
def test_rows_that_cannot_be_learned(examples, row, reason):
    found, (bad,) = examples(row)
    assert not found and reason in bad


@pytest.mark.parametrize(
    ("format", "row", "reason"),
    [
        ("prompt_completion", {"prompt": "a", "completion": ""}, "`completion` is empty"),
        ("prompt_completion", {"prompt": [], "completion": []}, "`completion` is empty"),
        ("prompt_completion", {"prompt": ["a"], "completion": "b"}, "a message is not an object"),
        ("alpaca", {"instruction": "a", "output": "b", "history": ["c"]}, "not a list of pairs of texts"),
    ],
)
def test_rows_that_are_not_of_their_format(examples, format, row, reason):
    found, (bad,) = examples(row, format=format)
    assert not found and reason in bad


def test_text_in_parts(examples):
    parts = [{"type": "text", "text": "two "}, {"type": "text", "text": "and two"}]
    ((example,), _) = examples({"messages": [{"role": "user", "content": parts}]})
    assert example.messages == [{"role": "user", "content": "two and two"}]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"messages": ASKED, "chosen": {}, "rejected": {}},
        {"prompt": "a", "completion": "b", "label": True},
        {"messages": ASKED, "kto_tag": True},
    ],
    ids=["dpo", "dpo-messages", "kto", "kto-messages"],
)
def test_preferences_are_refused_by_name(examples, row):
    with pytest.raises(UserError, match=r"this is preference data .*, which rptrain does not train on"):
        examples(row)


def test_the_first_row_with_keys_decides(examples):
    rows = [{"other": 1, "text": None}, {"text": "hello"}, {"messages": ASKED}]
    found, bad = examples(*rows)
    assert [example.text for example in found] == ["hello"] and len(bad) == 2
    assert isinstance(found[0], Example) and found[0].line == 2
