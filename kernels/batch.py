"""Batches: a step's batch on the host, from the data pipeline to the engine, and a micro-batch on a device."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

import torch
from torch import Tensor

IGNORED = -100  # a label that is not supervised
CHUNK = 64  # tokens of a chunk, of which scans over documents compute several at once


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


class Documents(NamedTuple):
    """The documents of T tokens, and their chunks of CHUNK tokens, of which a document's last one may have fewer.

    A chunk starts where its document does, or the chunk before it ends. There are T // CHUNK + documents places for
    chunks; those that are not needed are empty and lie at T.
    """

    cu_seqlens: Tensor  # int32 [documents + 1], as in MicroBatch
    first: Tensor  # int32 [documents + 1], the first chunk of each document; then their number
    document: Tensor  # int64 [chunks], the document of each chunk
    starts: Tensor  # int32 [chunks], the first token of each chunk
    ends: Tensor  # int32 [chunks], the token after its last one

    @classmethod
    def of(cls, cu_seqlens: Tensor, tokens: int, chunk: int = CHUNK) -> Self:
        """The documents between `cu_seqlens`. Nothing waits for the device."""
        lengths = cu_seqlens.diff()
        counts = (lengths + chunk - 1) // chunk
        first = torch.cat((counts.new_zeros(1), counts.cumsum(0))).int()
        places = torch.arange(tokens // chunk + len(counts), dtype=torch.int32, device=cu_seqlens.device)
        document = torch.searchsorted(first[1:], places, right=True).clamp_(max=len(counts) - 1)
        limits = cu_seqlens[1:][document]
        starts = cu_seqlens[:-1][document] + (places - first[:-1][document]) * chunk
        starts = torch.minimum(starts, limits)  # places behind the last chunk
        return cls(cu_seqlens, first, document, starts.int(), torch.minimum(starts + chunk, limits).int())


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

    @cached_property
    def documents(self) -> Documents:
        """Its documents, and their chunks."""
        return Documents.of(self.cu_seqlens, len(self.positions))
