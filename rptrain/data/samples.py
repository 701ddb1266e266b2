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
    """The first samples of a data set, and a description of the set."""

    about: str
    samples: tuple[Sample, ...]
