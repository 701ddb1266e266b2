"""Conversations as the text that a chat template writes, and the places of their messages in it.

A template is a program, which may run for ever or write without end. All of this runs in a child process with limits
(`rptrain/utils/limited.py`), except `Template.of`, `render_prompts` and `exceeded`.
"""

import json
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Self

from rptrain.data.chat import Message
from rptrain.utils.errors import UserError, describe
from rptrain.utils.limited import Limited, stream

LONGEST = 1 << 24  # maximum characters of a conversation, which cannot be tokenized in parts
MARKS = range(0xE000, 0xF900)  # private-use characters: markers in place of a turn's content
# Stock templates write today's date; a fixed date keeps the tokens of a resumed run the same.
FIXED_DATE = (
    '{%- macro strftime_now(format) -%}{{- "2024-07-26" if format == "%Y-%m-%d" else "26 Jul 2024" -}}{%- endmacro -%}'
)
HELP = "give a `data.chat_template` that does, or set `data.assistant_only_loss = false`"
NESTED = "the conversation is nested too deeply, or a macro of the chat template calls itself"

Span = tuple[int, int]
Tools = list[dict[str, Any]] | None
Rendering = tuple[str, list[Span]]  # a conversation's text and the supervised spans of its characters


@dataclass(frozen=True)
class Template:
    """A chat template, with what it uses of its tokenizer."""

    text: str
    tokens: tuple[tuple[str, str], ...]  # names of special tokens, such as "eos_token", and their texts
    special: tuple[str, ...]  # texts of all special tokens, the longest first

    @classmethod
    def of(cls, tokenizer: Any, text: str) -> Self:
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        by_length = sorted(special, key=lambda token: (-len(token), token))
        return cls(text, tuple(tokenizer.special_tokens_map.items()), tuple(by_length))

    @property
    def with_fixed_date(self) -> str:
        return FIXED_DATE + self.text if "strftime_now" in self.text else self.text


def render_prompts(tokenizer: Any, template: str, texts: Sequence[str]) -> list[str]:
    """`render_conversations` of messages of the user, each of them alone."""
    return render_conversations(tokenizer, template, [[{"role": "user", "content": text}] for text in texts])


def render_conversations(tokenizer: Any, template: str, conversations: Sequence[list[Message]]) -> list[str]:
    """Conversations as the template writes them, with the generation prompt.

    Raises UserError if the template rejects one, or takes too long or too much memory.
    """
    try:
        return list(stream(_prompts, Template.of(tokenizer, template), list(conversations)))
    except Limited as error:
        raise exceeded(error) from None


def exceeded(error: Limited) -> UserError:
    return UserError(
        f"the chat template {error} for one conversation: shorten the loops of the template, or split the conversation"
    )


def render_rows(template: Template, rows: list[bytes], assistant_only: bool, longest: int) -> Iterator[Rendering | str]:
    """A rendering of each row, or why there is none. Rows are pickled messages, tools and flags."""
    for row in rows:
        try:
            messages, tools, learned = pickle.loads(row)
            text, spans = _renderer(template).render(messages, tools, learned, assistant_only)
            yield (text, spans) if len(text) <= longest else str(too_long(text, longest))
        except ValueError as error:
            yield str(error)
        except RecursionError:
            yield NESTED


def too_long(text: str, longest: int) -> ValueError:
    return ValueError(f"it has {len(text):,} characters, more than {longest:,}: split it into several rows")


@lru_cache(2)
def _renderer(template: Template) -> "Renderer":
    return Renderer(template)


def _prompts(template: Template, conversations: list[list[Message]]) -> Iterator[str]:
    tokenizer = _Tokenizer(template)
    for messages in conversations:
        yield tokenizer.apply(template.text, messages, prompt=True)


class _Tokenizer:
    """What transformers uses of a tokenizer to apply a chat template. To load the tokenizer itself takes longer."""

    def __init__(self, template: Template):
        self.special_tokens_map = dict(template.tokens)

    def get_chat_template(self, chat_template: str, tools: Tools = None) -> str:
        return chat_template

    @cached_property
    def _apply_chat_template(self) -> Any:
        from transformers.tokenization_utils_base import PreTrainedTokenizerBase

        return PreTrainedTokenizerBase.apply_chat_template

    def apply(self, template: str, messages: list[Message], tools: Tools = None, *, prompt: bool = False) -> str:
        """The text of a conversation. `prompt` adds the generation prompt.

        Raises UserError if the template rejects the conversation, or raises anything else.
        """
        try:
            text = self._apply_chat_template(
                self, messages, tools, chat_template=template, tokenize=False, add_generation_prompt=prompt
            )
            text.encode()  # UnicodeEncodeError: an unpaired surrogate, which tokenizers reject
        except MemoryError:
            raise
        except RecursionError as error:
            raise UserError(NESTED) from error
        except Exception as error:
            if isinstance(error, UnicodeEncodeError) and _has_surrogate([messages, tools]):
                raise UserError("the conversation has half a character: a lone surrogate") from error
            raise UserError(f"the chat template refuses the conversation: {describe(error)}") from error
        return text


def _has_surrogate(data: Any) -> bool:
    text = json.dumps(data, ensure_ascii=False, default=str)
    return text != text.encode(errors="replace").decode()


class Renderer:
    """Renders conversations and finds the assistant's turns in them.

    `return_assistant_tokens_mask` of transformers needs templates with `{% generation %}` marks, and returns an
    all-zero mask for those of Llama, Qwen and others. Spans are therefore found by rendering: a turn begins where the
    conversation before it, with the generation prompt, ends, and ends where the conversation up to it ends. If that
    is not a prefix of the whole (Qwen3 and GPT-OSS render earlier turns differently from the last), a marker in place
    of the turn's content finds it.
    """

    def __init__(self, template: Template):
        self._tokenizer = _Tokenizer(template)
        self._template, self._special = template.with_fixed_date, template.special
        probe: list[Message] = [{"role": "user", "content": "?"}]
        try:
            self._prompts = self._apply(probe) != self._apply(probe, prompt=True)
        except UserError:  # the template needs more than one message; without a prompt, markers are sufficient
            self._prompts = False

    def render(
        self, messages: list[Message], tools: Tools, learned: Sequence[bool] | None, assistant_only: bool
    ) -> Rendering:
        """The conversation's text and its supervised spans. `learned`: see Example.

        Raises ValueError if the template rejects the conversation, or does not show where a turn to train on ends.
        """
        self._check_tools(messages, tools)
        whole = self._apply(messages, tools)
        if not assistant_only:
            return whole, [(0, len(whole))]
        learned = learned or [message["role"] == "assistant" for message in messages]
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
        return self._tokenizer.apply(self._template, messages, tools, prompt=prompt)

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
