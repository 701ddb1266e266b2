"""Turns with tools, flags and other people's keys; and what is said about those that cannot be learned."""

import json

import pytest

from rptrain.data.formats import Example, Tally, read
from rptrain.data.row_format import RowFormat
from rptrain.data.template import EncodeOptions, encode
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
        found = list(read(tmp_path / "rows.jsonl", RowFormat(format), tally))
        return found, tally.first

    return write


def learned(example, tokenizer, template=None, **options):
    tally = Tally()
    documents = list(encode([example], tokenizer, EncodeOptions(chat_template=template, **options), tally=tally))
    return [supervised_texts(document, tokenizer) for document in documents], tally.first


def test_calls_of_tools_are_learned_and_their_answers_are_not(examples, tokenizer):
    ((example,), bad) = examples({"messages": ASKED, "tools": DECLARED})
    assert not bad and example.messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    (found,), _ = learned(example, tokenizer, TOOLS)
    call = '\n<call>add{"a": 2}</call><|im_end|>'
    assert found == [call, "it is two.<|im_end|>", "<think>\nlet me see" + call]
    ids = next(iter(encode([example], tokenizer, EncodeOptions(chat_template=TOOLS)))).ids
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
        ({"messages": [{"role": "user", "content": "a"}], "tools": '{"a": 1}'}, "`tools` is not a list"),
        ({"system": "A", "messages": [{"role": "system", "content": "B"}, *ASKED]}, "two system prompts"),
        ({"prompt": "q", "completion": "a", "system": "Be brief."}, "`system` stands beside two texts"),
        (
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "refusal": "No."}]},
            "the answer is in `refusal`",
        ),
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


USER, ANSWER = {"role": "user", "content": "two?"}, {"role": "assistant", "content": "2"}
SAID = {"from": "gpt", "value": "2"}


@pytest.fixture
def parse(tmp_path):
    """Parses one row; returns its example, or why it is bad, and the notes."""

    def parse(row):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row))
        tally = Tally()
        found = list(read(tmp_path / "rows.jsonl", tally=tally))
        detailed = {note.partition(":")[0] for note in tally.notes if ":" in note}
        return (found or tally.first)[0], tally.notes.keys() - detailed

    return parse


FLAGGED = [
    ("loss", [None, True, False], [False, True, False]),
    ("trainable", [None, False, True], [False, False, True]),
    ("training", [False, 0.0, 1.0], [False, False, True]),
    ("loss_mask", [0, 0, 1], [False, False, True]),
    ("loss_weight", [0.0, 1.0, 0.0], [False, True, False]),
    ("loss_scale", [None, 0.0, 1.0], [False, False, True]),
    ("mask", [True, True, False], [False, False, True]),
    ("masked", [None, 0, 1], [False, True, False]),
]


@pytest.mark.parametrize(("key", "values", "expected"), FLAGGED, ids=[key for key, _, _ in FLAGGED])
def test_flags_of_other_trainers(parse, key, values, expected):
    plain = [USER, ANSWER, {"role": "assistant", "content": "no, 3"}]
    example, notes = parse({"messages": [{**turn, key: value} for turn, value in zip(plain, values, strict=True)]})
    assert example.messages == plain and list(example.learned) == expected
    assert notes == (set() if key == "training" else {f"flag:{key}"})


def test_flags_that_only_some_turns_have(parse):
    """As in AgentInstruct."""
    said = [("human", "go", None), ("gpt", "OK", False), ("human", "two?", None), ("gpt", "2", True)]
    turns = [{"from": speaker, "loss": loss, "value": text} for speaker, text, loss in said]
    example, notes = parse({"conversations": turns})
    assert example.learned == (False, False, False, True) and notes == {"flag:loss"}


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"mask": 2}, "`mask` is 2: use true or 1 to leave it out, false or 0 to train on a message"),
        ({"loss": "true"}, "`loss` is 'true': use true or 1 to train on a message"),
        ({"loss": True, "mask": True}, "`loss` and `mask` of a message contradict each other"),
        ({"loss_weight": 0.3}, "`loss_weight` is 0.3"),
        ({"train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]}, "`train_detail` trains on parts"),
    ],
)
def test_flags_that_say_nothing_clear(parse, flags, reason):
    bad, _ = parse({"messages": [USER, ANSWER | flags]})
    assert reason in bad


def test_a_flag_in_a_prompt(parse):
    bad, _ = parse({"prompt": [USER, ANSWER | {"loss": 1}, USER], "completion": [ANSWER]})
    assert "a message of `prompt` has a flag that trains on it" in bad
    example, notes = parse({"prompt": [USER, ANSWER | {"loss": 0}, USER], "completion": [ANSWER]})
    assert example.learned == (False, False, False, True) and notes == {"flag:loss"}


@pytest.mark.parametrize("key", ["tools", "functions", "system"])
def test_what_two_texts_cannot_say(parse, key):
    bad, _ = parse({"prompt": "2+2=", "completion": "4", key: [{"name": "add"}] if key != "system" else "be brief"})
    assert "beside two texts" in bad
    other, notes = parse({"prompt": "2+2=", "completion": "4", "tools": "a hammer", "functions": 3})
    assert other.text == "2+2=4" and notes == {"ignored_key:tools"}


THINKING = {"type": "thinking", "thinking": "I add."}


@pytest.mark.parametrize(
    ("field", "found"),
    [
        ({"thinking": [THINKING]}, {"thinking": "I add."}),
        ({"reasoning_content": [{"type": "text", "text": "I "}, {"type": "text", "text": "add."}]}, "I add."),
        ({"reasoning": {"text": "I add."}}, "`reasoning` is not text"),
        ({"thinking": ["I ", "add."]}, {"thinking": "I add."}),
        ({"thinking": [{"type": "text", "text": "I add.", "train": False}]}, "`train` stands in a part of `thinking`"),
        ({"thought": [{"type": "image"}]}, "`thought` has a part of type 'image'"),
        ({"thinking": "I add.", "reasoning_content": "I add."}, "I add."),
        (
            {"thinking": "I add.", "reasoning_content": "I sum."},
            "a message has several thoughts (reasoning_content, thinking)",
        ),
        (
            {"reasoning_details": [{"type": "reasoning.text", "text": "I add."}]},
            "the thought is in `reasoning_details`",
        ),
        ({"reasoning": "I add.", "reasoning_details": [{"text": "I add."}]}, {"reasoning": "I add."}),
    ],
)
def test_thoughts(parse, field, found):
    example, _ = parse({"messages": [USER, ANSWER | field]})
    if isinstance(example, str):
        assert isinstance(found, str) and found in example
    else:
        found = found if isinstance(found, dict) else {"reasoning_content": found}
        assert found.items() <= example.messages[1].items()


@pytest.mark.parametrize(
    ("row", "refused"),
    [
        (
            {"messages": [USER, ANSWER | {"content": [{"type": "text", "text": "2", "train": False}]}]},
            "`train` stands in",
        ),
        ({"messages": [USER, ANSWER], "weight": 0}, "`weight` of the row"),
        ({"messages": [USER, ANSWER], "loss_mask": [0, 1]}, "`loss_mask` of the row"),
        ({"messages": [USER, ANSWER], "mask": True}, "`mask` of the row"),
        ({"prompt": "2?", "completion": "2", "train": "false"}, "`train` of the row"),
        ({"prompt": "2?", "completion": "2", "loss_mask": "[1, 0]"}, "`loss_mask` of the row"),
        ({"messages": [USER, ANSWER], "chat_template_kwargs": {"think": False}}, "`chat_template_kwargs` has 'think'"),
        ({"instruction": "2?", "output": "2", "chat_template_kwargs": '{"a": 1}'}, "`chat_template_kwargs` has 'a'"),
        ({"conversations": [{"from": "human", "value": "2?", "content": "3?"}]}, "another `role` or `content`"),
        ({"conversations": [{"from": "human", "value": "2?", "role": "assistant"}]}, "another `role` or `content`"),
        ({"messages": [USER, ANSWER], "tools": [{"type": "function"}]}, "a function without a `name`"),
    ],
)
def test_what_would_be_lost_is_refused(parse, row, refused):
    bad, _ = parse(row)
    assert isinstance(bad, str) and refused in bad


def test_what_says_the_same_twice_or_nothing(parse):
    turns = [{"from": "human", "value": "1+1?", "role": "user", "content": "1+1?"}, {"from": "gpt", "value": "2"}]
    row = {"conversations": turns, "weight": 1, "train": None, "loss": 0.7, "mask": "0", "chat_template_kwargs": {}}
    example, _ = parse(row | {"documents": [{"title": "t"}]})
    assert [message["role"] for message in example.messages] == ["user", "assistant"]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ANSWER], "loss": 0.0, "mask": [], "loss_mask": [1, 1], "weight": "1.0"},
        {"messages": [USER, ANSWER], "rejected": True, "chat_template_kwargs": {"tools": [], "custom": ""}},
        {"messages": [USER, ANSWER | {"content": [{"type": "text", "text": "2", "weight": 1}]}]},
        {"messages": [USER | {"content": [{"type": "text", "text": "two?", "mask": True}]}, ANSWER]},
        {
            "conversations": [
                {"from": "human", "value": "two?", "role": "", "content": ""},
                {"from": "gpt", "value": "2"},
            ]
        },
        {"conversations": [{"from": "human", "value": "two?", "content": "two? "}, {"from": "gpt", "value": "2"}]},
        {"messages": [USER, ANSWER | {"reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]}]},
    ],
)
def test_other_columns_are_not_taken_for_flags(parse, row):
    example, _ = parse(row)
    assert not isinstance(example, str) and [m["content"] for m in example.messages] == ["two?", "2"]


def test_weights_of_rows_are_noted(parse):
    assert parse({"prompt": "2?", "completion": "2", "weight": 0.5})[1] == {"unused_weight:weight"}


def test_a_row_is_counted_once_where_it_is_read_and_rendered(tokenizer, tmp_path):
    row = {"messages": [USER | {"name": "Ann"}, ANSWER], "documents": [{"title": "t"}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    tally = Tally()
    assert len(list(encode(read(tmp_path / "rows.jsonl", tally=tally), tokenizer, tally=tally))) == 1
    assert tally.notes == {"unread_key": 1, "unread_key:name": 1, "unread_key:documents": 1}


def test_a_mask_of_the_other_polarity(parse):
    bad, _ = parse({"messages": [USER | {"mask": 0}, ANSWER | {"mask": 1}]})
    assert "`mask` is true for all messages of the assistant" in bad and "rename it to `loss_mask`" in bad


def test_other_keys_of_messages_are_noted_and_reach_the_template(parse):
    turn = ANSWER | {"id": 3, "reasoning_content": "Easy.", "model": None}
    example, notes = parse({"messages": [USER | {"name": "Ann"}, turn]})
    assert example.messages == [USER | {"name": "Ann"}, ANSWER | {"id": 3, "reasoning_content": "Easy."}]
    assert notes == {"ignored_key:id"}


def test_fields_of_sharegpt_turns_reach_the_template(parse):
    turns = [{"from": "human", "value": "two?"}, {"from": "gpt", "value": "2", "reasoning_content": "Easy."}]
    example, notes = parse({"conversations": turns})
    assert example.messages == [USER, ANSWER | {"reasoning_content": "Easy."}] and notes == {"fields"}


def test_calls_in_the_older_form(parse, tokenizer):
    older = {"role": "assistant", "content": "", "function_call": {"name": "add", "arguments": '{"a": 2}'}}
    result = {"role": "function", "name": "add", "content": "2"}
    example, notes = parse({"messages": [USER, older, result, ANSWER], "functions": [DECLARED[0]["function"]]})
    assert example.tools == DECLARED and notes == {"calls", "mapped_role:function"}
    assert example.messages[1:3] == [
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "add", "content": "2"},
    ]
    (found,), _ = learned(example, tokenizer, TOOLS)
    assert found == ['<think>\n\n<call>add{"a": 2}</call><|im_end|>', "<think>\n2<|im_end|>"]


@pytest.mark.parametrize("tools", [" ", "null", "{}", "[]", "", {}, [], [" "], None])
@pytest.mark.parametrize("key", ["tools", "functions"])
def test_no_tools(parse, tools, key):
    example, _ = parse({"messages": [USER, ANSWER], key: tools})
    assert example.tools is None and len(example.messages) == 2


def test_functions_that_are_no_tools(parse):
    assert parse({"messages": [USER, ANSWER], "functions": ["abs", "sum"]})[0].tools is None


@pytest.mark.parametrize("function", [{}, {"arguments": None}, {"arguments": ""}, {"arguments": " "}])
def test_calls_without_arguments(parse, function):
    for call in ({"function": {"name": "now", **function}}, {"name": "now", **function}):
        example, _ = parse({"messages": [USER, {"role": "assistant", "tool_calls": [call]}]})
        assert example.messages[1]["tool_calls"][0]["function"] == {"name": "now", "arguments": {}}


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ({"tool_calls": [{"name": "add", "arguments": "[1, 2]"}]}, "the `arguments` of a tool call are not an object"),
        ({"tool_calls": [{"name": "add", "arguments": '"{}"'}]}, "the `arguments` of a tool call are not an object"),
        ({"tool_calls": [{"name": "add", "arguments": '{"a": 1, "a": 2}'}]}, "are not an object"),
        ({"tool_calls": [{"name": "add", "parameters": {"a": 1}}]}, "has `parameters` instead of `arguments`"),
        ({"tool_calls": [CALL], "function_call": CALL["function"]}, "both `tool_calls` and `function_call`"),
        ({"function_call": "auto"}, "a tool call is not an object"),
    ],
)
def test_calls_that_cannot_be_read(parse, turn, reason):
    bad, _ = parse({"messages": [USER, {"role": "assistant", **turn}]})
    assert reason in bad


@pytest.mark.parametrize("thought", ["<think>I add.</think>", "<think>\nI add\n{slowly}.\n</think>"])
def test_a_thought_before_a_call(parse, thought):
    turns = [{"from": "human", "value": "two?"}, {"from": "function_call", "value": thought + '\n\n{"name": "add"}'}]
    example, _ = parse({"conversations": turns})
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    assert example.messages[1] == {"role": "assistant", "content": thought, "tool_calls": [call]}
    assert example.learned == (False, True)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [json.dumps(turn) for turn in ASKED], "tools": [json.dumps(DECLARED[0])]},
        {"messages": json.dumps(ASKED), "tools": json.dumps([json.dumps(DECLARED[0]["function"])])},
        {
            "messages": [{**turn, "tool_calls": json.dumps(turn.get("tool_calls") or [])} for turn in ASKED],
            "tools": [{"name": "add", "parameters": "{}"}],
        },
    ],
    ids=["texts", "nested", "fields"],
)
def test_json_text_where_objects_are_expected(parse, row):
    example, _ = parse(row)
    assert example.tools == DECLARED
    assert [turn.get("tool_calls") for turn in example.messages] == [None, [CALL], None, None, None, [CALL]]


def test_prompts_that_are_json_lists(parse):
    example, notes = parse({"prompt": json.dumps([USER]), "completion": json.dumps([ANSWER]), "system": "be brief"})
    assert example.messages == [{"role": "system", "content": "be brief"}, USER, ANSWER]
    assert example.learned == (False, False, True) and notes == {"json_text:prompt", "fields"}


@pytest.mark.parametrize("prompt", ["[2, 3] sorted:", "[2, 3]", '[{"a": 1}]', "[]", '[{"role": "user"'])
def test_prompts_that_look_like_json(parse, prompt):
    example, notes = parse({"prompt": prompt, "completion": "[2, 3]"})
    assert (example.text, example.prompt) == (prompt + "[2, 3]", len(prompt)) and not notes


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": json.dumps([USER]), "completion": "2"}, "`prompt` is a list of messages, but `completion` is text"),
        ({"prompt": str([USER]), "completion": str([ANSWER])}, "`prompt` is a list as Python prints it: write it as"),
        ({"messages": str([USER, ANSWER])}, "`messages` is a list as Python prints it"),
    ],
)
def test_lists_in_text_that_cannot_be_read(parse, row, reason):
    assert reason in parse(row)[0]


@pytest.mark.parametrize(
    ("role", "expected", "note"),
    [
        ("human", "user", "mapped_role:human"),
        ("gpt", "assistant", "mapped_role:gpt"),
        ("model", "assistant", "mapped_role:model"),
        ("Assistant", "assistant", "mapped_role:Assistant"),
        ("function", "tool", "mapped_role:function"),
        ("developer", "developer", None),
        ("ipython", "ipython", "unknown_role:ipython"),
        ("observation", "observation", "unknown_role:observation"),
        ("asistant", "asistant", "unknown_role:asistant"),
    ],
)
def test_roles(parse, role, expected, note):
    example, notes = parse({"messages": [{"role": role, "content": "2"}]})
    assert example.messages == [{"role": expected, "content": "2"}] and notes == ({note} if note else set())
    assert example.learned == (expected == "assistant",)


def test_calls_of_the_assistant_under_a_role_of_their_own(parse):
    example, _ = parse({"messages": [USER, {"role": "function_call", "content": json.dumps(CALL["function"])}]})
    assert example.messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}


def test_tools_of_an_instruction(parse):
    row = {"instruction": "two?", "output": "2"}
    assert parse(row | {"tools": json.dumps(DECLARED)})[0].tools == DECLARED
    assert parse(row | {"tools": "hammer"})[0].tools is None


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
