"""What decoding knows of its current tokens, and what it asks of the state of a mixer."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from torch import Tensor

from rptrain.kernels.batch import Documents, MicroBatch, Rotation


@dataclass(frozen=True)
class CurrentTokens:
    """The T tokens of a step of decoding: whole prompts, one token of each sequence, or several of a single one."""

    positions: Tensor  # int64 [T], in their sequences
    sequence: Tensor  # int64 [T]
    cu_seqlens: Tensor  # int32 [sequences + 1], where each sequence's current tokens start; then T
    ends: Sequence[int]  # tokens of each sequence, these included
    rotations: Sequence[Rotation]
    prompts: MicroBatch | None  # if nothing precedes them: the sequences as documents
    single: bool  # whether they are one of each sequence
    limit: int | None = None  # tokens that no sequence exceeds, if that is known

    @cached_property
    def documents(self) -> Documents:
        """The current tokens of each sequence as a document, and their chunks."""
        return Documents.of(self.cu_seqlens, len(self.positions))


class State(Protocol):
    """What a mixer remembers of the tokens before the current ones, for a number of sequences."""

    @property
    def nbytes(self) -> int: ...

    def keep(self, sequence: int, tokens: int) -> int:
        """Forgets all but the first `tokens` tokens of a sequence, or more if it cannot be cut back to these.

        Returns the number of tokens that stay.
        """
        ...
