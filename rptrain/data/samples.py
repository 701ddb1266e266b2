"""Samples as text, with the parts that the loss counts; plain values that the interface can show without torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TextPart:
    """The text of consecutive tokens that are all supervised or all not."""

    text: str
    supervised: bool


@dataclass(frozen=True)
class Sample:
    """A sample as its model reads it."""

    place: str  # "file:line"
    tokens: int
    supervised: int  # labels that the loss counts
    parts: tuple[TextPart, ...]


@dataclass(frozen=True)
class FirstSamples:
    """The first samples of a data set, a description of the set, and warnings about it."""

    about: str
    samples: tuple[Sample, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """A row of a data file: a sample, or what is wrong with the row."""

    place: str  # "file:line"
    tokens: int  # of all the row, before it is truncated
    parts: tuple[TextPart, ...]  # of the sample as it is trained on
    problem: str  # why training leaves it out or cuts it; empty without a problem
    written: str = ""  # of a row without a sample: its beginning, as it is in the file


@dataclass(frozen=True)
class Page:
    """Some of the rows of a data set that were read, and what is known of all of these."""

    sets: tuple[str, ...]  # the paths of all sets
    number: int  # which of them this is
    rows: tuple[Row, ...]
    first: int  # the number of the first of these rows, from 0
    total: int  # rows to show, of the asked kind
    read: int  # rows that were read
    whole: bool  # whether these are all of the set
    counts: tuple[tuple[str, int], ...]  # rows with each kind of problem
    histogram: tuple[tuple[int, int], ...]  # the most tokens of a bin, and its samples
    max_length: int
    span: tuple[int, int] | None = None  # tokens of the shortest and of the longest sample; None without samples
    repeats: int = 0  # samples that repeat earlier ones, if these are many
