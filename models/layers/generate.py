"""Generation with a cache of keys and values, for a batch of prompts of different lengths."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from math import prod
from typing import cast

import torch
from torch import Tensor

from rptrain.kernels.attention import attention
from rptrain.kernels.batch import MicroBatch
from rptrain.kernels.reference.dense import wide
from rptrain.models.layers import rope
from rptrain.models.layers.attention import AttentionBlock
from rptrain.models.spec import LayerShape, ModelSpec
from rptrain.utils.errors import UserError
from rptrain.utils.liveness import progressed

Weights = Callable[[int], Mapping[str, Tensor]]  # a unit's parameters by name


def generate(
    spec: ModelSpec,
    weights: Weights,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    eos_ids: Collection[int] = (),
    temperature: float = 0.0,
    seed: int = 0,
) -> list[list[int]]:
    """Generates the tokens after each prompt, including an end-of-sequence token.

    Greedy at temperature 0, otherwise sampled. Runs on the weights' device in their dtype. Raises UserError if a
    prompt is empty or has a token outside the vocabulary.
    """
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise UserError(f"prompt {number} is empty")
        if min(prompt) < 0 or max(prompt) >= spec.vocab_size:
            raise UserError(f"prompt {number} holds tokens outside the vocabulary of {spec.vocab_size}")
    answers: list[list[int]] = [[] for _ in prompts]
    if not prompts or max_new_tokens < 1:
        return answers
    table = weights(0)["embed"]
    generator = torch.Generator(table.device).manual_seed(seed)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=table.device)
    cache = Cache(spec, lengths, max_new_tokens, table.dtype)
    tokens = torch.tensor([token for prompt in prompts for token in prompt], device=table.device)
    last = _forward(spec, weights, table[tokens], cache.prefill())[lengths.cumsum(0) - 1]
    running = set(range(len(prompts)))
    for step in range(max_new_tokens):
        progressed()
        if step:
            last = _forward(spec, weights, table[tokens], cache.advance())
        tokens = _choose(spec.head.logits(_weights_of(spec.head, weights), last), temperature, generator)
        for index, token in enumerate(tokens.tolist()):
            if index in running:
                answers[index].append(token)
                if token in eos_ids:
                    running.remove(index)
        if not running:
            break
    return answers


def cache_bytes(spec: ModelSpec, sequences: int, longest: int, dtype: torch.dtype) -> int:
    """Memory of the keys and values of `sequences` prompts, each of at most `longest` tokens with its answer."""
    return prod(_cache_shape(spec, sequences, longest)) * dtype.itemsize


def _cache_shape(spec: ModelSpec, sequences: int, longest: int) -> tuple[int, ...]:
    block = _blocks(spec)[0]
    return len(spec.layers), 2, sequences, longest, block.kv_heads, block.head_size


class Cache:
    """Keys and values [B, longest, K, C] of every block, and the places of the current tokens.

    Prompts are prefilled as documents of one packed sequence; after that, each sequence adds one token per step.
    """

    def __init__(self, spec: ModelSpec, lengths: Tensor, new_tokens: int, dtype: torch.dtype):
        shape = _cache_shape(spec, len(lengths), int(lengths.max()) + new_tokens)
        self.buffers = torch.zeros(shape, dtype=dtype, device=lengths.device)
        self.lengths = lengths
        self.inv_freq = torch.tensor(spec.inv_freq, dtype=wide(dtype), device=lengths.device)
        self.rope_scale = spec.rope_scale

    def prefill(self) -> "Cache":
        """Makes all tokens of all prompts, flattened, the current ones."""
        device, count = self.lengths.device, len(self.lengths)
        self.sequence = torch.arange(count, device=device).repeat_interleave(self.lengths)
        ends = self.lengths.cumsum(0)
        starts = ends - self.lengths
        self.positions = torch.arange(len(self.sequence), device=device) - starts[self.sequence]
        self.cos, self.sin = rope.tables(self.inv_freq, self.positions, self.rope_scale)
        self.packed: MicroBatch | None = MicroBatch(
            sequences=1,
            length=len(self.sequence),
            positions=self.positions,
            labels=torch.full_like(self.positions, -100),
            cu_seqlens=torch.cat((ends.new_zeros(1), ends)).int(),
            max_seqlen=int(self.lengths.max()),
            uniform=False,  # there are many lengths, and each would need its own preparation
            cos=self.cos,
            sin=self.sin,
        )
        return self

    def advance(self) -> "Cache":
        """Makes the next token of each sequence the current one."""
        self.packed = None
        self.positions = self.lengths.clone()
        self.sequence = torch.arange(len(self.lengths), device=self.lengths.device)
        self.cos, self.sin = rope.tables(self.inv_freq, self.positions, self.rope_scale)
        self.lengths = self.lengths + 1
        return self

    def attend(
        self,
        layer: int,
        window: int | None,
        sinks: Tensor | None,
        q_THC: Tensor,
        k_TKC: Tensor,
        v_TKC: Tensor,
    ) -> tuple[Tensor, None]:
        """Stores the current keys and values, and attends to each token's sequence so far.

        Window and sinks: see kernels/attention.py.
        """
        keys, values = self.buffers[layer]
        keys[self.sequence, self.positions] = k_TKC
        values[self.sequence, self.positions] = v_TKC
        if self.packed is not None:
            return attention(q_THC, k_TKC, v_TKC, self.packed, window=window, sinks=sinks)[0], None
        longest = int(self.lengths.max())
        dtype = wide(q_THC.dtype)
        index, ends = torch.arange(longest, device=q_THC.device), self.lengths.unsqueeze(1)
        absent = index >= ends
        if window is not None:
            absent |= index < ends - window
        keys, values = (x[:, :longest].transpose(1, 2).to(dtype) for x in (keys, values))
        grouped = q_THC.unflatten(1, (keys.shape[1], -1)).to(dtype)
        scores = (grouped @ keys.mT) * q_THC.shape[-1] ** -0.5
        scores = scores.masked_fill(absent[:, None, None], float("-inf"))
        if sinks is not None:
            sink = sinks.to(dtype).unflatten(0, (keys.shape[1], -1))
            scores = torch.cat((scores, sink.expand(scores.shape[:-1]).unsqueeze(-1)), -1)
        return (scores.softmax(-1)[..., :longest] @ values).flatten(1, 2).to(q_THC.dtype), None


def _forward(spec: ModelSpec, weights: Weights, x_TD: Tensor, cache: Cache) -> Tensor:
    for index, block in enumerate(_blocks(spec)):
        p = _weights_of(block, weights)
        x_TD = block.step(p, x_TD, cache.cos, cache.sin, partial(cache.attend, index, block.window, p.get("sinks")))
    return x_TD


def _blocks(spec: ModelSpec) -> tuple[AttentionBlock, ...]:
    return cast(tuple[AttentionBlock, ...], spec.layers)


def _weights_of(layer: LayerShape, weights: Weights) -> dict[str, Tensor]:
    return {name: tensor for unit in layer.units for name, tensor in weights(unit).items()}


def _choose(logits_BV: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    logits_BV = logits_BV.to(wide(logits_BV.dtype))
    if temperature <= 0:
        return logits_BV.argmax(-1)
    highest = logits_BV.amax(-1, keepdim=True)  # a tiny temperature must not overflow
    probs = torch.softmax((logits_BV - highest) / max(temperature, 1e-30), -1)
    return torch.multinomial(probs, 1, generator=generator).squeeze(1)
