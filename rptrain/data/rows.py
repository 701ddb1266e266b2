"""Rows as tokens and a mask of those that the loss counts. Runs in child processes with limits.

Several children tokenize the rows of a file. What they make of a row depends on nothing but the row and the settings.
"""

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from rptrain.data.notes import key_of
from rptrain.data.probe import panics
from rptrain.data.render import LONGEST, NESTED, Span, Template, load_transformers, too_long
from rptrain.data.turns import Reasoning, Renderer, Rendering

SHORT = 1 << 18  # maximum characters of a text that is tokenized here; longer ones take more than their time


@dataclass(frozen=True)
class EncodeSettings:
    """What the tokens of a row depend on."""

    tokenizer: str  # the path of a tokenizer.json
    name: str  # of the tokenizer, for errors
    split_special: bool  # whether the texts of special tokens are tokenized as any other text
    bos: int | None
    eos: int | None  # ends a text
    eos_ids: frozenset[int]  # of the model
    special: frozenset[int]  # and other added tokens in the form of special ones
    template: Template | None  # None: only texts can be tokenized
    assistant_only: bool
    reasoning: Reasoning
    short: int = SHORT
    longest: int = LONGEST


class Tokens(NamedTuple):
    """The tokens of a row: int32 [tokens] and bool [tokens], as bytes. `end`: see `Tally.ends`; -1: none."""

    ids: bytes
    supervised: bytes
    end: int = -1
    notes: tuple[str, ...] = ()


Encoded = Tokens | Rendering | str  # a rendering that is too long to be tokenized here; or why the row is bad


def load(settings: EncodeSettings) -> None:
    """Loads what `encode_rows` needs, which takes longer than a row may."""
    _tokenizer(settings.tokenizer, settings.split_special)
    if settings.template is not None:
        load_transformers()


def encode_rows(settings: EncodeSettings, rows: Sequence[bytes]) -> Iterator[Encoded]:
    """What becomes of each row: pickled messages, tools and flags, or a text and the characters of its prompt."""
    for row in rows:
        try:
            yield _encoded(settings, pickle.loads(row))
        except ValueError as error:
            yield str(error)
        except RecursionError:
            yield NESTED


def _encoded(settings: EncodeSettings, row: tuple[Any, ...]) -> Encoded:
    if len(row) == 2:
        return _tokens_of_text(settings, *row)
    assert settings.template is not None
    messages, tools, learned = row
    rendering = _renderer(settings.template, settings.reasoning).render(
        messages, tools, learned, settings.assistant_only
    )
    if len(rendering.text) > settings.longest:
        raise too_long(rendering.text, settings.longest)
    if len(rendering.text) > settings.short:
        return rendering
    ids, offsets = _tokenize(settings, rendering.text, special=False)
    return tokens_of_chat(settings, rendering, ids, offsets)


def tokens_of_chat(settings: EncodeSettings, rendering: Rendering, ids: list[int], offsets: list[Span]) -> Tokens:
    """The tokens of a rendered conversation."""
    supervised, notes = within(offsets, rendering.spans), rendering.notes
    if more := _more_bos(settings, ids):
        ids, supervised, notes = ids[more:], supervised[more:], (*notes, key_of("bos"))
    end = -1
    if rendering.ends and supervised.any():
        last = ids[int(np.flatnonzero(supervised)[-1])]
        end = last if last in settings.special else -1
    return Tokens(np.array(ids, np.int32).tobytes(), supervised.tobytes(), end, notes)


def _tokens_of_text(settings: EncodeSettings, text: str, prompt: int) -> Tokens:
    """The tokens of a text, of which the first `prompt` characters are context only."""
    ids, offsets = _tokenize(settings, text, special=True)
    return tokens_of_text(settings, text, prompt, ids, offsets)


def tokens_of_text(settings: EncodeSettings, text: str, prompt: int, ids: list[int], offsets: list[Span]) -> Tokens:
    notes = tuple[str, ...]()
    supervised = within(offsets, [(prompt, len(text))]) if prompt else np.ones(len(ids), bool)
    if more := _more_bos(settings, ids):
        ids, supervised, notes = ids[more:], supervised[more:], (key_of("bos"),)
    if ids[-1:] == [settings.eos]:
        supervised[-1] = True  # some tokenizers add it themselves, without a place in the text
    else:
        assert settings.eos is not None
        ids, supervised = [*ids, settings.eos], np.append(supervised, True)
    return Tokens(np.array(ids, np.int32).tobytes(), supervised.tobytes(), notes=notes)


def _more_bos(settings: EncodeSettings, ids: list[int]) -> int:
    """The number of BOS tokens at the beginning besides the first."""
    count = next((number for number, token in enumerate(ids) if token != settings.bos), len(ids))
    return max(0, count - 1)


def within(offsets: list[Span], spans: list[Span]) -> np.ndarray:
    """Whether each token has a character within a span: bool [tokens]."""
    bounds = np.fromiter(chain.from_iterable(offsets), np.int64, 2 * len(offsets)).reshape(-1, 2)
    first, past = bounds[:, 0], np.maximum(bounds[:, 1], bounds[:, 0] + 1)
    mask = np.zeros(len(bounds), dtype=bool)
    for start, end in spans:
        mask |= (first < end) & (past > start)
    return mask


def _tokenize(settings: EncodeSettings, text: str, *, special: bool) -> tuple[list[int], list[Span]]:
    """The tokens of a text and their places. `special`: adds the tokens that the tokenizer puts around texts."""
    with panics(settings.name):
        encoding = _tokenizer(settings.tokenizer, settings.split_special).encode(text, add_special_tokens=special)
    return encoding.ids, encoding.offsets


@lru_cache(1)
def _tokenizer(path: str, split_special: bool) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(path)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = split_special
    return tokenizer


@lru_cache(2)
def _renderer(template: Template, reasoning: Reasoning) -> Renderer:
    return Renderer(template, reasoning)
