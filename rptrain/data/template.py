"""Tokenization of examples with chat templates, with a mask of the tokens that the loss counts."""

import pickle
from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import chain
from os.path import isfile
from pathlib import Path
from typing import Any

import numpy as np

from rptrain.data.formats import Example, Tally
from rptrain.data.render import LONGEST, NESTED, Rendering, Span, Template, exceeded, render_rows, too_long
from rptrain.data.tokens import Document, tokenized
from rptrain.utils.errors import UserError
from rptrain.utils.files import read_small_text
from rptrain.utils.limited import Limited, stream
from rptrain.utils.text import not_utf8

CHUNK, CHUNK_TEXT = 1024, 1 << 21  # examples per call of the tokenizer, and characters after which a call ends earlier
ROWS, ROW_BYTES = 256, 1 << 20  # examples that are rendered at once, and their bytes after which there are fewer
Row = bytes | str | None  # of a conversation: what `render_rows` takes, or why it cannot be rendered; None: of a text
SET = "set `data.chat_template` to a Jinja file"


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
    tally = tally or Tally()
    rendered: list[tuple[int, str, list[Span]]] = []
    texts: list[Example] = []
    size = 0

    def documents() -> Iterator[Document]:
        """Documents of the gathered examples, which are cleared."""
        nonlocal rendered, texts, size
        parts = _chats(rendered, tokenizer), _texts(texts, tokenizer, assistant_only_loss)
        rendered, texts, size = [], [], 0
        return merge(*parts, key=lambda document: document.line)

    for example, rendering in _rendered(examples, tokenizer, chat_template, assistant_only_loss):
        if isinstance(rendering, str):
            tally.add(example.line, rendering)
            continue
        if rendering is not None:
            rendered.append((example.line, *rendering))
            size += len(rendering[0])
        elif (text := example.text) is not None:
            if len(text) > CHUNK_TEXT and not example.prompt:
                yield from documents()
                yield _long_text(example.line, text, tokenizer)
            elif len(text) > LONGEST:
                tally.add(example.line, too_long(text, LONGEST))
                continue
            else:
                texts.append(example)
                size += len(text)
        if size >= CHUNK_TEXT or len(rendered) + len(texts) >= CHUNK:
            yield from documents()
    yield from documents()


def _rendered(
    examples: Iterable[Example], tokenizer: Any, chat_template: str | None, assistant_only: bool
) -> Iterator[tuple[Example, Rendering | str | None]]:
    """The examples, each conversation with its rendering or the reason why there is none.

    A child process renders some conversations while those before are tokenized.
    """
    template: Template | None = None
    before = list[tuple[Example, Row]]()
    renderings: Iterator[Rendering | str] = iter(())
    for some in _some(examples):
        done = _finished(before, renderings)
        before = some
        if rows := [row for _, row in some if isinstance(row, bytes)]:
            template = template or Template.of(tokenizer, load_template(tokenizer, chat_template))
            renderings = stream(render_rows, template, rows, assistant_only, LONGEST)
        yield from done
    yield from _finished(before, renderings)


def _some(examples: Iterable[Example]) -> Iterator[list[tuple[Example, Row]]]:
    """The examples, at most ROWS at a time."""
    some, size = list[tuple[Example, Row]](), 0
    for example in examples:
        row = None if example.messages is None else _row(example)
        some.append((example, row))
        size += len(example.text or row or ())
        if len(some) >= ROWS or size >= ROW_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


def _row(example: Example) -> bytes | str:
    try:
        return pickle.dumps((example.messages, example.tools, example.learned), pickle.HIGHEST_PROTOCOL)
    except RecursionError:
        return NESTED


def _finished(
    examples: list[tuple[Example, Row]], renderings: Iterator[Rendering | str]
) -> list[tuple[Example, Rendering | str | None]]:
    """Raises UserError with the place of a conversation that exceeds a limit."""
    try:
        finished = [(example, next(renderings) if isinstance(row, bytes) else row) for example, row in examples]
        assert next(renderings, None) is None  # reads to the end, so that the child can be used again
    except Limited as error:
        chats = [example for example, row in examples if isinstance(row, bytes)]
        raise UserError(f"{chats[error.done].place}: {exceeded(error)}") from None
    return finished


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
        raise UserError(f"data.chat_template: {path} is {not_utf8(error.object[error.start])}") from error


def _chats(rendered: list[tuple[int, str, list[Span]]], tokenizer: Any) -> Iterator[Document]:
    if not rendered:
        return
    tokens = tokenized(
        tokenizer,
        [text for _, text, _ in rendered],
        add_special_tokens=False,  # written by the template
        return_offsets_mapping=True,
    )
    for ids, offsets, (line, _, spans) in zip(tokens["input_ids"], tokens["offset_mapping"], rendered, strict=True):
        yield Document(line, np.array(ids, dtype=np.int32), _within(offsets, spans))


def _long_text(line: int, text: str, tokenizer: Any) -> Document:
    """Splits a text into parts, if possible at line ends. Tokens at the ends may differ from those of the whole."""
    _check_end(tokenizer)
    end = [tokenizer.eos_token_id]
    begin = tokenized(tokenizer, "")["input_ids"]
    parts = [np.array(begin[:-1] if begin[-1:] == end else begin, np.int32)]
    start = 0
    while start < len(text):
        stop = start + CHUNK_TEXT
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        tokens = tokenized(tokenizer, text[start:stop], add_special_tokens=False)
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
    said = [example.text or "" for example in texts]
    tokens = tokenized(tokenizer, said, return_offsets_mapping=prompts)
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
