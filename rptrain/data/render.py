"""Conversations as the text that a chat template writes.

A template is a program, which may run for ever or write without end. All of this runs in a child process with limits
(`rptrain/utils/limited.py`), except `Template.of`, `render_prompts` and `exceeded`.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from functools import cached_property, lru_cache
from typing import Any, Self

from rptrain.data.messages import Message
from rptrain.utils.errors import UserError, describe
from rptrain.utils.limited import Limited, stream

LONGEST = 1 << 24  # maximum characters of a conversation, which cannot be tokenized in parts
# Stock templates write today's date; a fixed date keeps the tokens of a resumed run the same.
DATE = date(2024, 7, 26)
DATE_CODES = ("%-d", "%-m", "%d", "%m", "%Y", "%y", "%b", "%B", "%a", "%A", "%F", "%H", "%I", "%M", "%S", "%p", "%j")
NESTED = "the conversation is nested too deeply, or a macro of the chat template calls itself"

Span = tuple[int, int]
Tools = list[dict[str, Any]] | None


@dataclass(frozen=True)
class Template:
    """A chat template, with what it uses of its tokenizer."""

    text: str
    tokens: tuple[tuple[str, str], ...]  # names of special tokens, such as "eos_token", and their texts
    special: tuple[str, ...]  # texts of all special tokens, the longest first
    with_tools: str = ""  # the template for conversations with tools, if it is another one
    eos: tuple[str, ...] = ()  # texts of the model's EOS tokens

    @classmethod
    def of(cls, tokenizer: Any, text: str, with_tools: str = "", eos_ids: frozenset[int] = frozenset()) -> Self:
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if is_special(token)}
        by_length = sorted(special, key=lambda token: (-len(token), token))
        eos = tokenizer.convert_ids_to_tokens(sorted(eos_ids))
        tokens = tuple(tokenizer.special_tokens_map.items())
        return cls(text, tokens, tuple(by_length), with_tools, tuple(token for token in eos if token))

    def variant(self, tools: Tools) -> str:
        """The template for a conversation, with a fixed date."""
        text = self.with_tools if tools and self.with_tools else self.text
        return _fixed_date() + text if "strftime_now" in text else text

    @property
    def end_of_text(self) -> str:
        """The text of the tokenizer's EOS token; empty without one."""
        return dict(self.tokens).get("eos_token", "")


def is_special(token: Any) -> bool:
    """Whether an added token is special, or has the form of one, as tokens that were added to a base model may have."""
    text = str(token)
    return token.special or (text.startswith("<|") and text.endswith("|>"))


@lru_cache(1)
def _fixed_date() -> str:
    """A macro that writes the fixed date in the format that a template asks for."""
    codes = "".join(f".replace('{code}', '{DATE.strftime(code)}')" for code in DATE_CODES)
    return "{%- macro strftime_now(format) -%}{{- format" + codes + " -}}{%- endmacro -%}"


def render_prompts(tokenizer: Any, template: str, texts: Sequence[str]) -> list[str]:
    """`render_conversations` of messages of the user, each of them alone."""
    return render_conversations(tokenizer, template, [[{"role": "user", "content": text}] for text in texts])


def render_conversations(tokenizer: Any, template: str, conversations: Sequence[list[Message]]) -> list[str]:
    """Conversations as the template writes them, with the generation prompt.

    Raises UserError if the template rejects one, or takes too long or too much memory.
    """
    try:
        return list(stream(_prompts, Template.of(tokenizer, template), list(conversations), setup=load_transformers))
    except Limited as error:
        raise exceeded(error) from None


def exceeded(error: Limited) -> UserError:
    return UserError(
        f"applying the chat template to one conversation {error}: shorten the loops of the template, or split the "
        "conversation"
    )


def too_long(text: str, longest: int) -> ValueError:
    return ValueError(f"it has {len(text):,} characters, more than {longest:,}: split it into several rows")


def _prompts(template: Template, conversations: list[list[Message]]) -> Iterator[str]:
    tokenizer = Applier(template)
    for messages in conversations:
        yield tokenizer.apply(template.text, messages, prompt=True)


def load_transformers() -> None:
    """Imports what `Applier` uses, which takes longer than a conversation may."""
    from transformers import tokenization_utils_base  # noqa: F401


class Applier:
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
        with _refusals(messages, tools):
            text = self._apply_chat_template(
                self, messages, tools, chat_template=template, tokenize=False, add_generation_prompt=prompt
            )
            text.encode()  # UnicodeEncodeError: an unpaired surrogate, which tokenizers reject
        return text

    def generated(self, template: str, messages: list[Message], tools: Tools) -> list[Span]:
        """The spans of the conversation's text that the template marks as generated. Raises as `apply`."""
        from transformers.utils.chat_template_utils import render_jinja_template

        variables: dict[str, Any] = {**self.special_tokens_map, "tools": tools, "chat_template": template}
        with _refusals(messages, tools):
            rendered: Any = render_jinja_template([messages], return_assistant_tokens_mask=True, **variables)
        return rendered[1][0]


@contextmanager
def _refusals(messages: list[Message], tools: Tools) -> Iterator[None]:
    """Raises UserError for whatever a template raises."""
    try:
        yield
    except MemoryError:
        raise
    except RecursionError as error:
        raise UserError(NESTED) from error
    except Exception as error:
        if isinstance(error, UnicodeEncodeError) and _has_surrogate([messages, tools]):
            raise UserError("the conversation has half a character: a lone surrogate") from error
        raise UserError(f"the chat template refuses the conversation: {describe(error)}") from error


def _has_surrogate(data: Any) -> bool:
    text = json.dumps(data, ensure_ascii=False, default=str)
    return text != text.encode(errors="replace").decode()
