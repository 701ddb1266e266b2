"""A cache of keys and values that grows with its sequences, and attention over it."""

from collections.abc import Sequence
from itertools import chain
from math import prod
from typing import cast

import torch
from torch import Tensor

from rptrain.kernels.attention import attention
from rptrain.kernels.batch import IGNORED, MicroBatch
from rptrain.kernels.reference.dense import wide
from rptrain.models.layers.attention import AttentionBlock
from rptrain.models.layers.rope import RotaryTables
from rptrain.models.spec import ModelSpec

QUERIES = 256  # tokens whose scores over held keys are computed at a time
LEAST = 64  # tokens by which a cache grows, or half of its length


def cache_bytes(spec: ModelSpec, sequences: int, longest: int, dtype: torch.dtype) -> int:
    """Memory of the keys and values of `sequences` prompts, each of at most `longest` tokens with its answer."""
    return sum(prod(_shape(block, sequences, longest)) for block in blocks(spec)) * dtype.itemsize


def blocks(spec: ModelSpec) -> tuple[AttentionBlock, ...]:
    return cast(tuple[AttentionBlock, ...], spec.layers)


def _shape(block: AttentionBlock, sequences: int, longest: int) -> tuple[int, ...]:
    return 2, sequences, longest, block.kv_heads, block.head_size


class Cache:
    """Keys and values [B, capacity, K, C] of every block, each with its own K and C, and the current tokens' places.

    `place` names the tokens to compute, a forward pass calls `attend` in every block, and `hold` ends it. Whatever
    happens between them, the cache stays valid: it has the keys and values of `held`.
    """

    def __init__(
        self, spec: ModelSpec, sequences: int, dtype: torch.dtype, device: torch.device, limit: int | None = None
    ) -> None:
        """`limit`: tokens that no sequence exceeds, if that is known."""
        self.held: list[list[int]] = [[] for _ in range(sequences)]
        self.limit = limit
        self._new: list[list[int]] = []
        self._device = device
        empty = [_shape(block, sequences, 0) for block in blocks(spec)]
        self._buffers = [torch.zeros(shape, dtype=dtype, device=device) for shape in empty]
        self._rotaries = RotaryTables(spec.rotaries, wide(dtype), device)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def keep(self, sequence: int, tokens: Sequence[int]) -> int:
        """Forgets the held tokens of a sequence after the longest prefix that they share with `tokens`.

        Returns the number of tokens that stay. The last one of `tokens` is never held: its output is needed.
        """
        held = self.held[sequence]
        same = 0
        for old, new in zip(held, tokens[:-1], strict=False):
            if old != new:
                break
            same += 1
        del held[same:]
        return same

    def place(self, new: Sequence[Sequence[int]]) -> Tensor:
        """Makes tokens that follow the held ones of each sequence the current ones; returns them flattened [T].

        They are whole prompts if nothing is held, or one token of each sequence; of a single sequence, any number.
        """
        self._new = [[*tokens] for tokens in new]
        starts, counts = [len(held) for held in self.held], [len(tokens) for tokens in self._new]
        self._ends = [start + count for start, count in zip(starts, counts, strict=True)]
        self._fresh, self._single = not any(starts), all(count == 1 for count in counts)
        assert self._fresh or self._single or len(new) == 1
        places = chain.from_iterable(map(range, starts, self._ends))
        self._positions = self._tensor(list(places))
        self._sequence = torch.arange(len(new), device=self._device).repeat_interleave(self._tensor(counts))
        self.rotations = self._rotaries.at(self._positions)
        if self._fresh:
            documents = self._tensor([0, *counts]).cumsum(0).int()
            self._packed = MicroBatch(
                sequences=1,
                length=len(self._positions),
                positions=self._positions,
                labels=torch.full_like(self._positions, IGNORED),
                cu_seqlens=documents,
                max_seqlen=max(counts),
                uniform=False,  # there are many lengths, and each would need its own preparation
                rotations=self.rotations,
            )
        return self._tensor(list(chain.from_iterable(self._new)))

    def hold(self) -> None:
        """The forward pass over the current tokens is complete."""
        for held, new in zip(self.held, self._new, strict=True):
            held += new

    def attend(
        self,
        layer: int,
        block: AttentionBlock,
        sinks: Tensor | None,
        q_THC: Tensor,
        k_TKC: Tensor,
        v_TKC: Tensor,
    ) -> tuple[Tensor, None]:
        """Stores the current keys and values of a layer, and attends to each token's sequence so far."""
        window, scale = block.window, block.scale or block.head_size**-0.5
        keys, values = self._grown(layer)
        keys[self._sequence, self._positions] = k_TKC
        values[self._sequence, self._positions] = v_TKC
        if self._fresh:
            return attention(q_THC, k_TKC, v_TKC, self._packed, window=window, sinks=sinks, scale=scale)[0], None
        dtype, longest = wide(q_THC.dtype), max(self._ends)
        keys, values = (x[:, :longest].transpose(1, 2).to(dtype) for x in (keys, values))
        if self._single:
            ends = self._positions.unsqueeze(1) + 1
            return _attend_single(q_THC, keys, values, ends, window, sinks, scale), None
        parts = zip(q_THC.split(QUERIES), self._positions.split(QUERIES), strict=True)
        return torch.cat([_attend_several(q, keys[0], values[0], at, window, sinks, scale) for q, at in parts]), None

    def _grown(self, layer: int) -> Tensor:
        """The keys and values of a block, with room for the current tokens."""
        buffer, needed = self._buffers[layer], max(self._ends)
        if needed > buffer.shape[2]:
            capacity = needed + max(LEAST, needed // 2)
            if self.limit is not None:
                capacity = max(needed, min(capacity, self.limit))
            grown = buffer.new_zeros((*buffer.shape[:2], capacity, *buffer.shape[3:]))
            grown[:, :, : buffer.shape[2]] = buffer
            buffer = self._buffers[layer] = grown
        return buffer

    def _tensor(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)


def _attend_single(
    q_BHC: Tensor,
    keys_BKSC: Tensor,
    values_BKSC: Tensor,
    ends_B1: Tensor,
    window: int | None,
    sinks: Tensor | None,
    scale: float,
) -> Tensor:
    """One token of each sequence over the first `ends` keys of its sequence."""
    longest = keys_BKSC.shape[2]
    index = torch.arange(longest, device=q_BHC.device)
    absent = index >= ends_B1
    if window is not None:
        absent |= index < ends_B1 - window
    grouped = q_BHC.unflatten(1, (keys_BKSC.shape[1], -1)).to(keys_BKSC.dtype)
    scores = (grouped @ keys_BKSC.mT) * scale
    scores = scores.masked_fill(absent[:, None, None], float("-inf"))
    if sinks is not None:
        sink = sinks.to(keys_BKSC.dtype).unflatten(0, (keys_BKSC.shape[1], -1))
        scores = torch.cat((scores, sink.expand(scores.shape[:-1]).unsqueeze(-1)), -1)
    return (scores.softmax(-1)[..., :longest] @ values_BKSC).flatten(1, 2).to(q_BHC.dtype)


def _attend_several(
    q_THC: Tensor,
    keys_KSC: Tensor,
    values_KSC: Tensor,
    at_T: Tensor,
    window: int | None,
    sinks: Tensor | None,
    scale: float,
) -> Tensor:
    """Several tokens of one sequence, at these positions, each over the keys up to its own."""
    longest = keys_KSC.shape[1]
    index = torch.arange(longest, device=q_THC.device)
    absent = index > at_T.unsqueeze(1)
    if window is not None:
        absent |= index <= at_T.unsqueeze(1) - window
    grouped = q_THC.unflatten(1, (keys_KSC.shape[0], -1)).permute(1, 2, 0, 3).to(keys_KSC.dtype)  # [K, G, T, C]
    scores = (grouped @ keys_KSC.mT.unsqueeze(1)) * scale
    scores = scores.masked_fill(absent, float("-inf"))
    if sinks is not None:
        sink = sinks.to(keys_KSC.dtype).unflatten(0, (keys_KSC.shape[0], -1))[..., None, None]
        scores = torch.cat((scores, sink.expand((*scores.shape[:-1], 1))), -1)
    out = scores.softmax(-1)[..., :longest] @ values_KSC.unsqueeze(1)
    return out.permute(2, 0, 1, 3).flatten(1, 2).to(q_THC.dtype)
