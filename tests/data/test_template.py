import logging

import pytest

from rptrain.data import marks, template
from rptrain.data.formats import Example, Tally
from rptrain.data.template import EncodeOptions, encode
from rptrain.utils.errors import UserError
from rptrain.utils.limited import Pool

# Templates in the manner of well-known ones; the tokenizer's own is ChatML.
# A header before each turn, the date in the first, contents stripped.
LLAMA3 = """\
{{- '<|begin_of_text|>' }}
{%- for message in messages %}
{%- if loop.first %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + strftime_now('%d %b %Y') + '<|eot_id|>' }}
{%- endif %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{{- message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

# Thinking stays in turns after the last question only; a turn without any gets an empty block there.
QWEN3 = """\
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and '</think>' in message.content and loop.index0 < ns.last %}
{{- message.content.split('</think>')[-1].lstrip('\\n') }}
{%- elif message.role == 'assistant' and loop.index0 > ns.last and '</think>' not in message.content %}
{{- '<think>\\n\\n</think>\\n\\n' + message.content }}
{%- else %}
{{- message.content }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# The last turn ends with another token than the earlier ones.
HARMONY = """\
{%- for message in messages %}
{{- '<|start|>' + message.role }}
{%- if message.role == 'assistant' %}{{- '<|channel|>final' }}{%- endif %}
{{- '<|message|>' + message.content }}
{{- '<|return|>' if loop.last and message.role == 'assistant' else '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

# Knows no generation prompt, so a turn's place is known by its content alone.
PROMPTLESS = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}"""

# Its generation prompt opens a thought that the turns do not have.
EAGER = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"""

SHORT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi there"}]
LONG = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "two and two?"},
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": "and four?"},
    {"role": "assistant", "content": "eight, él"},
]
THINKING = [
    {"role": "user", "content": "two and two?"},
    {"role": "assistant", "content": "<think>\n1 + 1\n</think>\n\nfour"},
    {"role": "user", "content": "and four?"},
    {"role": "assistant", "content": "<think>\n4 + 4\n</think>\n\neight"},
]
GREETED = [{"role": "assistant", "content": "welcome"}, *SHORT]


def runs(conversations, tokenizer, **options):
    """The supervised texts, one for each run of supervised tokens, and the whole texts."""
    tally = Tally(len(conversations))
    examples = [Example("f", line, messages=messages) for line, messages in enumerate(conversations, 1)]
    documents = list(encode(examples, tokenizer, EncodeOptions(**options), tally=tally))
    tally.judge(0.01)
    supervised = [part for document in documents for part in supervised_texts(document, tokenizer)]
    return supervised, [tokenizer.decode(document.ids) for document in documents]


def supervised_texts(document, tokenizer):
    """One for each run of supervised tokens."""
    runs, before = [], False
    for token, counts in zip(document.ids.tolist(), document.supervised.tolist(), strict=True):
        if counts and not before:
            runs.append([])
        if counts:
            runs[-1].append(token)
        before = counts
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize(
    ("text", "end"),
    [(None, "<|im_end|>"), (LLAMA3, "<|eot_id|>"), (PROMPTLESS, "<|im_end|>"), (EAGER, "<|im_end|>")],
)
def test_only_the_assistants_tokens_are_supervised(tokenizer, text, end):
    supervised, _ = runs([SHORT, LONG, GREETED], tokenizer, chat_template=text)
    assert supervised == [said + end for said in ("hi there", "four", "eight, él", "welcome", "hi there")]


def test_rewritten_turns_of_qwen3(tokenizer):
    supervised, whole = runs([LONG, THINKING], tokenizer, chat_template=QWEN3)
    assert supervised == [
        "four<|im_end|>",
        "<think>\n\n</think>\n\neight, él<|im_end|>",
        "four<|im_end|>",
        "<think>\n4 + 4\n</think>\n\neight<|im_end|>",
    ]
    assert whole[1] == tokenizer.apply_chat_template(THINKING, chat_template=QWEN3, tokenize=False)


def test_end_tokens_that_differ_by_place(tokenizer):
    supervised, _ = runs([LONG], tokenizer, chat_template=HARMONY)
    assert supervised == [
        "<|channel|>final<|message|>four<|end|>",
        "<|channel|>final<|message|>eight, él<|return|>",
    ]


def test_no_text_moves_what_is_learned(tokenizer):
    """A text is found by a mark in its place, which a text may hold as well."""
    for earlier in ("plain", marks.BEGINNINGS[0], f"{marks.BEGINNINGS[0]}00001 {marks.BEGINNINGS[1]}00002"):
        said = [("user", earlier), ("assistant", "ok"), ("user", "learn me"), ("assistant", "A")]
        messages = [{"role": role, "content": text} for role, text in said]
        example = Example("f", 1, messages=messages, learned=(False, False, True, False))
        (document,) = encode([example], tokenizer)
        assert supervised_texts(document, tokenizer) == ["learn me<|im_end|>"]
    messages[0]["content"] = " ".join(marks.BEGINNINGS)
    tally = Tally(1)
    assert not list(encode([example], tokenizer, tally=tally))
    assert "none is left to mark its texts" in tally.first[0]


def test_without_assistant_only_loss_everything_is_supervised(tokenizer):
    supervised, whole = runs([LONG], tokenizer, assistant_only_loss=False)
    assert supervised == whole


def test_the_date_is_fixed(tokenizer):
    _, whole = runs([SHORT], tokenizer, chat_template=LLAMA3)
    assert "Today: 26 Jul 2024<|eot_id|>" in whole[0]


def test_template_from_file_tokenizer_or_nowhere(tokenizer, tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text(HARMONY)
    assert runs([SHORT], tokenizer, chat_template=str(path)) == runs([SHORT], tokenizer, chat_template=HARMONY)
    assert runs([SHORT], tokenizer) != runs([SHORT], tokenizer, chat_template=HARMONY)
    with pytest.raises(UserError, match="neither a file nor a Jinja template"):
        runs([SHORT], tokenizer, chat_template=str(tmp_path / "missing.jinja"))


def test_no_template(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(UserError, match=r"set `data.chat_template`"):
        runs([SHORT], tokenizer)


UPPER = "{% for message in messages %}{{ message.content | upper }} {{ loop.length }} {% endfor %}"
COUNTED = """\
{{- messages | length }}
{%- for message in messages %}{{- message.content + '<|im_end|>' ~ message.content | length }}{%- endfor %}"""
DEAF = "{% for message in messages %}{{ message.role }}<|im_end|>{% endfor %}"
STRICT = "{{ raise_exception('no') if messages[0].role == 'assistant' }}" + PROMPTLESS


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (UPPER, "changes `content` of turn 1: give a `data.chat_template`"),
        (COUNTED, "does not show where turn 1 begins"),
        (DEAF, "leaves out `content` of turn 1: give a `data.chat_template`"),
        (STRICT, "refuses the conversation: no"),
        ("{% if %}", "refuses the conversation"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}" + PROMPTLESS, "a macro of the chat template calls itself"),
    ],
)
def test_unsuitable_templates_say_what_to_do(tokenizer, text, reason):
    with pytest.raises(UserError, match=r"1 of 1 rows are bad(.|\n)* 1: .*" + reason.replace("(", r"\(")):
        runs([GREETED], tokenizer, chat_template=text)


@pytest.mark.sample(1, gate=4)
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "takes more than 0.3 s"),
        ("{{ lipsum(n=10**6) }}", "takes more than 0.3 s"),
        ("{{ 'a' * (3 * 10**9) }}", "needs more than 1.00 GiB of memory"),
        ("{{ 'a' * 10**18 }}", "needs more than 1.00 GiB of memory"),
    ],
    ids=["loops", "lipsum", "memory", "sizes"],
)
def test_a_template_without_end_stops_at_its_first_conversation(tokenizer, monkeypatch, text, reason):
    list(encode([Example("f", 1, messages=SHORT)], tokenizer))  # what the child imports also takes its time
    monkeypatch.setattr(template, "SECONDS", 0.3)
    text = "{% if messages | length > 2 %}" + text + "{% endif %}" + PROMPTLESS
    texts = [Example("f", line, text="two") for line in (1, 2)]
    examples = [*texts, Example("f", 3, messages=SHORT), *[Example("f", 4, messages=LONG)] * 9]
    with pytest.raises(UserError, match=f"^f:4: applying the chat template .* {reason}: shorten the loops"):
        list(encode(examples, tokenizer, EncodeOptions(chat_template=text)))


def test_a_long_conversation_has_more_time(tokenizer, monkeypatch):
    """Its turns may be rendered one by one."""
    given = list[float]()

    class Asked(Pool):
        def submit(self, *arguments, seconds, **options):
            given.append(seconds)
            return super().submit(*arguments, seconds=seconds, **options)

    monkeypatch.setattr(template, "Pool", Asked)
    monkeypatch.setattr(template, "ROWS", 1)
    list(encode([Example("f", 1, messages=SHORT * count) for count in (1, 10, 50)], tokenizer))
    assert given == [template.SECONDS, 2 * template.SECONDS, 6 * template.SECONDS]


def test_renderings_are_those_of_transformers(tokenizer):
    """All that a template can reach is the same in the child process."""
    text = "{{ bos_token }}{{ eos_token }}{{ tools | tojson }}{{ documents }}{{ messages | tojson }}"
    tools = [{"type": "function", "function": {"name": "é", "parameters": {}}}]
    messages = [*LONG, {"role": "tool", "content": "\u2028<&>", "more": [1.5, True]}]
    (document,) = encode(
        [Example("f", 1, messages=messages, tools=tools)],
        tokenizer,
        EncodeOptions(chat_template=text, assistant_only_loss=False),
    )
    expected = tokenizer.apply_chat_template(messages, tools, chat_template=text, tokenize=False)
    assert tokenizer.decode(document.ids) == expected


def test_bad_rows_are_reported_in_their_order(tokenizer):
    """Also those that are rendered after later rows were read."""
    tally = Tally()
    examples = (Example("f", line, messages=GREETED) for line in range(1, 9))

    def read():
        for example in examples:
            tally.add(example.line + 100, "read")
            yield example

    assert not list(encode(read(), tokenizer, EncodeOptions(chat_template=STRICT), tally=tally))
    assert tally.bad == 16
    assert [reason.partition(":")[0] for reason in tally.first] == ["1", "2", "3", "4", "5"]


def test_half_a_character(tokenizer):
    tally = Tally()
    row = [{"role": "user", "content": "a", "more": "\ud800"}, SHORT[1]]
    text = "{{ messages[0].more }}" + PROMPTLESS
    assert not list(encode([Example("f", 1, messages=row)], tokenizer, EncodeOptions(chat_template=text), tally=tally))
    assert tally.first == ["1: the conversation has half a character: a lone surrogate"]


def test_a_refused_conversation_is_left_out(tokenizer, caplog):
    with caplog.at_level(logging.WARNING):
        supervised, whole = runs([SHORT] * 120 + [GREETED], tokenizer, chat_template=STRICT)
    assert len(supervised) == len(whole) == 120 and "1 of 121 rows are bad" in caplog.text


def test_what_a_child_process_takes_is_bounded(tokenizer, monkeypatch):
    """Chats and texts of any length come as they would in one call, and in their order."""
    examples = [
        Example("f", n, text="two " * n)
        if n % 3
        else Example("f", n, messages=[*SHORT, {"role": "user", "content": "hello " * n}])
        for n in range(1, 40)
    ]

    def come():
        return [(d.line, d.ids.tolist(), d.supervised.tolist()) for d in encode(examples, tokenizer)]

    expected, sizes = come(), []
    submit = template.Pool.submit
    monkeypatch.setattr(template, "ROW_BYTES", 600)
    monkeypatch.setattr(
        template.Pool, "submit", lambda *given, **more: (sizes.append(given[3]), submit(*given, **more))[1]
    )
    assert come() == expected and [line for line, _, _ in expected] == list(range(1, 40))
    assert len(sizes) > 5 and all(sum(map(len, rows[:-1])) < 600 for rows in sizes)


def test_a_long_text_is_tokenized_in_parts(tokenizer, monkeypatch):
    """Which end with lines, so it has the same tokens; what has no parts has a limit."""
    said = "hello there,\nwhat is the sum of two numbers? it is four.\n" * 20
    examples = [Example("f", 1, text="two"), Example("f", 2, text=said), Example("f", 3, text="it")]
    expected = [(d.line, d.ids.tolist(), d.divisible) for d in encode(examples, tokenizer)]
    monkeypatch.setattr(template, "CHUNK_TEXT", 100)
    monkeypatch.setattr(template, "SHORT", 100)
    found = list(encode(examples, tokenizer))
    assert [(d.line, d.ids.tolist(), d.divisible) for d in found] == expected
    assert all(d.supervised.all() for d in found)
    (line,) = encode([Example("f", 1, text="é" * 1050)], tokenizer)
    assert tokenizer.decode(line.ids) == "é" * 1050 + "<|endoftext|>", "without line breaks it is cut anywhere"
    monkeypatch.setattr(template, "LONGEST", 500)
    tally = Tally(2)
    long = [Example("f", 1, text=said, prompt=1), Example("f", 2, messages=[{"role": "user", "content": said}])]
    assert not list(encode(long, tokenizer, tally=tally))
    assert tally.bad == 2 and "characters, more than 500: split it" in tally.first[0]


def test_text_ends_with_the_end_token_and_is_supervised(tokenizer):
    (document,) = encode([Example("f", 1, text="hello there")], tokenizer)
    assert tokenizer.decode(document.ids) == "hello there<|endoftext|>"
    assert document.supervised.all() and document.divisible
