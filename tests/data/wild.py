"""Rows as three projects document them, with the chat templates by which their loaders and ours write them."""

# LLaMA-Factory's templates are its own: make_references.py gives it one that writes this. It tokenizes each turn by
# itself, so between turns stand tokens that no others merge with.
HARMONY = """\
{%- for message in messages %}
{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|message|>' }}{%- endif %}"""

# TRL learns what stands between marks, which ours does not read.
MARKED = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}{% generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# axolotl finds an assistant's turn in the whole by its content, as it does with any template.
CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def said(*turns, role="role", content="content"):
    return [{role: speaker, content: text} for speaker, text in turns]


def sharegpt(*turns):
    return said(*turns, role="from", content="value")


TWO = (("user", "two and two?"), ("assistant", "four"), ("user", "and 4?"), ("assistant", "eight, él"))
HUMAN = (("human", "two and two?"), ("gpt", "four"), ("human", "and 4?"), ("gpt", "eight, él"))

LLAMA_FACTORY = {
    "alpaca": [
        {"instruction": "Add.", "input": "2 + 2", "output": "4"},
        {"instruction": "Count to two.", "input": "", "output": "1, 2"},
        {
            "instruction": "and 4?",
            "input": "",
            "output": "eight",
            "system": "be brief",
            "history": [["two and two?", "four"], ["what is it?", "it is four."]],
        },
    ],
    "sharegpt": [
        {"conversations": sharegpt(*HUMAN)},
        {"conversations": sharegpt(*HUMAN[:2]), "system": "be brief"},
        {"conversations": sharegpt(("system", "be brief"), *HUMAN)},
    ],
    "openai": [{"messages": said(*TWO)}, {"messages": said(("system", "be brief"), *TWO)}],
}

TRL = {
    "messages": [{"messages": said(*TWO)}, {"messages": said(("system", "be brief"), *TWO)}],
    "text": [{"text": "hello there, what is it?"}, {"text": "four<|endoftext|>"}],
    "prompt_completion": [
        {"prompt": "The sum of two and two", "completion": " is four."},
        {"prompt": "hello", "completion": " there<|endoftext|>"},
    ],
    "prompt_completion_messages": [
        {"prompt": said(*TWO[:1]), "completion": said(*TWO[1:2])},
        {"prompt": said(("system", "be brief"), *TWO[:3]), "completion": said(*TWO[3:])},
    ],
}

AXOLOTL = {
    "messages": [{"messages": said(*TWO)}, {"messages": said(("system", "be brief"), *TWO)}],
    "sharegpt": [{"conversations": sharegpt(*HUMAN)}, {"conversations": sharegpt(("system", "be brief"), *HUMAN)}],
    "flags": [
        {"messages": [{**turn, "train": number == 3} for number, turn in enumerate(said(*TWO))]},
        {"messages": [{**turn, "train": number == 1} for number, turn in enumerate(said(*TWO))]},
    ],
}

TEMPLATES = {"llamafactory": HARMONY, "trl": MARKED, "axolotl": CHATML}
ROWS = {"llamafactory": LLAMA_FACTORY, "trl": TRL, "axolotl": AXOLOTL}
