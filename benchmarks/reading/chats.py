"""Chats, a chat template and a tokenizer to measure reading with, all made up and equal for a Python version."""

import ast
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SEED = 54
VOCABULARY = 32_000
TRAINED_ON = 8 << 20  # characters for the tokenizer
# Its words, and runs of digits, signs and spaces, as in the tokenizers of Llama 3 and Qwen.
WORDS = r"(?i:'[a-z]{1,2}\b)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|\s?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# As Qwen3's: tools, calls, and thoughts of the last answer only. [[ and ]] stand for marks of generated text.
TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- 'Functions that may be called:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set found = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set found.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}[[
        {%- if loop.index0 > found.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}]]{{- '\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
PLAIN = TEMPLATE.replace("[[", "").replace("]]", "")
MARKED = TEMPLATE.replace("[[", "{%- generation %}").replace("]]", "{%- endgeneration %}")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")


def write_chats(file: Path, nbytes: int, characters: tuple[int, int] = (200, 2000)) -> int:
    """Write chats of at least this size as JSON lines, and return their number. `characters`: of a message."""
    texts, choose, rows, written = _texts(), random.Random(SEED), 0, 0
    systems = [_cut(choose, texts, 100, 600) for _ in range(20)]
    with file.open("w") as out:
        while written < nbytes:
            messages = [{"role": "system", "content": choose.choice(systems)}]
            for _ in range(choose.randint(1, 4)):
                messages.append({"role": "user", "content": _cut(choose, texts, *characters)})
                messages.append({"role": "assistant", "content": _cut(choose, texts, *characters)})
            written += out.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
            rows += 1
    return rows


def write_tokenizer(folder: Path) -> None:
    """Write a model's folder with a tokenizer of VOCABULARY tokens and without weights."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    model = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    model.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY - len(SPECIAL), initial_alphabet=alphabet, show_progress=False)
    text = "\n".join(_texts())[:TRAINED_ON]
    model.train_from_iterator((text[start : start + 10_000] for start in range(0, len(text), 10_000)), trainer)
    model.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=PLAIN
    )
    tokenizer.save_pretrained(folder)


def _cut(choose: random.Random, texts: list[str], least: int, most: int) -> str:
    """A text of a length between the two, of sentences that follow one another."""
    length, text = choose.randint(least, most), ""
    while len(text) < length:
        text += choose.choice(texts) + "\n\n"
    return text[:length].rstrip()


def _texts() -> list[str]:
    """The docstrings of Python's standard library, in the order of their files."""
    return [text for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) for text in _docstrings(file)]


def _docstrings(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(errors="replace"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield text
