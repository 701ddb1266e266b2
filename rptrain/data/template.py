"""Tokenization of examples with chat templates, with a mask of the tokens that the loss counts."""

import os
import pickle
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property, partial
from tempfile import gettempdir
from typing import Any, Self
from weakref import WeakKeyDictionary, finalize

import numpy as np

from rptrain.config.schema import Data
from rptrain.data import notes, templates
from rptrain.data.formats import Example, Tally
from rptrain.data.render import LONGEST, NESTED, Template, exceeded, is_special, too_long
from rptrain.data.rows import SHORT, Encoded, EncodeSettings, Tokens, encode_rows, load, tokens_of_chat, tokens_of_text
from rptrain.data.tokens import Document, ids_of, tokenized
from rptrain.data.turns import Reasoning, Rendering
from rptrain.utils import temporary
from rptrain.utils.errors import UserError
from rptrain.utils.heap import trim
from rptrain.utils.host_memory import available_bytes
from rptrain.utils.limited import Limited, Pool
from rptrain.utils.parallel import own_cores
from rptrain.utils.units import format_bytes

CHUNK_TEXT = 1 << 21  # characters after which a text is tokenized in parts
WAITING = 1 << 25  # characters of long texts that are read ahead
# Bytes per character while a text is tokenized here: in parts, with a tokenizer that makes a token of each character
# (with a large vocabulary it takes half), and as a whole with offsets, with a large vocabulary.
PART_BYTES, WHOLE_BYTES = 340, 180
TOKEN_BYTES = 8  # of a text in parts, per token: the tokens of the parts before, and their mask
ROWS, ROW_BYTES = 256, 1 << 20  # maximum examples that a child process takes at once, and their bytes
SECONDS = 5.0  # processor time of a row, and as much again for every MESSAGES, since some turns are rendered separately
MESSAGES = 20
SET = f"set `data.chat_template` to a Jinja file, or to one of {', '.join(templates.NAMES)}"

_Item = tuple[Example, bytes | str | None]  # an example, and what `_row` makes of it


@dataclass(frozen=True)
class EncodeOptions:
    """How rows become tokens, and which of them the loss counts: the keys of [data] with these names.

    Without `assistant_only_loss` the loss counts everything. `chat_template`: see `load_template`. `eos_ids` are the
    model's, besides the tokenizer's.
    """

    assistant_only_loss: bool = True
    chat_template: str | None = None
    reasoning: Reasoning = "refuse"
    eos_ids: frozenset[int] = frozenset()

    @classmethod
    def of(cls, data: Data, tokenizer: Any) -> Self:
        """Those of a config, and the EOS ids that `find_tokenizer` has found."""
        eos_ids = getattr(tokenizer, "model_eos_ids", frozenset())
        return cls(data.assistant_only_loss, data.chat_template, data.reasoning, eos_ids)


DEFAULT = EncodeOptions()


def encode(
    examples: Iterable[Example],
    tokenizer: Any,
    options: EncodeOptions = DEFAULT,
    *,
    tally: Tally | None = None,
    processes: int | None = None,
) -> Generator[Document, None, None]:
    """Yields the documents of the examples in order; only some are in memory at a time.

    In a conversation, the loss counts the messages to train on, each with the token that ends the turn; in a text
    (which an end-of-text token ends), everything after its prompt. Conversations that the template rejects are counted
    in `tally`. `processes` work at once; None: one per core. Raises UserError without a template or an end-of-text
    token.
    """
    tally = tally or Tally()
    encoder = _Encoder(tokenizer, options)
    count = processes or own_cores()
    waiting = deque[tuple[list[_Item], Future[list[Encoded]]]]()
    long = 0  # characters of long texts that wait
    with Pool(count) as pool:
        for items in _some(examples, options.assistant_only_loss):
            rows = [row for _, row in items if isinstance(row, bytes)]
            settings = encoder.settings(items)
            most = max((len(example.messages or ()) for example, _ in items), default=0)
            seconds = SECONDS * (1 + most // MESSAGES)
            encoded = pool.submit(encode_rows, settings, rows, seconds=seconds, setup=partial(load, settings))
            waiting.append((items, encoded))
            long += _long(items)
            while len(waiting) > 2 * count or long > WAITING:
                items, encoded = waiting.popleft()
                long -= _long(items)
                yield from encoder.documents(items, encoded, tally)
        while waiting:
            yield from encoder.documents(*waiting.popleft(), tally)


class _Encoder:
    """The settings of `encode`, and documents from what child processes return."""

    def __init__(self, tokenizer: Any, options: EncodeOptions) -> None:
        self._tokenizer, self._chat_template = tokenizer, options.chat_template
        self._eos_ids = options.eos_ids | ({tokenizer.eos_token_id} - {None})
        self._texts = EncodeSettings(
            tokenizer=_file_of(tokenizer),
            name=str(tokenizer.name_or_path),
            split_special=bool(tokenizer.split_special_tokens),
            bos=tokenizer.bos_token_id,
            eos=tokenizer.eos_token_id,
            eos_ids=self._eos_ids,
            special=frozenset(number for number, token in tokenizer.added_tokens_decoder.items() if is_special(token)),
            template=None,
            assistant_only=options.assistant_only_loss,
            reasoning=options.reasoning,
            short=SHORT,
            longest=LONGEST,
        )

    @cached_property
    def _chats(self) -> EncodeSettings:
        text = load_template(self._tokenizer, self._chat_template)
        with_tools = template_for_tools(self._tokenizer, self._chat_template)
        return replace(self._texts, template=Template.of(self._tokenizer, text, with_tools, self._eos_ids))

    def settings(self, items: "list[_Item]") -> EncodeSettings:
        """The settings for some examples. Raises UserError if they need what the tokenizer does not have."""
        if any(example.text is not None for example, _ in items):
            _check_end(self._tokenizer)
        return self._chats if any(example.messages is not None for example, _ in items) else self._texts

    def documents(self, items: "list[_Item]", encoded: "Future[list[Encoded]]", tally: Tally) -> Iterator[Document]:
        """Raises UserError with the place of a row that exceeds a limit."""
        try:
            found = iter(encoded.result())
        except Limited as error:
            sent = [example for example, row in items if isinstance(row, bytes)]
            if error.done >= len(sent):  # not at a row, but before
                raise UserError(f"{self._tokenizer.name_or_path}: loading the tokenizer {error}") from None
            example = sent[error.done]
            about = f"tokenizing the text {error}: split it" if example.messages is None else exceeded(error)
            raise UserError(f"{example.place}: {about}") from None
        for example, row in items:
            tokens = next(found) if isinstance(row, bytes) else row
            if tokens is None:
                yield self._here(example)
                continue
            if isinstance(tokens, Rendering):
                _check_room(example, len(tokens.text) * WHOLE_BYTES)
                tokens = self._of_chat(tokens)
            if isinstance(tokens, str):
                tally.add(example.line, tokens)
                continue
            notes.count(tally.notes, tokens.notes, example.notes)
            if tokens.end >= 0:
                tally.ends[tokens.end] += 1
            yield _document(example, tokens)

    def _of_chat(self, rendering: Rendering) -> Tokens:
        found = tokenized(self._tokenizer, rendering.text, add_special_tokens=False, return_offsets_mapping=True)
        return tokens_of_chat(self._chats, rendering, found["input_ids"], found["offset_mapping"])

    def _here(self, example: Example) -> Document:
        """The document of a text that takes longer than a child process may."""
        text, prompt = example.text or "", example.prompt
        if len(text) > CHUNK_TEXT and not prompt:
            _check_room(example, parts_bytes(len(text)))
            return _long_text(example.line, text, self._tokenizer)
        _check_room(example, len(text) * WHOLE_BYTES)
        found = tokenized(self._tokenizer, text, return_offsets_mapping=True)
        tokens = tokens_of_text(self._texts, text, prompt, found["input_ids"], found["offset_mapping"])
        return _document(example, tokens)


def _document(example: Example, tokens: Tokens) -> Document:
    ids, supervised = np.frombuffer(tokens.ids, np.int32), np.frombuffer(tokens.supervised, bool)
    return Document(example.line, ids, supervised, divisible=example.text is not None and not example.prompt)


def _some(examples: Iterable[Example], assistant_only: bool) -> Iterator[list[_Item]]:
    """The examples, at most ROWS at a time."""
    some, size = list[_Item](), 0
    for example in examples:
        row = _row(example, assistant_only)
        some.append((example, row))
        size += len(row or example.text or "")
        if len(some) >= ROWS or size >= ROW_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


def _long(items: list[_Item]) -> int:
    """The characters of texts that are tokenized in this process."""
    return sum(len(example.text or "") for example, row in items if row is None)


def _row(example: Example, assistant_only: bool) -> bytes | str | None:
    """What `encode_rows` takes, or why the row is bad; None: a text that is tokenized in this process."""
    if example.text is None:
        try:
            return pickle.dumps((example.messages, example.tools, example.learned), pickle.HIGHEST_PROTOCOL)
        except RecursionError:
            return NESTED
    prompt = example.prompt if assistant_only else 0
    if len(example.text) > LONGEST and example.prompt:
        return str(too_long(example.text, LONGEST))
    return None if len(example.text) > SHORT else pickle.dumps((example.text, prompt), pickle.HIGHEST_PROTOCOL)


_files = WeakKeyDictionary[Any, str]()  # of tokenizers, from which child processes load them


def _file_of(tokenizer: Any) -> str:
    """The path of a file with the tokenizer, which exists as long as the tokenizer."""
    if tokenizer not in _files:
        try:
            descriptor, path = temporary.create(".json")
            finalize(tokenizer, temporary.delete, path)
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogatepass") as file:
                file.write(tokenizer.backend_tokenizer.to_str())
        except OSError as error:
            raise UserError(
                f"{gettempdir()}: a temporary file with the tokenizer cannot be written: {error.strerror or error}"
            ) from error
        _files[tokenizer] = path
    return _files[tokenizer]


def template_for_tools(tokenizer: Any, chat_template: str | None) -> str:
    """The tokenizer's own template for conversations with tools; empty if there is none, or a `chat_template`."""
    if chat_template:
        return ""
    templates = tokenizer.chat_template
    return templates.get("tool_use", "") if isinstance(templates, dict) else ""


def load_template(tokenizer: Any, chat_template: str | None) -> str:
    """The Jinja text of `data.chat_template`: see `templates.text_of`; None: the tokenizer's own."""
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
    return templates.text_of(chat_template)


def parts_bytes(characters: int) -> int:
    """The host memory that a text takes at most while it is tokenized in parts, if each character is a token."""
    return min(characters, CHUNK_TEXT) * PART_BYTES + characters * TOKEN_BYTES


def _long_text(line: int, text: str, tokenizer: Any) -> Document:
    """Splits a text into parts, if possible at line ends. Tokens at the ends may differ from those of the whole."""
    _check_end(tokenizer)
    end = [tokenizer.eos_token_id]
    begin = tokenized(tokenizer, "")["input_ids"]  # which sets what `ids_of` needs
    begin = begin[:-1] if begin[-1:] == end else begin
    part = np.array(begin, np.int32)
    tokens = bytearray(part.tobytes())
    start = 0
    while start < len(text):
        stop = start + CHUNK_TEXT
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        part = ids_of(tokenizer, text[start:stop])
        if start == 0 and part[:1].tolist() == begin[-1:] == [tokenizer.bos_token_id]:
            part = part[1:]
        tokens += part.tobytes()
        trim()
        start = stop
    if part[-1:].tolist() != end:
        tokens += np.array(end, np.int32).tobytes()
    ids = np.frombuffer(tokens, np.int32)
    return Document(line, ids, np.ones(len(ids), bool), divisible=True)


def _check_room(example: Example, nbytes: int) -> None:
    """UserError if less host memory is free than the row takes while it is tokenized."""
    if nbytes > (free := available_bytes()):
        raise UserError(
            f"{example.place}: tokenizing this row takes about {format_bytes(nbytes)} of host memory, but "
            f"{format_bytes(free)} is free: stop other programs that use it, or split the row into several"
        )


def _check_end(tokenizer: Any) -> None:
    if tokenizer.eos_token_id is None:
        raise UserError("raw text needs a tokenizer with an end-of-text token (`eos_token`)")
