"""What is supervised with templates that behave as those of Qwen3.5, 3.6 and 3.8 do, and problems reported for them."""

import json

import pytest

from rptrain.data.messages import messages_of
from tests.data.qwen import QWEN3_5, QWEN3_5_SMALL, QWEN3_6, QWEN3_8
from tests.data.test_template import SHORT, THINKING, runs
from tests.data.test_turns import TOOLS, call, turns

EOS = ("<|im_end|>",)
END = "<|im_end|>"
THOUGHTLESS = "\n</think>\n\n"  # after the prompt, which opens a thought
WEATHER = call({"city": "Paris", "days": 3, "exact": True})
EVERY = pytest.mark.parametrize("template", [QWEN3_5, QWEN3_5_SMALL, QWEN3_6], ids=["3.5", "3.5-small", "3.6"])
OPENING = pytest.mark.parametrize("template", [QWEN3_5, QWEN3_6], ids=["3.5", "3.6"])  # a thought, in the prompt


def thinking(thought, content, **more):
    return {"content": content, "reasoning_content": thought, **more}


def written(name="weather", yes="True"):
    return (
        f"<tool_call>\n<function={name}>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        f"<parameter=exact>\n{yes}\n</parameter>\n</function>\n</tool_call>"
    )


@OPENING
def test_the_prompt_opens_a_thought_that_the_last_reply_closes(template):
    """The prompt gives `<think>`; earlier replies have no tags."""
    said = [("system", "be brief"), ("user", "a?"), ("assistant", "one"), ("user", "b?"), ("assistant", "two")]
    spans, text, notes = turns(template, said, EOS)
    assert spans == [f"one{END}", f"{THOUGHTLESS}two{END}"] and notes == set()
    assert text.endswith(f"<|im_start|>assistant\n<think>\n{spans[1]}\n")


def test_an_empty_thought_in_the_prompt_is_not_supervised():
    spans, text, _ = turns(QWEN3_5_SMALL, [("user", "a?"), ("assistant", "one")], EOS)
    assert spans == [f"one{END}"] and text.endswith(f"assistant\n<think>\n\n</think>\n\none{END}\n")


@EVERY
@pytest.mark.parametrize("tags", ["", "<think>\nso", "so"], ids=["field", "tags", "closing_tag"])
def test_a_thought_is_supervised_after_its_opening_tag_wherever_it_stands(tags, template):
    """A reply as the model generates it lacks the opening tag."""
    reply = f"{tags}\n</think>\n\ntwo" if tags else thinking("so", "two")
    spans, text, _ = turns(template, [("user", "a?"), ("assistant", reply)], EOS)
    assert spans == [f"so\n</think>\n\ntwo{END}"] and text.count("think>") == 2


@EVERY
def test_thoughts_before_the_last_question_are_left_out_and_noted(template):
    said = [("user", "a?"), ("assistant", thinking("hm", "one")), ("user", "b?"), ("assistant", thinking("so", "two"))]
    spans, text, notes = turns(template, said, EOS)
    assert spans == [f"one{END}", f"so\n</think>\n\ntwo{END}"] and "hm" not in text and notes == {"earlier"}


def test_a_copy_of_the_template_that_keeps_thoughts():
    """As with `preserve_thinking`, which a row cannot set."""
    said = [("user", "a?"), ("assistant", thinking("hm", "one")), ("user", "b?"), ("assistant", thinking("so", "two"))]
    spans, _, notes = turns(QWEN3_6.replace("preserve_thinking is true", "true"), said, EOS)
    assert spans == [f"hm\n</think>\n\none{END}", f"so\n</think>\n\ntwo{END}"] and notes == set()


@pytest.mark.parametrize(("template", "yes"), [(QWEN3_5, "True"), (QWEN3_6, "true")], ids=["3.5", "3.6"])
def test_thoughts_calls_and_results(template, yes):
    """Results are turns of the user, but no questions: thoughts before them stay."""
    said = [
        ("user", "a?"),
        ("assistant", {**WEATHER, "reasoning_content": "look"}),
        ("tool", "sunny"),
        ("tool", "warm"),
        ("assistant", thinking("ok", "it is sunny")),
    ]
    spans, text, notes = turns(template, said, EOS, TOOLS)
    assert spans == [f"look\n</think>\n\n{written(yes=yes)}{END}", f"ok\n</think>\n\nit is sunny{END}"]
    assert "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nwarm\n</tool_response>" in text
    assert notes == set()


@EVERY
def test_earlier_calls_are_supervised_with_their_tags(template):
    """Several calls of a message, with and without a text before them."""
    both = {"tool_calls": [*WEATHER["tool_calls"], *call({}, "time")["tool_calls"]]}
    said = [
        ("user", "a?"),
        ("assistant", {**both, "content": ""}),
        ("tool", "sunny"),
        ("tool", "noon"),
        ("assistant", {**both, "content": "again"}),
        ("tool", "sunny"),
        ("tool", "noon"),
        ("assistant", "sunny"),
        ("user", "thanks"),
        ("assistant", "welcome"),
    ]
    calls = written(yes="true" if template == QWEN3_6 else "True")
    calls += "\n<tool_call>\n<function=time>\n</function>\n</tool_call>"
    spans, _, _ = turns(template, said, EOS, TOOLS)
    last = "" if template == QWEN3_5_SMALL else THOUGHTLESS
    assert spans == [f"{calls}{END}", f"again\n\n{calls}{END}", f"sunny{END}", f"{last}welcome{END}"]


@EVERY
@pytest.mark.parametrize(
    "said",
    [
        [("user", "a?"), ("user", "b?"), ("assistant", "two")],
        [("user", " a? "), ("assistant", " two \n")],
        [("user", "a?"), ("assistant", thinking("", "two"))],
        [("user", "a?"), ("assistant", "<think>\n\n</think>\n\ntwo")],
    ],
    ids=["two_questions", "spaces", "empty_field", "empty_tags"],
)
def test_replies_that_are_rendered_alike(said, template):
    last = "" if template == QWEN3_5_SMALL else THOUGHTLESS
    assert turns(template, said, EOS)[0] == [f"{last}two{END}"]


@OPENING
def test_beginnings_that_the_template_refuses_alone(template):
    """A reply before the first question, and another one after it."""
    said = [("assistant", "hello"), ("user", "a?"), ("assistant", "one"), ("assistant", "two")]
    assert turns(template, said, EOS)[0] == [f"hello{END}", f"{THOUGHTLESS}one{END}", f"{THOUGHTLESS}two{END}"]


@EVERY
@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ([("assistant", "hello")], "no user query found"),
        ([("user", "a?"), ("system", "s"), ("assistant", "one")], "the system message is not the first"),
        ([("developer", "s"), ("user", "a?"), ("assistant", "one")], "unexpected role"),
    ],
)
def test_what_the_template_refuses_is_reported(said, reason, template):
    with pytest.raises(Exception, match=f"the chat template refuses the conversation: {reason}"):
        turns(template, said, EOS)


def test_a_template_that_loses_the_thought_of_a_reply_is_refused():
    """It cuts the content before it looks for the thought in it."""
    cut = "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}\n"
    thought = next(line for line in QWEN3_5.splitlines(keepends=True) if "set thought = content" in line)
    broken = QWEN3_5.replace(thought + cut, cut + thought)
    assert broken != QWEN3_5
    with pytest.raises(ValueError, match="leaves out the thought in `content` of turn 2"):
        turns(broken, [("user", "a?"), ("assistant", "<think>\nhm\n</think>\n\none")], EOS)


def read(message):
    return messages_of([{"role": "user", "content": "a?"}, message], set())[0][1]


@pytest.mark.parametrize("name", ["reasoning_content", "thinking"])
def test_a_thought_in_two_places_is_refused(name):
    tagged = {"role": "assistant", "content": "<think>\nhm\n</think>\n\none"}
    with pytest.raises(ValueError, match=rf"a thought in `{name}` and one between tags in `content`: keep one of them"):
        read({**tagged, name: "hm"})
    assert read({**tagged, name: ""}) == tagged  # the template would write an empty thought before it
    assert read({**tagged, "content": "one", name: ""})[name] == ""


def test_parts_of_a_content_and_arguments_as_json_text():
    """As OpenAI's interface gives them."""
    parts = [{"type": "text", "text": "two "}, {"type": "text", "text": "two"}]
    function = {"name": "weather", "arguments": json.dumps({"city": "Paris", "days": 3, "exact": True})}
    made = [{"type": "function", "id": "abcdefghi", "function": function}]
    for message, expected in (
        ({"role": "assistant", "content": parts}, f"{THOUGHTLESS}two two{END}"),
        ({"role": "assistant", "content": None, "tool_calls": made}, f"{THOUGHTLESS}{written()}{END}"),
    ):
        assert turns(QWEN3_5, [("user", "a?"), ("assistant", read(message))], EOS, TOOLS)[0] == [expected]


def test_tokens_are_supervised_from_the_end_of_the_prompt(tokenizer):
    supervised, whole = runs([THINKING, SHORT], tokenizer, chat_template=QWEN3_5)
    assert supervised == [f"four{END}", f"4 + 4\n</think>\n\neight{END}", f"{THOUGHTLESS}hi there{END}"]
    assert whole == [
        tokenizer.apply_chat_template(said, chat_template=QWEN3_5, tokenize=False) for said in (THINKING, SHORT)
    ]


@pytest.mark.parametrize("thought", ["<think>\nhm\n</think>\n\n", "<think>hm</think>", "hm\n</think>\n\n", "field", ""])
def test_a_template_that_does_not_look_for_thoughts_in_contents_gets_them_in_their_field(thought):
    """It would write an empty thought before the thought in the content."""
    reply = thinking("hm", "one") if thought == "field" else f"{thought}one"
    said = [("user", "a?"), ("assistant", reply), ("user", "b?"), ("assistant", "two")]
    spans, text, notes = turns(QWEN3_8, said, EOS)
    assert spans == [f"hm\n</think>\n\none{END}" if thought else f"{THOUGHTLESS}one{END}", f"{THOUGHTLESS}two{END}"]
    assert text.count("<think>") == 2 and notes == set()


def test_a_reply_without_a_thought_as_the_model_writes_it():
    spans, text, _ = turns(QWEN3_8, [("user", "a?"), ("assistant", "\n</think>\n\none")], EOS)
    assert spans == [f"{THOUGHTLESS}one{END}"] and text.count("think>") == 2


@pytest.mark.parametrize("content", ["what is </think>?", "the tag <think> opens\n</think>\n"])
def test_a_tag_in_a_sentence_does_not_begin_or_end_a_thought(content):
    spans, _, _ = turns(QWEN3_8, [("user", "a?"), ("assistant", content)], EOS)
    assert spans == [f"{THOUGHTLESS}{content.strip()}{END}"]
