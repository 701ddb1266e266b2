"""The first rows of data sets, tokenized as training does: what a plan and the data browser know of them.

Files are not read whole, except for those that are small, and the tokens of files that are in the cache.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from rptrain.config.schema import Data, TrainSet
from rptrain.data import formats
from rptrain.data.cache import default_folder
from rptrain.data.folders import choose
from rptrain.data.formats import Example, Tally, limit_sentence
from rptrain.data.loader import RANDOM, Tokenizing, questions_of
from rptrain.data.read import share_of
from rptrain.data.row_format import RowFormat
from rptrain.data.template import EncodeOptions, load_template
from rptrain.data.tokens import Document, Stream, gather
from rptrain.utils.errors import UserError
from rptrain.utils.file_state import FileState, states_of

AT_ONCE = 64  # rows that are tokenized at once, at most
FILES = 16  # files of a set that are read
HASHED = 256 << 20  # bytes of a set's files that are hashed to find their tokens in the cache
REASONS = 10_000  # bad rows whose reasons are kept


@dataclass(frozen=True)
class Limits:
    """When the reading of a data set stops."""

    rows: int
    characters: int
    seconds: float  # looked at after every AT_ONCE rows, or fewer long ones


PLANNING = Limits(rows=1024, characters=1 << 20, seconds=3.0)


@dataclass(frozen=True)
class Part:
    """The first rows of a file: their documents, and the counts of rows."""

    stream: Stream
    tally: Tally
    share: float | None  # fraction of the file; 1: all of it, None: unknown
    out_of_time: bool = False  # whether it would have more rows if they had been read faster


@dataclass(frozen=True)
class Excerpt:
    """The first rows of a data set, of at most FILES of its files. `share`: which fraction of the set they are."""

    source: TrainSet
    parts: tuple[Part, ...]
    files: int
    nbytes: int  # of all files
    share: float | None  # 1: all; None: unknown

    @property
    def whole(self) -> bool:
        return self.share == 1

    @property
    def out_of_time(self) -> bool:
        """Whether it would have more rows if they had been read faster."""
        return any(part.out_of_time for part in self.parts)

    @property
    def random(self) -> bool:
        """Whether the set consists of random tokens, which have no parts."""
        return self.source.path == RANDOM

    @property
    def tally(self) -> Tally:
        return Tally.joined({part.stream.name: part.tally for part in self.parts})

    def check(self, max_bad_rows: float) -> str:
        """A warning about bad rows; empty without them. Raises UserError if training would stop because of them."""
        tally = self.tally
        if not tally.bad or self.random:
            return ""
        exceeds = tally.exceeds(max_bad_rows)
        if exceeds and (self.whole or not 0 < max_bad_rows < 1):  # further rows do not raise a number of rows
            tally.judge(max_bad_rows)
        rows = "rows" if self.whole else "first rows"
        if tally.bad == tally.total and (self.whole or exceeds):
            raise UserError(f"{tally.report(rows)}\nFix these rows, or set the format or the chat template.")
        after = f"{limit_sentence(max_bad_rows)}; more would stop the run." if exceeds else "They are left out."
        return f"{self.source.path}: {tally.report(rows)}\n{after}"


def excerpt(source: TrainSet, data: Data, tokenizer: Any, limits: Limits) -> Excerpt:
    """The first rows of a data set. `tokenizer` may be None for random tokens only.

    Raises UserError if training would refuse the set before it has read all of it: if a file or split does not exist, a
    file cannot be read or its format is unknown, the template exceeds a limit, or the tokenizer cannot be used.
    """
    if source.path == RANDOM:
        return Excerpt(source, (), 0, 0, 1.0)
    if tokenizer is None:
        raise UserError(f"{source.path}: needs the model's tokenizer")
    settings = Settings.of(data, tokenizer)
    if source.path.startswith("builtin:"):
        part = _of_questions(source.path, source.split, settings, limits)
        if part.out_of_time:  # with more time there is more to see
            _of_questions.cache_clear()
        return Excerpt(source, (part,), 0, 0, part.share)
    files = choose(source.path, source.split, follow_links=data.follow_links).files
    try:
        states = states_of(files)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror or error}") from error
    parts, share = _of_files(RowFormat.of(source, data), settings, limits, tuple(files), states)
    if any(part.out_of_time for part in parts):
        _of_files.cache_clear()
    return Excerpt(source, parts, len(files), sum(state.nbytes for state in states), share)


def check_readable(source: TrainSet, data: Data) -> None:
    """What `excerpt` refuses that can be found out without a tokenizer: UserError if a file or split does not exist, or
    if the format of its first rows is unknown.
    """
    if source.path == RANDOM:
        return
    if source.path.startswith("builtin:"):
        questions_of(source)
        return
    for file in choose(source.path, source.split, follow_links=data.follow_links).files[:FILES]:
        next(formats.read(file, RowFormat.of(source, data), rows=1), None)


def are_tokenized(sources: Sequence[TrainSet], data: Data, tokenizer: Any) -> bool:
    """Whether the tokens of all files of these sets are in the cache. For files that take long to hash: whether the
    cache has any tokens. Raises UserError as `excerpt`, or OSError.
    """
    settings = Settings.of(data, tokenizer)
    sets = [(source, choose(source.path, source.split, follow_links=data.follow_links).files) for source in sources]
    if sum(file.stat().st_size for _, files in sets for file in files) > HASHED:
        return any(settings.folder.glob("*.safetensors"))
    tokenizing = settings.tokenizing()
    return all(_cached(RowFormat.of(source, data), tokenizing, tuple(files)) is not None for source, files in sets)


@dataclass(frozen=True)
class Settings:
    """What the tokens of a text depend on. The tokenizer is equal only to itself."""

    tokenizer: Any
    options: EncodeOptions  # with the text of data.chat_template
    folder: Path  # the cache of tokens

    @classmethod
    def of(cls, data: Data, tokenizer: Any) -> "Settings":
        template = load_template(tokenizer, data.chat_template) if data.chat_template else None
        folder = Path(data.cache_dir) if data.cache_dir else default_folder()
        return cls(tokenizer, replace(EncodeOptions.of(data, tokenizer), chat_template=template), folder)

    def tokenizing(self) -> Tokenizing:
        return Tokenizing(self.tokenizer, self.options, self.folder)


@lru_cache(8)
def _of_questions(path: str, split: str, settings: Settings, limits: Limits) -> Part:
    questions = questions_of(TrainSet(path=path, split=split))
    tally = Tally(shown=REASONS)

    def counted() -> Iterator[Example]:
        for tally.total, question in enumerate(questions, 1):
            yield question

    stream, stopped, out_of_time = _read(counted(), path, settings.tokenizing(), limits, tally)
    return Part(stream, tally, tally.total / len(questions) if stopped else 1.0, out_of_time)


@lru_cache(8)
def _of_files(
    format: RowFormat, settings: Settings, limits: Limits, files: tuple[Path, ...], states: tuple[FileState, ...]
) -> tuple[tuple[Part, ...], float | None]:
    """The parts and their share of the files. `states`: those of the files, which have changed if they differ."""
    sizes, tokenizing = [state.nbytes for state in states], settings.tokenizing()
    if sum(sizes) <= HASHED and (parts := _cached(format, tokenizing, files)):
        return parts, 1.0
    some = files[:FILES]
    each = Limits(-(-limits.rows // len(some)), limits.characters // len(some), limits.seconds / len(some))
    parts = tuple(_of_file(file, format, tokenizing, each) for file in some)
    for file in files[FILES:]:
        next(formats.read(file, format, rows=1), None)
    return parts, _joined(parts, sizes)


def _joined(parts: tuple[Part, ...], sizes: list[int]) -> float | None:
    """The fraction of all files that the parts are. `sizes`: bytes of all files, the first of which have parts."""
    if any(part.share is None for part in parts):
        return None
    if len(parts) == len(sizes) and all(part.share == 1 for part in parts):
        return 1.0
    read = sum((part.share or 0) * size for part, size in zip(parts, sizes, strict=False))
    return min(read / max(sum(sizes), 1), 0.999_999)


def _cached(format: RowFormat, tokenizing: Tokenizing, files: tuple[Path, ...]) -> tuple[Part, ...] | None:
    """All rows of the files, if all are in the cache."""
    parts = []
    for file in files:
        if (found := tokenizing.cached(file, format)) is None:
            return None
        parts.append(Part(*found, 1.0))
    return tuple(parts)


def _of_file(file: Path, format: RowFormat, tokenizing: Tokenizing, limits: Limits) -> Part:
    tally = Tally(shown=REASONS)
    examples = formats.read(file, format, tally, limits.rows)
    stream, stopped, out_of_time = _read(examples, str(file), tokenizing, limits, tally)
    if not stopped and tally.total < limits.rows and file.suffix.lower() != ".txt":
        return Part(stream, tally, 1.0)
    try:
        return Part(stream, tally, share_of(file, tally.line, formats.BEGINNING), out_of_time)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}") from error


def _some(examples: Iterator[Example], size: int, limit: int) -> tuple[list[Example], int]:
    """At most AT_ONCE examples, the last of which brings the characters that were read to the limit, and these."""
    some = list[Example]()
    for example in islice(examples, AT_ONCE):
        some.append(example)
        size += len(example.text or str(example.messages))
        if size >= limit:
            break
    return some, size


def _read(
    examples: Iterator[Example], name: str, tokenizing: Tokenizing, limits: Limits, tally: Tally
) -> tuple[Stream, bool, bool]:
    """The documents of examples, and whether a limit, and whether only that of time, stopped before the last one."""
    documents: list[Document] = []
    size, until, full, late = 0, time.monotonic() + limits.seconds, False, False
    while not (full or late):
        some, size = _some(examples, size, limits.characters)
        if not some:
            break
        documents += tokenizing.documents(some, tally)
        full = tally.total >= limits.rows or size >= limits.characters
        late = not full and time.monotonic() > until
    return gather(documents, name), full or late, late
