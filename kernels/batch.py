"""Batches: a step's batch on the host, from the data pipeline to the engine, and a micro-batch on a device."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

IGNORED = -100  # a label that is not supervised


@dataclass(frozen=True)
class Batch:
    """M micro-batches of `sequences` sequences of `length` tokens each; T = sequences * length.

    Documents never cross a sequence. Padding at a sequence's end is a document of its own, with ignored labels. A short
    batch, such as the last one of an epoch, has fewer micro-batches than the other steps: its `full` is their number.
    """

    input_ids: Tensor  # int64 [M, T]
    positions: Tensor  # int64 [M, T], from 0 in each document
    labels: Tensor  # int64 [M, T], already shifted: the next token of the same document, or -100
    documents: tuple[tuple[int, ...], ...]  # for each micro-batch, the lengths of its documents in order
    sequences: int
    length: int
    supervised: int  # labels that are not ignored, in the whole batch
    seed: int = 0  # with the step, determines dropout masks
    step: int = 0  # over the whole training run, from 0
    numbers: tuple[int, ...] | None = None  # of the micro-batches in the step, if they are only some of them
    full: int = 0  # micro-batches of a step of the config; 0: as many as this one has

    @property
    def tokens(self) -> int:
        """Real and padding tokens of the whole batch."""
        return self.input_ids.numel()


class Rotation(NamedTuple):
    """The tables [T, R / 2] that rotate the first R columns of queries and keys by their positions.

    float32 (float64 for float64 models). A factor on the attention (YaRN) is in both.
    """

    cos: Tensor
    sin: Tensor
    query_factor: Tensor | None = None  # [T], a factor of whole queries by their positions; None: 1


class Balance(NamedTuple):
    """The data of a micro-batch for the routers' auxiliary loss."""

    counted: Tensor  # bool [T]: not padding
    tokens: Tensor  # number of these tokens, at least 1: a scalar of the wide dtype
    scale: Tensor  # factor of its gradients: a scalar of the wide dtype


@dataclass(frozen=True)
class MicroBatch:
    """The data of a micro-batch for layers, on their device. T = sequences * length tokens.

    Documents never cross a sequence; padding at a sequence's end is a document of its own with ignored labels.
    """

    sequences: int
    length: int
    positions: Tensor  # int64 [T], from 0 in each document
    labels: Tensor  # int64 [T], already shifted: the next token, or -100
    cu_seqlens: Tensor  # int32 [documents + 1 or more], where documents start in the flattened tokens; then only T
    max_seqlen: int  # no document has more tokens
    uniform: bool  # every document has max_seqlen tokens, and cu_seqlens has no further entries
    rotations: tuple[Rotation, ...] = ()  # those of the model, which layers name by their places
    sample: Tensor | None = None  # int64 [3]: seed, step and index of the first sequence in the step; None: no dropout
    balance: Balance | None = None  # if routers have an auxiliary loss
