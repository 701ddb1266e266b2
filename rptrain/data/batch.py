"""A global batch on the host, as the data pipeline makes it and the engine takes it."""

from dataclasses import dataclass

from torch import Tensor

IGNORED = -100  # a label that is not supervised


@dataclass(frozen=True)
class Batch:
    """M micro-batches of `rows` rows of `length` tokens each; T = rows * length.

    Documents never cross a row. Padding at a row's end is a document of its own, with ignored labels.
    """

    input_ids: Tensor  # int64 [M, T]
    positions: Tensor  # int64 [M, T], from 0 in each document
    labels: Tensor  # int64 [M, T], already shifted: the next token of the same document, or -100
    documents: tuple[tuple[int, ...], ...]  # for each micro-batch, the lengths of its documents in order
    rows: int
    length: int
    supervised: int  # labels that are not ignored, in the whole batch
    seed: int = 0  # with the step, what dropout's masks follow from
    step: int = 0  # over the whole training, from 0

    @property
    def tokens(self) -> int:
        """Real and padding tokens of the whole batch."""
        return self.input_ids.numel()
