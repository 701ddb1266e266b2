"""Previews of data: samples as training sees them, with the trained-on parts marked, and counts of the whole set."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice, pairwise
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from rptrain.config.schema import Config, Data, TrainSet
from rptrain.data import formats, tasks
from rptrain.data.amount import warnings_of
from rptrain.data.datasets import find_tokenizer
from rptrain.data.excerpt import PLANNING, excerpt
from rptrain.data.folders import choose
from rptrain.data.loader import RANDOM, TASKS, Batches
from rptrain.data.pieces import Trimmed, piece
from rptrain.data.row_format import RowFormat
from rptrain.data.samples import FirstSamples, Sample, TextPart
from rptrain.data.sequences import Sequences
from rptrain.data.template import EncodeOptions, encode
from rptrain.data.tokens import Stream, gather, stream_of
from rptrain.models.locate import locate
from rptrain.utils.errors import UserError
from rptrain.utils.text import counted, printable
from rptrain.utils.units import format_bytes, format_percent

DECODED_BEFORE = 16  # tokens
EXAMINED = 1000  # rows of a file that are read at most to find its first samples
MARKS = ("⟦", "⟧")  # around trained-on text without color


@dataclass(frozen=True)
class Preview:
    """The first samples of the first epoch, in training order, and counts of an epoch of weight 1."""

    samples: tuple[Sample, ...]
    rows: int  # sequences
    length: int  # tokens of a sequence
    samples_read: int
    tokens: int  # without padding
    supervised: int  # labels that the loss counts
    padding: float  # fraction of the sequences that is padding
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
    sequences = batches.sequences
    documents = (
        document
        for index in batches.order(0).tolist()
        for document in range(int(sequences.starts[index]), int(sequences.starts[index + 1]))
    )
    done = sequences.trimmed
    return Preview(
        samples=tuple(_sample(sequences, document, tokenizer) for document in islice(documents, count)),
        rows=len(sequences),
        length=sequences.length,
        samples_read=done.samples,
        tokens=sequences.tokens,
        supervised=int(sequences.supervised.sum()),
        padding=1 - sequences.tokens / (len(sequences) * sequences.length),
        steps_per_epoch=batches.steps_per_epoch,
        cut=done.cut,
        cut_tokens=done.cut_tokens,
        divided=done.divided,
        dropped=done.dropped,
        dropped_tokens=done.dropped_tokens,
        unsupervised=sequences.unsupervised.count,
        not_taken=sequences.not_taken,
    )


def first_samples(config: Config, count: int) -> FirstSamples:
    """The first `count` samples of the config's first data set. Reads no more of its files than needed.

    Rows and samples that training leaves out are left out. Raises UserError if no sample is left in the first EXAMINED
    rows of a file, or if the tokenizer or the template has mistakes.
    """
    source = config.data.train[0]
    if source.path == RANDOM:
        return FirstSamples("random tokens, for measuring speed", ())
    tokenizer = find_tokenizer(config, locate(config.model.path))
    found, reasons = list[tuple[formats.Example, Sample]](), list[str]()
    bad = 0
    for file, read in _files(source, config.data, count):
        tally = formats.Tally()
        found += islice(_first_of(file, read(tally), config, tokenizer, tally, count), count - len(found))
        reasons += [f"{file}:{reason}" for reason in tally.first]
        bad += tally.bad
        if len(found) == count:
            break
    if not found:
        raise UserError(reasons[0] if reasons else f"{source.path}: {_nothing_left(config)}")
    about = _about(source, found[0][0], config.data.follow_links)
    if bad:
        about += f", {counted(bad, 'bad row')} before and between these"
    return FirstSamples(about, tuple(sample for _, sample in found), _warnings(config, tokenizer))


def _warnings(config: Config, tokenizer: Any) -> tuple[str, ...]:
    """What is probably not meant in the first rows of the first data set; a plan says what would be refused."""
    with suppress(UserError):
        first = excerpt(config.data.train[0], config.data, tokenizer, PLANNING)
        return tuple(warnings_of(config, [first]))
    return ()


def _about(source: TrainSet, first: formats.Example, follow_links: bool) -> str:
    if source.path == TASKS:
        return "generated questions"
    kind = "conversations" if first.messages is not None else "texts"
    files = choose(source.path, source.split, follow_links=follow_links).files
    return f"{kind}, {format_bytes(sum(file.stat().st_size for file in files))}"


def _nothing_left(config: Config) -> str:
    dropped = " or all are longer than data.max_length" if config.data.overlong == "drop" else ""
    return f"nothing to train on: its first samples have no supervised token{dropped}"


Read = Callable[[formats.Tally], Iterator[formats.Example]]


def _files(source: TrainSet, data: Data, count: int) -> list[tuple[str, Read]]:
    """The names of a data set's files, with their readers."""
    if source.path == TASKS:
        questions = enumerate(tasks.questions("train", count), 1)
        examples = [formats.Example(TASKS, line, messages=one.messages) for line, one in questions]
        return [(TASKS, lambda tally: iter(examples))]
    files = choose(source.path, source.split, follow_links=data.follow_links).files
    return [(str(file), partial(formats.read, file, RowFormat.of(source, data))) for file in files]


def _first_of(
    file: str, examples: Iterator[formats.Example], config: Config, tokenizer: Any, tally: formats.Tally, count: int
) -> Iterator[tuple[formats.Example, Sample]]:
    """The samples with a supervised token of the first EXAMINED examples, of which `count` are read at a time."""
    data, options = config.data, EncodeOptions.of(config.data, tokenizer)
    examples = islice(examples, EXAMINED)
    while some := list(islice(examples, count)):
        stream = gather(encode(some, tokenizer, options, tally=tally), file)
        if not len(stream):
            continue
        pieces = piece([stream], data.max_length, data.overlong)
        columns = (pieces.begins.tolist(), pieces.lengths.tolist(), pieces.supervised.tolist())
        for begin, length, supervised in zip(*columns, strict=True):
            if supervised:
                yield some[0], sample_in(stream, begin, length, tokenizer)


def show(found: Preview, console: Console) -> None:
    """Prints a preview. Trained-on text is green in a terminal with colors, otherwise in brackets."""
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
                shown = shown.join(MARKS)
            text.append(shown, "green" if part.supervised else "")
        console.print(text, soft_wrap=True)


def _counts(found: Preview) -> list[str]:
    share, padding = found.supervised / found.tokens, format_percent(found.padding)
    lines = [
        f"{counted(found.samples_read, 'sample')}, {counted(found.tokens, 'token')} in "
        f"{counted(found.rows, 'sequence')} of {found.length:,}; "
        f"{counted(found.steps_per_epoch, 'step')} per epoch",
        f"{format_percent(share)} of the tokens are supervised; the sequences are {padding} padding",
    ]
    trimmed = (found.cut, found.cut_tokens, found.divided, found.dropped, found.dropped_tokens)
    lines += Trimmed(found.samples_read, found.length, *trimmed).lines()
    if found.unsupervised:
        lines.append(f"left out {counted(found.unsupervised, 'sample')} without a supervised token")
    return [*lines, *found.not_taken]


def _sample(sequences: Sequences, document: int, tokenizer: Any) -> Sample:
    stream, begin = stream_of(sequences.streams, int(sequences.begins[document]))
    return sample_in(stream, begin, int(sequences.lengths[document]), tokenizer)


def sample_in(stream: Stream, begin: int, length: int, tokenizer: Any) -> Sample:
    """`length` tokens of a stream from `begin` on, which are of one document."""
    marked = stream.tokens[begin : begin + length]
    supervised = marked < 0
    ids = np.where(supervised, ~marked, marked).tolist()
    bounds = [0, *(np.flatnonzero(np.diff(supervised)) + 1).tolist(), length]
    parts = []
    for start, end in pairwise(bounds):
        # Decodes some tokens before as well, because the first token of a text can decode differently.
        first = max(0, start - DECODED_BEFORE)
        before = len(_text(tokenizer, ids[first:start]))
        parts.append(TextPart(_text(tokenizer, ids[first:end])[before:], bool(supervised[start])))
    place = stream.place(stream.document_of(begin))
    return Sample(place, length, int(supervised[1:].sum()), tuple(parts))


def _text(tokenizer: Any, ids: list[int]) -> str:
    if tokenizer is None:
        return "".join(f"{token} " for token in ids)
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
