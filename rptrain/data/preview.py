"""A preview of the data: samples as training sees them, with the trained-on parts marked, and counts."""

from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from rptrain.data.loader import Batches
from rptrain.data.sequences import Sequences
from rptrain.data.tokens import Stream
from rptrain.utils.text import printable

LEARNED = ("⟦", "⟧")  # around trained-on text without color


@dataclass(frozen=True)
class TextPart:
    """The text of consecutive tokens that are all supervised or all not."""

    text: str
    supervised: bool


@dataclass(frozen=True)
class Sample:
    place: str  # "file:line"
    tokens: int
    supervised: int  # labels that the loss counts
    parts: tuple[TextPart, ...]


@dataclass(frozen=True)
class Preview:
    """The first samples of the first epoch, in training order, and counts of an epoch of weight 1."""

    samples: tuple[Sample, ...]
    rows: int
    length: int  # of a row
    samples_read: int
    tokens: int  # in rows, without padding
    supervised: int  # labels that the loss counts
    padding: float  # fraction of the sequences' tokens
    steps_per_epoch: int
    cut: int
    cut_tokens: int
    divided: int
    dropped: int
    dropped_tokens: int
    unsupervised: int  # samples that were left out because nothing in them is supervised
    not_taken: tuple[str, ...]  # for each folder, its files that do not belong to the split

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def preview(batches: Batches, tokenizer: Any, count: int) -> Preview:
    """`count` samples, and all counts. Without a tokenizer, texts are token ids."""
    rows = batches.sequences
    documents = (
        document
        for row in batches.order(0).tolist()
        for document in range(int(rows.starts[row]), int(rows.starts[row + 1]))
    )
    done = rows.trimmed
    return Preview(
        samples=tuple(_sample(rows, document, tokenizer) for document in islice(documents, count)),
        rows=len(rows),
        length=rows.length,
        samples_read=done.samples,
        tokens=rows.tokens,
        supervised=int(rows.supervised.sum()),
        padding=1 - rows.tokens / (len(rows) * rows.length),
        steps_per_epoch=batches.steps_per_epoch,
        cut=done.cut,
        cut_tokens=done.cut_tokens,
        divided=done.divided,
        dropped=done.dropped,
        dropped_tokens=done.dropped_tokens,
        unsupervised=rows.unsupervised,
        not_taken=rows.not_taken,
    )


def show(found: Preview, console: Console) -> None:
    """Prints it; what is learned is green in a terminal with colors, else in brackets."""
    colors = console.color_system is not None and not console.no_color
    console.print(Text("\nData", style="bold"))
    for line in _counts(found):
        console.print(Text(f"  {printable(line)}"))
    for sample in found.samples:
        console.print(Text(f"\n{sample.place}: {sample.tokens} tokens, {sample.supervised} supervised", style="bold"))
        text = Text()
        for part in sample.parts:
            shown = printable(part.text)
            if part.supervised and not colors:
                shown = shown.join(LEARNED)
            text.append(shown, "green" if part.supervised else "")
        console.print(text, soft_wrap=True)


def _counts(found: Preview) -> list[str]:
    share = found.supervised / found.tokens
    lines = [
        f"{found.samples_read:,} samples, {found.tokens:,} tokens in {found.rows:,} rows of {found.length:,}; "
        f"{found.steps_per_epoch:,} steps an epoch",
        f"{share:.1%} of the tokens are supervised; {found.padding:.1%} of the rows is padding",
    ]
    longer = f"longer than {found.length:,} tokens"
    if found.cut:
        lines.append(f"{found.cut:,} samples lost their end, {found.cut_tokens:,} tokens: {longer}")
    if found.divided:
        lines.append(f"{found.divided:,} samples were divided: {longer}")
    if found.dropped:
        lines.append(f"{found.dropped:,} samples of {found.dropped_tokens:,} tokens are left out: {longer}")
    if found.unsupervised:
        lines.append(f"{found.unsupervised:,} samples without a supervised token are left out")
    return [*lines, *found.not_taken]


def _sample(rows: Sequences, document: int, tokenizer: Any) -> Sample:
    begin, length = int(rows.begins[document]), int(rows.lengths[document])
    stream, place = _at(rows.streams, begin)
    marked = stream.tokens[place : place + length]
    supervised = marked < 0
    ids = np.where(supervised, ~marked, marked).tolist()
    bounds = [0, *(np.flatnonzero(np.diff(supervised)) + 1).tolist(), length]
    parts, before = [], ""
    for start, end in pairwise(bounds):
        text = _text(
            tokenizer, ids[:end]
        )  # decodes the whole, because the first token of a text can decode differently
        parts.append(TextPart(text[len(before) :], bool(supervised[start])))
        before = text
    line = int(np.searchsorted(np.cumsum(stream.lengths, dtype=np.int64), place, "right"))
    return Sample(stream.place(line), length, int(supervised[1:].sum()), tuple(parts))


def _at(streams: tuple[Stream, ...], begin: int) -> tuple[Stream, int]:
    """The stream, and the place in it, of a place in the tokens of all streams."""
    for stream in streams:
        if begin < len(stream.tokens):
            return stream, begin
        begin -= len(stream.tokens)
    raise IndexError(begin)


def _text(tokenizer: Any, ids: list[int]) -> str:
    if tokenizer is None:
        return "".join(f"{token} " for token in ids)
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
