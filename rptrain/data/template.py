"""Examples to documents of token ids, with the mask of the tokens that the loss counts."""

from collections.abc import Iterator, Sequence
from os.path import isfile
from pathlib import Path
from typing import Any

import numpy as np

from rptrain.data.formats import Example, Message, report_bad
from rptrain.data.packing import Documents
from rptrain.errors import UserError

CHUNK = 1024  # examples that are tokenised in one call
MARK = "\ue000"  # of Unicode's private use: stands for a turn's content while its place is looked for
# Stock templates write today's date; with it the tokens of a run would differ from those of its resumption.
FIXED_DATE = (
    '{%- macro strftime_now(format) -%}{{- "2024-07-26" if format == "%Y-%m-%d" else "26 Jul 2024" -}}{%- endmacro -%}'
)
HELP = "give a `data.chat_template` that does, or set `data.assistant_only_loss = false`"

Span = tuple[int, int]


def encode(
    examples: Sequence[Example],
    tokenizer: Any,
    documents: Documents,
    *,
    assistant_only_loss: bool = True,
    chat_template: str | None = None,
) -> None:
    """Adds every example's tokens to `documents`.

    Of a conversation the loss counts what the assistant wrote, with the token that ends its turn; of a raw
    text (which an end-of-text token ends), and without `assistant_only_loss`, everything. `chat_template` is
    a path or a template; None takes the tokenizer's. UserError: there is no template or end-of-text token, or
    the template refuses more than 1 % of the conversations; fewer are left out with a warning.
    """
    chats = [example for example in examples if example.messages is not None]
    if chats:
        renderer = Renderer(tokenizer, load_template(tokenizer, chat_template))
        bad: list[str] = []
        for chunk in _chunks(chats):
            rendered: list[tuple[str, list[Span]]] = []
            for chat in chunk:
                try:
                    rendered.append(renderer.render(chat.messages, assistant_only_loss))
                except ValueError as error:
                    bad.append(f"{chat.place}: {error}")
            _add_chats(rendered, tokenizer, documents)
        report_bad(bad, len(chats))
    texts = [example.text for example in examples if example.text is not None]
    if texts and tokenizer.eos_token_id is None:
        raise UserError("raw text needs a tokenizer with an end-of-text token (`eos_token`)")
    for chunk in _chunks(texts):
        for ids in tokenizer(list(chunk), return_attention_mask=False, verbose=False)["input_ids"]:
            if ids[-1:] != [tokenizer.eos_token_id]:
                ids.append(tokenizer.eos_token_id)
            documents.add(ids, [True] * len(ids), divisible=True)


def load_template(tokenizer: Any, chat_template: str | None) -> str:
    """The Jinja text of `data.chat_template`: a path, a literal template, or None for the tokenizer's own."""
    if chat_template is None:
        if not tokenizer.chat_template:
            raise UserError("the tokenizer has no chat template: set `data.chat_template` to a Jinja file")
        return tokenizer.get_chat_template()
    if "{" in chat_template:
        return chat_template
    path = Path(chat_template)
    if not isfile(path):
        raise UserError(f"data.chat_template: {path} is neither a file nor a Jinja template")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"data.chat_template: {path} is not UTF-8 text: {error}") from error


class Renderer:
    """Renders conversations and finds what the assistant wrote in them.

    The usual way, `return_assistant_tokens_mask`, needs templates with `{% generation %}` marks and gives an
    all-zero mask for those of Llama, Qwen and others, so spans are found by rendering: a turn begins where
    the conversation before it ends, with the generation prompt, and ends where the conversation up to it
    ends. Where that is no prefix of the whole (Qwen3 and GPT-OSS write earlier turns differently from the
    last), the turn's place is found by putting a mark in place of its content.
    """

    def __init__(self, tokenizer: Any, template: str):
        self._tokenizer = tokenizer
        self._template = FIXED_DATE + template if "strftime_now" in template else template
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._special = tuple(sorted(special, key=lambda token: (-len(token), token)))
        probe: list[Message] = [{"role": "user", "content": "?"}]
        try:
            self._prompts = self._apply(probe) != self._apply(probe, prompt=True)
        except ValueError:  # it wants more than one message; without a prompt the marks tell all
            self._prompts = False

    def render(self, messages: list[Message], assistant_only: bool) -> tuple[str, list[Span]]:
        """The conversation's text and the supervised spans of its characters.

        ValueError: the template refuses the conversation, or does not show where an assistant's turn ends.
        """
        whole = self._apply(messages)
        if not assistant_only:
            return whole, [(0, len(whole))]
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        return whole, [(self._start(messages, turn, whole), self._end(messages, turn, whole)) for turn in turns]

    def _apply(self, messages: list[Message], prompt: bool = False) -> str:
        from jinja2 import TemplateError

        try:
            return self._tokenizer.apply_chat_template(
                messages, chat_template=self._template, tokenize=False, add_generation_prompt=prompt
            )
        except (TemplateError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
            raise ValueError(f"the chat template refuses it: {error}") from error

    def _start(self, messages: list[Message], turn: int, whole: str) -> int:
        if turn > 0 and self._prompts:
            before = self._apply(messages[:turn], prompt=True)
            if whole.startswith(before):
                return len(before)
        before, _ = self._around(messages, turn)
        if not whole.startswith(before):
            raise ValueError(f"the chat template does not show where turn {turn + 1} begins: {HELP}")
        return len(before)

    def _end(self, messages: list[Message], turn: int, whole: str) -> int:
        """Where the turn's end token ends; line breaks that follow it belong to the template."""
        until = whole if turn == len(messages) - 1 else self._apply(messages[: turn + 1])
        if whole.startswith(until):
            trimmed = until.rstrip()
            return len(trimmed) if trimmed.endswith(self._special) else len(until)
        _, after = self._around(messages, turn)
        token = next((token for token in self._special if after.lstrip().startswith(token)), None)
        if token is None or not whole.endswith(after):
            raise ValueError(f"the chat template does not show where turn {turn + 1} ends: {HELP}")
        return len(whole) - len(after.lstrip()) + len(token)

    def _around(self, messages: list[Message], turn: int) -> tuple[str, str]:
        """The text before and after a turn's content."""
        changed = [*messages[:turn], {**messages[turn], "content": MARK}, *messages[turn + 1 :]]
        before, mark, after = self._apply(changed).partition(MARK)
        if not mark:
            raise ValueError(f"the chat template does not write the text of turn {turn + 1}: {HELP}")
        return before, after


def _add_chats(rendered: list[tuple[str, list[Span]]], tokenizer: Any, documents: Documents) -> None:
    if not rendered:
        return
    tokens = tokenizer(
        [text for text, _ in rendered],
        add_special_tokens=False,  # the template has written them
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,
    )
    for ids, offsets, (_, spans) in zip(tokens["input_ids"], tokens["offset_mapping"], rendered, strict=True):
        bounds = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
        first, past = bounds[:, 0], np.maximum(bounds[:, 1], bounds[:, 0] + 1)
        mask = np.zeros(len(ids), dtype=bool)
        for start, end in spans:
            mask |= (first < end) & (past > start)
        documents.add(ids, mask.tolist())


def _chunks(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), CHUNK):
        yield items[start : start + CHUNK]
