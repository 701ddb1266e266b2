"""Generation with a cache of what was computed: one iterator over tokens, for a batch of prompts or a conversation."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rptrain.kernels.reference.dense import wide
from rptrain.models.decode.cache import Cache
from rptrain.models.layer import LayerShape
from rptrain.models.layers.block import blocks
from rptrain.models.spec import ModelSpec
from rptrain.utils.errors import UserError
from rptrain.utils.liveness import progressed

Weights = Callable[[int], Mapping[str, Tensor]]  # a unit's parameters by name


class Sampling(NamedTuple):
    """How the next token is chosen.

    Greedy at temperature 0. Otherwise drawn from the most likely tokens whose probabilities add up to `top_p`.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


def generate(
    spec: ModelSpec,
    weights: Weights,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    eos_ids: Collection[int] = (),
    temperature: float = 0.0,
    seed: int = 0,
) -> list[list[int]]:
    """Generates the tokens after each prompt, including an end-of-sequence token. Everything else: see `stream`."""
    answers: list[list[int]] = [[] for _ in prompts]
    for tokens in stream(spec, weights, prompts, max_new_tokens, eos_ids, Sampling(temperature, seed=seed)):
        for answer, token in zip(answers, tokens, strict=True):
            if token is not None:
                answer.append(token)
    return answers


def stream(
    spec: ModelSpec,
    weights: Weights,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    eos_ids: Collection[int] = (),
    sampling: Sampling = Sampling(),  # noqa: B008 (immutable)
    cache: Cache | None = None,
) -> Iterator[list[int | None]]:
    """The next token of each prompt, step by step; None after an end-of-sequence token, which is included.

    Ends after `max_new_tokens`, or when every prompt has ended. Runs on the weights' device in their dtype. The `cache`
    of an earlier call with a single prompt saves the tokens that both begin with; it may be used again whenever the
    iterator was closed. Raises UserError if a prompt is empty or has a token outside the vocabulary.
    """
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise UserError(f"prompt {number} is empty")
        if min(prompt) < 0 or max(prompt) >= spec.vocab_size:
            raise UserError(f"prompt {number} holds tokens outside the vocabulary of {spec.vocab_size}")
    if not prompts or max_new_tokens < 1:
        return iter(())
    if cache is None:
        cache = new_cache(spec, weights, len(prompts), max(map(len, prompts)) + max_new_tokens)
    return _steps(spec, weights, prompts, max_new_tokens, eos_ids, sampling, cache)


def new_cache(spec: ModelSpec, weights: Weights, sequences: int = 1, limit: int | None = None) -> Cache:
    """An empty cache on the weights' device. `limit`: tokens that no sequence exceeds, if that is known."""
    table = weights(0)["embed"]
    return Cache(spec, sequences, table.dtype, table.device, limit)


def _steps(
    spec: ModelSpec,
    weights: Weights,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    eos_ids: Collection[int],
    sampling: Sampling,
    cache: Cache,
) -> Iterator[list[int | None]]:
    new = [list(prompt[cache.keep(index, prompt) :]) for index, prompt in enumerate(prompts)]
    generator: torch.Generator | None = None
    running = set(range(len(prompts)))
    for _ in range(max_new_tokens):
        progressed()
        output = _forward(spec, weights, cache, new)
        generator = generator or torch.Generator(output.device).manual_seed(sampling.seed)
        tokens = _choose(spec.head.logits(_weights_of(spec.head, weights), output), sampling, generator).tolist()
        yield [token if index in running else None for index, token in enumerate(tokens)]
        running -= {index for index in running if tokens[index] in eos_ids}
        if not running:
            return
        new = [[token] for token in tokens]


def _forward(spec: ModelSpec, weights: Weights, cache: Cache, new: Sequence[Sequence[int]]) -> Tensor:
    """The output [B, D] of the last block for the last token of each sequence."""
    tokens = cache.place(new)
    x_TD = weights(0)["embed"][tokens]
    for block, state in zip(blocks(spec), cache.states, strict=True):
        x_TD = block.step(_weights_of(block, weights), x_TD, state, cache.current)
    cache.hold()
    return x_TD[torch.tensor([len(tokens) for tokens in new], device=x_TD.device).cumsum(0) - 1]


def _weights_of(layer: LayerShape, weights: Weights) -> dict[str, Tensor]:
    return {name: tensor for unit in layer.units for name, tensor in weights(unit).items()}


def _choose(logits_BV: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    logits_BV = logits_BV.to(wide(logits_BV.dtype))
    if sampling.temperature <= 0:
        return logits_BV.argmax(-1)
    highest = logits_BV.amax(-1, keepdim=True)  # a tiny temperature must not overflow
    probs = torch.softmax((logits_BV - highest) / max(sampling.temperature, 1e-30), -1)
    if sampling.top_p < 1:
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        left_out = ordered.cumsum(-1) - ordered >= sampling.top_p
        left_out[:, 0] = False
        probs = torch.zeros_like(probs).scatter(-1, order, ordered.masked_fill(left_out, 0.0))
    return torch.multinomial(probs, 1, generator=generator).squeeze(1)
