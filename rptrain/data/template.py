"""Tokenization of examples with chat templates, with a mask of the tokens that the loss counts."""

import json
from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import chain
from os.path import isfile
from pathlib import Path
from typing import Any

import numpy as np

from rptrain.data.chat import Message
from rptrain.data.formats import Example, Tally
from rptrain.data.tokens import Document
from rptrain.utils.errors import UserError, describe
from rptrain.utils.files import read_small_text

CHUNK, CHUNK_TEXT = 1024, 1 << 21  # examples per call of the tokenizer, and characters after which a call ends earlier
LONGEST = 1 << 24  # maximum characters of a conversation, which cannot be tokenized in parts
MARKS = range(0xE000, 0xF900)  # private-use characters: markers in place of a turn's content
# Stock templates write today's date; a fixed date keeps the tokens of a resumed run the same.
FIXED_DATE = (
    '{%- macro strftime_now(format) -%}{{- "2024-07-26" if format == "%Y-%m-%d" else "26 Jul 2024" -}}{%- endmacro -%}'
)
SET = "set `data.chat_template` to a Jinja file"
HELP = "give a `data.chat_template` that does, or set `data.assistant_only_loss = false`"
# What templates raise by themselves, apart from TemplateError: errors of their expressions and of their filters
RAISED = (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)

Span = tuple[int, int]
Tools = list[dict[str, Any]] | None


def encode(
    examples: Iterable[Example],
    tokenizer: Any,
    *,
    assistant_only_loss: bool = True,
    chat_template: str | None = None,
    tally: Tally | None = None,
) -> Iterator[Document]:
    """Yields the documents of the examples in order; only some are in memory at a time.

    In a conversation, the loss counts the messages to train on, each with the token that ends the turn; in a text
    (which an end-of-text token ends), everything after its prompt. Without `assistant_only_loss` it counts everything.
    `chat_template` is a path or a template; None: the tokenizer's. Conversations that the template rejects are counted
    in `tally`. Raises UserError if there is no template or no end-of-text token.
    """
    tally, renderer = tally or Tally(), None
    rendered: list[tuple[int, str, list[Span]]] = []
    texts: list[Example] = []
    size = 0

    def documents() -> Iterator[Document]:
        """Documents of the gathered examples, which are cleared."""
        nonlocal rendered, texts, size
        parts = _chats(rendered, tokenizer), _texts(texts, tokenizer, assistant_only_loss)
        rendered, texts, size = [], [], 0
        return merge(*parts, key=lambda document: document.line)

    for example in examples:
        if example.text is not None and len(example.text) > CHUNK_TEXT and not example.prompt:
            yield from documents()
            yield _long_text(example.line, example.text, tokenizer)
        elif example.text is not None:
            if len(example.text) > LONGEST:
                tally.add(example.line, _too_long(example.text))
                continue
            texts.append(example)
            size += len(example.text)
        else:
            renderer = renderer or Renderer(tokenizer, load_template(tokenizer, chat_template))
            try:
                text, spans = renderer.render(example, assistant_only_loss)
                if len(text) > LONGEST:
                    raise _too_long(text)
            except (ValueError, RecursionError) as error:
                tally.add(example.line, error)
                continue
            rendered.append((example.line, text, spans))
            size += len(text)
        if size >= CHUNK_TEXT or len(rendered) + len(texts) >= CHUNK:
            yield from documents()
    yield from documents()


def load_template(tokenizer: Any, chat_template: str | None) -> str:
    """The Jinja text of `data.chat_template`: a path, a literal template, or None for the tokenizer's own."""
    if chat_template is None:
        if not tokenizer.chat_template:
            raise UserError(f"the tokenizer has no chat template: {SET}")
        try:
            template = tokenizer.get_chat_template()
        except ValueError as error:  # several templates, of which none is the default
            raise UserError(f"the tokenizer's chat template cannot be chosen: {error}: {SET}") from error
        if not isinstance(template, str):
            raise UserError(f"the tokenizer's chat template is not text but of type {type(template).__name__}: {SET}")
        return template
    if "{" in chat_template:
        return chat_template
    path = Path(chat_template)
    if not isfile(path):
        raise UserError(f"data.chat_template: {path} is neither a file nor a Jinja template")
    try:
        return read_small_text(path)
    except UnicodeDecodeError as error:
        raise UserError(f"data.chat_template: {path} is not UTF-8 text: {error}") from error


def apply(
    tokenizer: Any, messages: list[Message], tools: Tools = None, *, template: str | None = None, prompt: bool = False
) -> str:
    """The text of a conversation. `template` None: the tokenizer's own. `prompt` adds the generation prompt.

    Raises UserError if the template rejects the conversation, or raises anything else that a template can.
    """
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            messages, tools, chat_template=template, tokenize=False, add_generation_prompt=prompt
        )
        text.encode()  # UnicodeEncodeError, a ValueError: an unpaired surrogate, which tokenizers reject
    except RecursionError as error:
        raise UserError(
            "the conversation is nested too deeply, or a macro of the chat template calls itself"
        ) from error
    except (TemplateError, *RAISED) as error:
        raise UserError(f"the chat template refuses the conversation: {describe(error)}") from error
    return text


class Renderer:
    """Renders conversations and finds the assistant's turns in them.

    `return_assistant_tokens_mask` of transformers needs templates with `{% generation %}` marks, and returns an
    all-zero mask for those of Llama, Qwen and others. Spans are therefore found by rendering: a turn begins where the
    conversation before it, with the generation prompt, ends, and ends where the conversation up to it ends. If that
    is not a prefix of the whole (Qwen3 and GPT-OSS render earlier turns differently from the last), a marker in place
    of the turn's content finds it.
    """

    def __init__(self, tokenizer: Any, template: str):
        self._tokenizer = tokenizer
        self._template = FIXED_DATE + template if "strftime_now" in template else template
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._special = tuple(sorted(special, key=lambda token: (-len(token), token)))
        probe: list[Message] = [{"role": "user", "content": "?"}]
        try:
            self._prompts = self._apply(probe) != self._apply(probe, prompt=True)
        except UserError:  # the template needs more than one message; without a prompt, markers are sufficient
            self._prompts = False

    def render(self, example: Example, assistant_only: bool) -> tuple[str, list[Span]]:
        """The conversation's text and the supervised spans of its characters.

        Raises ValueError if the template rejects the conversation, or does not show where a turn to train on ends.
        """
        messages, tools = example.messages, example.tools
        assert messages is not None
        self._check_tools(messages, tools)
        whole = self._apply(messages, tools)
        if not assistant_only:
            return whole, [(0, len(whole))]
        learned = example.learned or [message["role"] == "assistant" for message in messages]
        return whole, [
            (self._start(messages, tools, turn, whole), self._end(messages, tools, turn, whole))
            for turn, counts in enumerate(learned)
            if counts
        ]

    def _check_tools(self, messages: list[Message], tools: Tools) -> None:
        """Raises ValueError if the template ignores tools, as most templates without support for tools do."""
        if tools and "tools" not in self._template:
            raise ValueError("the chat template does not write `tools`")
        if "tool_calls" not in self._template and any("tool_calls" in message for message in messages):
            raise ValueError("the chat template does not write `tool_calls`")

    def _apply(self, messages: list[Message], tools: Tools = None, prompt: bool = False) -> str:
        return apply(self._tokenizer, messages, tools, template=self._template, prompt=prompt)

    def _start(self, messages: list[Message], tools: Tools, turn: int, whole: str) -> int:
        if turn > 0 and self._prompts and messages[turn]["role"] == "assistant":
            before = self._apply(messages[:turn], tools, prompt=True)
            if whole.startswith(before):
                return len(before)
        before, _ = self._around(messages, tools, turn)
        if not whole.startswith(before):
            raise ValueError(f"the chat template does not show where turn {turn + 1} begins: {HELP}")
        return len(before)

    def _end(self, messages: list[Message], tools: Tools, turn: int, whole: str) -> int:
        """The end of the turn's end token; line breaks after it belong to the template."""
        until = whole if turn == len(messages) - 1 else self._apply(messages[: turn + 1], tools)
        if whole.startswith(until):
            trimmed = until.rstrip()
            return len(trimmed) if trimmed.endswith(self._special) else len(until)
        _, after = self._around(messages, tools, turn)
        if "tool_calls" in messages[turn]:  # follow the content
            ending = next((token for token in self._special if until.rstrip().endswith(token)), None)
            place = -1 if ending is None else after.find(ending)
        else:
            ending = next((token for token in self._special if after.lstrip().startswith(token)), None)
            place = len(after) - len(after.lstrip())
        if ending is None or place < 0 or not whole.endswith(after):
            raise ValueError(f"the chat template does not show where turn {turn + 1} ends: {HELP}")
        return len(whole) - len(after) + place + len(ending)

    def _around(self, messages: list[Message], tools: Tools, turn: int) -> tuple[str, str]:
        """The text before and after a turn's content."""
        said = json.dumps([messages, tools], ensure_ascii=False, default=str)
        mark = next((chr(code) for code in MARKS if chr(code) not in said and chr(code) not in self._template), None)
        if mark is None:
            raise ValueError(
                "it uses all characters of Unicode's private use area; one must be free to serve as a marker"
            )
        changed = [*messages[:turn], {**messages[turn], "content": mark}, *messages[turn + 1 :]]
        before, found, after = self._apply(changed, tools).partition(mark)
        if not found:
            raise ValueError(f"the chat template does not write the text of turn {turn + 1}: {HELP}")
        return before, after


def _chats(rendered: list[tuple[int, str, list[Span]]], tokenizer: Any) -> Iterator[Document]:
    if not rendered:
        return
    tokens = tokenizer(
        [text for _, text, _ in rendered],
        add_special_tokens=False,  # written by the template
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,
    )
    for ids, offsets, (line, _, spans) in zip(tokens["input_ids"], tokens["offset_mapping"], rendered, strict=True):
        yield Document(line, np.array(ids, dtype=np.int32), _within(offsets, spans))


def _too_long(text: str) -> ValueError:
    return ValueError(f"it has {len(text):,} characters, more than {LONGEST:,}: split it into several rows")


def _long_text(line: int, text: str, tokenizer: Any) -> Document:
    """Splits a text into parts, if possible at line ends. Tokens at the ends may differ from those of the whole."""
    _check_end(tokenizer)
    end = [tokenizer.eos_token_id]
    begin = tokenizer("", return_attention_mask=False)["input_ids"]
    parts = [np.array(begin[:-1] if begin[-1:] == end else begin, np.int32)]
    start = 0
    while start < len(text):
        stop = start + CHUNK_TEXT
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        tokens = tokenizer(text[start:stop], add_special_tokens=False, return_attention_mask=False, verbose=False)
        parts.append(np.array(tokens["input_ids"], np.int32))
        start = stop
    if parts[-1][-1:].tolist() != end:
        parts.append(np.array(end, np.int32))
    ids = np.concatenate(parts)
    return Document(line, ids, np.ones(len(ids), bool), divisible=True)


def _check_end(tokenizer: Any) -> None:
    if tokenizer.eos_token_id is None:
        raise UserError("raw text needs a tokenizer with an end-of-text token (`eos_token`)")


def _texts(texts: list[Example], tokenizer: Any, assistant_only_loss: bool) -> Iterator[Document]:
    if not texts:
        return
    _check_end(tokenizer)
    prompts = assistant_only_loss and any(example.prompt for example in texts)
    said = [example.text for example in texts]
    tokens = tokenizer(said, return_offsets_mapping=prompts, return_attention_mask=False, verbose=False)
    for number, (ids, example) in enumerate(zip(tokens["input_ids"], texts, strict=True)):
        supervised = np.ones(len(ids), dtype=bool)
        if prompts and example.prompt and example.text is not None:
            supervised = _within(tokens["offset_mapping"][number], [(example.prompt, len(example.text))])
        if ids[-1:] == [tokenizer.eos_token_id]:
            supervised[-1] = True  # some tokenizers add it themselves, without a place in the text
        else:
            ids, supervised = [*ids, tokenizer.eos_token_id], np.append(supervised, True)
        yield Document(example.line, np.array(ids, dtype=np.int32), supervised, divisible=not example.prompt)


def _within(offsets: list[Span], spans: list[Span]) -> np.ndarray:
    """Whether each token has a character within a span: bool [tokens]."""
    bounds = np.fromiter(chain.from_iterable(offsets), np.int64, 2 * len(offsets)).reshape(-1, 2)
    first, past = bounds[:, 0], np.maximum(bounds[:, 1], bounds[:, 0] + 1)
    mask = np.zeros(len(bounds), dtype=bool)
    for start, end in spans:
        mask |= (first < end) & (past > start)
    return mask
