"""Samples that repeat earlier ones, token by token."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rptrain.data.tokens import Stream

COMPARED = 100_000  # most samples that are compared
MANY = 0.05  # the largest fraction that is not worth a warning


@dataclass(frozen=True)
class Repeats:
    """`count` of `total` samples have the tokens and labels of an earlier one."""

    count: int
    total: int

    @classmethod
    def of(cls, streams: Sequence[Stream]) -> "Repeats":
        """The repeats among the first samples of these streams together."""
        seen, total = set[int](), 0
        for stream in streams:
            ends = np.cumsum(stream.lengths[: COMPARED - total], dtype=np.int64).tolist()
            seen.update(hash(stream.tokens[start:end].tobytes()) for start, end in zip([0, *ends], ends, strict=False))
            total += len(ends)
        return cls(total - len(seen), total)

    @property
    def many(self) -> bool:
        return self.count > MANY * self.total

    def sentence(self, whole: bool, held_out: bool) -> str:
        """A warning. `whole`: whether these are all samples; `held_out`: whether some of them are for validation."""
        first = "" if whole and self.total < COMPARED else "the first "
        counted = f"{self.count:,} of {first}{self.total:,} samples repeat earlier ones"
        if held_out:
            return (
                f"{counted}, and validation samples may have copies in the training set: the validation loss would "
                "then say little about new data. Remove the copies"
            )
        return f"{counted}: remove the copies if they are not meant"
