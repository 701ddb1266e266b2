"""Attention's state while decoding: keys and values that grow with their sequences, and attention over them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rptrain.kernels.attention import attention
from rptrain.kernels.reference.dense import wide
from rptrain.models.layers.state import CurrentTokens

QUERIES = 256  # tokens whose scores over earlier keys are computed at a time
LEAST = 64  # tokens by which the buffer grows, or half of its length


@dataclass(frozen=True)
class Scores:
    """How attention scores keys."""

    window: int | None  # maximum keys per query, including itself
    sinks: Tensor | None  # [H]
    scale: float


class KeysAndValues:
    """Keys and values [B, capacity, K, C] of a layer. What follows the tokens that stay is written over."""

    def __init__(self, buffer: Tensor) -> None:
        """`buffer`: [2, B, 0, K, C]."""
        self._buffer = buffer

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    def keep(self, sequence: int, tokens: int) -> int:
        return tokens

    def attend(self, q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor, current: CurrentTokens, scores: Scores) -> Tensor:
        """Stores the current keys and values, and attends to each token's sequence so far."""
        window, sinks, scale = scores.window, scores.sinks, scores.scale
        keys, values = self._grown(current)
        keys[current.sequence, current.positions] = k_TKC
        values[current.sequence, current.positions] = v_TKC
        if current.prompts is not None:
            return attention(q_THC, k_TKC, v_TKC, current.prompts, window=window, sinks=sinks, scale=scale)[0]
        dtype, longest = wide(q_THC.dtype), max(current.ends)
        keys, values = (x[:, :longest].transpose(1, 2).to(dtype) for x in (keys, values))
        if current.single:
            return _attend_single(q_THC, keys, values, current.positions.unsqueeze(1) + 1, scores)
        parts = zip(q_THC.split(QUERIES), current.positions.split(QUERIES), strict=True)
        return torch.cat([_attend_several(q, keys[0], values[0], at, scores) for q, at in parts])

    def _grown(self, current: CurrentTokens) -> Tensor:
        """The buffer, with room for the current tokens."""
        buffer, needed = self._buffer, max(current.ends)
        if needed > buffer.shape[2]:
            capacity = needed + max(LEAST, needed // 2)
            if current.limit is not None:
                capacity = max(needed, min(capacity, current.limit))
            grown = buffer.new_zeros((*buffer.shape[:2], capacity, *buffer.shape[3:]))
            grown[:, :, : buffer.shape[2]] = buffer
            buffer = self._buffer = grown
        return buffer


def _attend_single(q_BHC: Tensor, keys_BKSC: Tensor, values_BKSC: Tensor, ends_B1: Tensor, scores: Scores) -> Tensor:
    """One token of each sequence over the first `ends` keys of its sequence."""
    longest = keys_BKSC.shape[2]
    index = torch.arange(longest, device=q_BHC.device)
    absent = index >= ends_B1
    if scores.window is not None:
        absent |= index < ends_B1 - scores.window
    grouped = q_BHC.unflatten(1, (keys_BKSC.shape[1], -1)).to(keys_BKSC.dtype)
    scored = (grouped @ keys_BKSC.mT) * scores.scale
    scored = scored.masked_fill(absent[:, None, None], float("-inf"))
    if scores.sinks is not None:
        sink = scores.sinks.to(keys_BKSC.dtype).unflatten(0, (keys_BKSC.shape[1], -1))
        scored = torch.cat((scored, sink.expand(scored.shape[:-1]).unsqueeze(-1)), -1)
    return (scored.softmax(-1)[..., :longest] @ values_BKSC).flatten(1, 2).to(q_BHC.dtype)


def _attend_several(q_THC: Tensor, keys_KSC: Tensor, values_KSC: Tensor, at_T: Tensor, scores: Scores) -> Tensor:
    """Several tokens of one sequence, at these positions, each over the keys up to its own."""
    longest = keys_KSC.shape[1]
    index = torch.arange(longest, device=q_THC.device)
    absent = index > at_T.unsqueeze(1)
    if scores.window is not None:
        absent |= index <= at_T.unsqueeze(1) - scores.window
    grouped = q_THC.unflatten(1, (keys_KSC.shape[0], -1)).permute(1, 2, 0, 3).to(keys_KSC.dtype)  # [K, G, T, C]
    scored = (grouped @ keys_KSC.mT.unsqueeze(1)) * scores.scale
    scored = scored.masked_fill(absent, float("-inf"))
    if scores.sinks is not None:
        sink = scores.sinks.to(keys_KSC.dtype).unflatten(0, (keys_KSC.shape[0], -1))[..., None, None]
        scored = torch.cat((scored, sink.expand((*scored.shape[:-1], 1))), -1)
    out = scored.softmax(-1)[..., :longest] @ values_KSC.unsqueeze(1)
    return out.permute(2, 0, 1, 3).flatten(1, 2).to(q_THC.dtype)
