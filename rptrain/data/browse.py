"""Pages of a data set's rows for the data browser: samples as training sees them, and rows with problems."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rptrain.config.schema import Config
from rptrain.data.datasets import find_tokenizer
from rptrain.data.excerpt import Excerpt, Limits, excerpt
from rptrain.data.preview import sample_in
from rptrain.data.repeats import Repeats
from rptrain.data.row_text import beginnings
from rptrain.data.samples import Page, Row
from rptrain.data.tokens import Stream
from rptrain.models.locate import locate

BROWSING = Limits(rows=2000, characters=8 << 20, seconds=10.0)
BAD, LONG, EMPTY = "bad", "longer than max_length", "without a supervised token"
CHARACTERS = 4000  # of a bad row
DONE = {
    "truncate": "truncated by {} tokens",
    "split": "split",
    "drop": "left out: {} tokens too long",
    "error": "too long",
}


@dataclass(frozen=True)
class _Entry:
    """A row: the part of the excerpt that it is in, its line, and its document or why it is bad."""

    part: int
    line: int
    document: int  # -1: none
    kind: str  # of its problem
    problem: str


def page(config: Config, number: int, first: int, count: int, problems: bool) -> Page:
    """`count` rows of a data set from number `first` on; with `problems`, of those that have a problem.

    The sets are those to train on, and then those of [[data.val]]. Raises UserError as `excerpt` and `find_tokenizer`.
    """
    sources = (*config.data.train, *config.data.val)
    tokenizer = find_tokenizer(config, locate(config.model.path))
    found = excerpt(sources[number], config.data, tokenizer, BROWSING)
    entries = _entries(config, found)
    kinds = [entry.kind for entry in entries if entry.kind]
    shown = [entry for entry in entries if entry.kind] if problems else entries
    first = max(0, min(first, len(shown) - 1))
    repeats = Repeats.of([part.stream for part in found.parts])
    lengths = np.concatenate([np.zeros(0, np.int32), *(part.stream.lengths for part in found.parts)])
    return Page(
        tuple(source.path for source in sources),
        number,
        tuple(_rows(config, found, shown[first : first + count], tokenizer)),
        first,
        len(shown),
        len(entries),
        found.whole,
        tuple((kind, kinds.count(kind)) for kind in (BAD, LONG, EMPTY) if kind in kinds),
        _histogram(lengths, config.data.max_length),
        config.data.max_length,
        (int(lengths.min()), int(lengths.max())) if len(lengths) else None,
        repeats.count if repeats.many else 0,
    )


def _entries(config: Config, found: Excerpt) -> list[_Entry]:
    """All rows that were read, in order."""
    entries = []
    for number, part in enumerate(found.parts):
        for text in part.tally.first:
            line, _, reason = text.partition(": ")
            entries.append(_Entry(number, int(line), -1, BAD, reason))
        stream = part.stream
        columns = (
            stream.lines.tolist(),
            stream.lengths.tolist(),
            stream.supervised.tolist(),
            stream.divisible.tolist(),
        )
        for document, (line, length, supervised, divisible) in enumerate(zip(*columns, strict=True)):
            kind = problem = ""
            if (over := length - config.data.max_length) > 0:
                done = "split" if divisible else config.data.overlong
                kind, problem = LONG, DONE[done].format(f"{over:,}")
            elif not supervised:
                kind, problem = EMPTY, "left out: no supervised token"
            entries.append(_Entry(number, line, document, kind, problem))
    return sorted(entries, key=lambda entry: (entry.part, entry.line))


def _rows(config: Config, found: Excerpt, entries: Sequence[_Entry], tokenizer: object) -> Iterator[Row]:
    written = dict[int, dict[int, str]]()  # by part and line
    for part in {entry.part for entry in entries if entry.kind == BAD} if found.files else ():
        lines = {entry.line for entry in entries if entry.part == part and entry.kind == BAD}
        written[part] = beginnings(Path(found.parts[part].stream.name), lines, CHARACTERS)
    for entry in entries:
        stream = found.parts[entry.part].stream
        if entry.kind == BAD:
            text = written.get(entry.part, {}).get(entry.line, "")
            yield Row(f"{stream.name}:{entry.line}", 0, (), entry.problem, text)
        else:
            yield _row(config, stream, entry, tokenizer)


def _row(config: Config, stream: Stream, entry: _Entry, tokenizer: object) -> Row:
    length = int(stream.lengths[entry.document])
    begin = int(stream.lengths[: entry.document].sum(dtype=np.int64))
    sample = sample_in(stream, begin, min(length, config.data.max_length), tokenizer)
    return Row(stream.place(entry.document), length, sample.parts, entry.problem)


def _histogram(lengths: np.ndarray, max_length: int) -> tuple[tuple[int, int], ...]:
    """Samples by tokens: bins up to powers of two, and up to max_length."""
    if not len(lengths):
        return ()
    bounds = sorted({max_length, *(1 << power for power in range(1, int(lengths.max()).bit_length() + 1))})
    bins = np.bincount([bisect_left(bounds, length) for length in lengths.tolist()], minlength=len(bounds)).tolist()
    used = [number for number, count in enumerate(bins) if count]
    kept = range(min(used[0], bounds.index(max_length)), max(used[-1], bounds.index(max_length)) + 1)
    return tuple((bounds[number], bins[number]) for number in kept)
