"""The block of a decoder: a mixer and a feed-forward part, with norms before or after each, and residual sums.

It computes forward and backward explicitly (models/layer.py defines the contract and the shape suffixes). Between
operations values are rounded to the model's dtype where Hugging Face's modelling code rounds them, except that the
MLP's product and its residual are added before rounding.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self, cast

import torch
from torch import Tensor

from rptrain.kernels.batch import MicroBatch
from rptrain.kernels.fp8 import Form, Operand
from rptrain.models.layer import Operation
from rptrain.models.layers.adapters import Adapters
from rptrain.models.layers.expert_adapters import ExpertAdapters
from rptrain.models.layers.expert_product import ExpertProduct
from rptrain.models.layers.norms import Norms, NormSaved
from rptrain.models.layers.product import Product, product_gradient, times, times_
from rptrain.models.layers.router import Router
from rptrain.models.layers.state import CurrentTokens
from rptrain.models.params import Grads, Param, Params
from rptrain.models.spec import ModelShape
from rptrain.schedule.costs import Work, scaled
from rptrain.schedule.roofline import Sizes


class Part(Protocol):
    """A part of a block, a frozen dataclass: what it computes with, and what that costs."""

    @property
    def products(self) -> tuple[Product, ...]:
        """Its products of all tokens with one weight, without that of a router."""
        ...

    def with_products(self, change: Callable[[Any], Any]) -> Self:
        """The part with `change` of each of its products, those of experts included."""
        ...

    def with_half_sums(self) -> Self:
        """The part that sums products in float16 where kernels of ours can: models/transforms/half_sums.py."""
        ...

    def form(self, p: Params) -> Form:
        """The forms in which it reads its input."""
        ...

    @property
    def reads_codes(self) -> bool:
        """Whether it reads its input in FP8 alone."""
        ...

    def backward(self, p: Params, g: Grads, saved: Any, dy_TD: Tensor, mb: MicroBatch) -> Tensor:
        """Accumulates the gradients of the parameters in `g`; returns the gradient of the input [T, D]."""
        ...

    def kept_bytes(self, tokens: int, itemsize: int) -> int:
        """Bytes kept from the recomputed forward until backward, without the input in the form that norms write."""
        ...


class Mixer(Part, Protocol):
    """The part that mixes tokens. While decoding, it remembers earlier ones in a state of its own."""

    def forward(self, p: Params, x: Operand, mb: MicroBatch) -> tuple[Tensor, Any]:
        """The output [T, D] of the input [T, D], and the tensors that backward needs."""
        ...

    def new_state(self, sequences: int, dtype: torch.dtype, device: torch.device) -> Any:
        """The State of sequences without tokens."""
        ...

    def state_bytes(self, sequences: int, longest: int, dtype: torch.dtype) -> int:
        """Memory of the state of sequences of `longest` tokens."""
        ...

    def step(self, p: Params, x: Operand, state: Any, current: CurrentTokens) -> Tensor:
        """The output [T, D] of the current tokens, which are added to the state."""
        ...

    def work(self, tokens: int, length: int, itemsize: int) -> tuple[Work, Work]:
        """The work of forward and of backward, without that of products."""
        ...

    def workspace(self, itemsize: int, *, fused: bool) -> tuple[int, int]:
        """Bytes per token in backward: the maximum between operations, and the maximum inside one."""
        ...

    def operations(self, mb: MicroBatch, dtype: torch.dtype, device: torch.device) -> list[Operation]:
        """Implementations, of which the fastest is timed, of what is neither a product nor elementwise."""
        ...

    @property
    def sizes(self) -> Sizes | None:
        """Its sizes as the paper's roofline names them; None if the paper has none of its kind."""
        ...


class FeedForward(Part, Protocol):
    """The part that computes each token by itself."""

    @property
    def router(self) -> Router | None: ...

    def with_balance(self, coefficient: float) -> Self:
        """The part with this weight of its router's auxiliary loss, if it has a router."""
        ...

    @property
    def expert_products(self) -> tuple[ExpertProduct, ...]: ...

    def inner(self, p: Params, x: Operand, mb: MicroBatch | None) -> Any:
        """The tensors that backward needs, from the input [T, D]. No `mb`: a step of decoding, without dropout."""
        ...

    def output(self, p: Params, saved: Any, mb: MicroBatch | None) -> Tensor:
        """The output [T, D] from these tensors."""
        ...

    def add(
        self, p: Params, saved: Any, residual: Tensor, mb: MicroBatch | None, scale: float, overwrite: bool
    ) -> Tensor:
        """`residual`, which `overwrite` allows to overwrite, plus the scaled output."""
        ...

    def work(self, tokens: int, itemsize: int) -> tuple[Work, Work]:
        """As a mixer's."""
        ...

    def workspace(self, itemsize: int) -> tuple[int, int]:
        """As a mixer's."""
        ...

    def sized(self, mixer: Sizes) -> Sizes:
        """The mixer's sizes with its own, for the paper's roofline."""
        ...


class MixerSaved(NamedTuple):
    input: NormSaved
    mixer: Any
    output: NormSaved | None  # with norms after the parts


class FeedForwardSaved(NamedTuple):
    input: NormSaved  # of the sum of the mixer's output and the block's input
    feed_forward: Any
    output: Tensor | None  # [T, D], before the norm, with norms after the parts


Saved = tuple[MixerSaved, FeedForwardSaved]


@dataclass(frozen=True, kw_only=True)
class Block:
    """A decoder block: a Layer (models/layer.py).

    Parameters: those of its parts; with norms before these input_norm [D] and post_norm [D], with norms after them
    attention_norm [D] and mlp_norm [D]. Memory is that of an explicit backward, which keeps the inputs of the norms
    before the parts, their outputs and 1 / rms, those of norms after the parts, and what these keep.
    """

    name: str
    units: tuple[int, ...]
    hidden: int
    norms: Norms
    mixer: Mixer
    feed_forward: FeedForward
    input_scale: float = 1.0  # factor of the input; the first block scales embeddings
    output_scale: float = 1.0  # factor of the parts' outputs before they are added

    def forward(self, p: Params, x_TD: Tensor, mb: MicroBatch) -> Tensor:
        x_TD = times(x_TD, self.input_scale)
        mixed = self._mixed(p, x_TD, mb)[0]
        return self._output(p, self._inner(p, mixed, x_TD, mb), mb, overwrite=True)

    def step(self, p: Params, x_TD: Tensor, state: Any, current: CurrentTokens) -> Tensor:
        """Forward of a step of decoding, with the mixer's state. Without dropout."""
        x_TD = times(x_TD, self.input_scale)
        _, normed = self.norms.before(p.get("input_norm"), x_TD, None, self.mixer.form(p))
        mixed, _ = self.norms.after(p.get("attention_norm"), self.mixer.step(p, normed, state, current))
        del normed
        inner = self._inner(p, times_(mixed, self.output_scale), x_TD, None)
        return self._output(p, inner, None, overwrite=True)

    def forward_saved(self, p: Params, x_TD: Tensor, mb: MicroBatch) -> tuple[Tensor, Saved]:
        mixer, feed_forward = self.recompute(p, x_TD, mb)
        return self._output(p, feed_forward, mb), (mixer, feed_forward)

    def recompute(self, p: Params, x_TD: Tensor, mb: MicroBatch) -> Saved:
        x_TD = times(x_TD, self.input_scale)
        mixed, saved = self._mixed(p, x_TD, mb)
        return saved, self._inner(p, mixed, x_TD, mb)

    def backward(self, p: Params, g: Grads, saved: Saved, dy_TD: Tensor, mb: MicroBatch) -> Tensor:
        mixer, feed_forward = saved
        dx_TD = self.mixer_backward(p, g, mixer, self.feed_forward_backward(p, g, feed_forward, dy_TD, mb), mb)
        return times_(dx_TD, self.input_scale)

    def _mixed(self, p: Params, x_TD: Tensor, mb: MicroBatch) -> tuple[Tensor, MixerSaved]:
        """The mixer's scaled output [T, D], before the residual is added."""
        saved, normed = self.norms.before(p.get("input_norm"), x_TD, None, self.mixer.form(p))
        product, mixer = self.mixer.forward(p, normed, mb)
        mixed, output = self.norms.after(p.get("attention_norm"), product)
        return times_(mixed, self.output_scale), MixerSaved(saved, mixer, output)

    def _inner(self, p: Params, mixed: Tensor, x_TD: Tensor, mb: MicroBatch | None) -> FeedForwardSaved:
        saved, normed = self.norms.before(p.get("post_norm"), mixed, x_TD, self.feed_forward.form(p))
        inner = self.feed_forward.inner(p, normed, mb)
        del normed
        output = self.feed_forward.output(p, inner, mb) if self.norms.post else None
        return FeedForwardSaved(saved, inner, output)

    def _output(self, p: Params, saved: FeedForwardSaved, mb: MicroBatch | None, *, overwrite: bool = False) -> Tensor:
        """The block's output from the saved tensors, which `overwrite` allows to overwrite."""
        if saved.output is None:
            return self.feed_forward.add(p, saved.feed_forward, saved.input.x, mb, self.output_scale, overwrite)
        normed, _ = self.norms.after(p.get("mlp_norm"), saved.output)
        return times_(normed, self.output_scale).add_(saved.input.x)

    def feed_forward_backward(
        self, p: Params, g: Grads, saved: FeedForwardSaved, dy_TD: Tensor, mb: MicroBatch
    ) -> Tensor:
        """Accumulates the feed-forward part's gradients in `g`; returns that of the sum of its input and residual."""
        dnormed = self.feed_forward.backward(
            p, g, saved.feed_forward, self._output_backward(p, g, saved.output, times(dy_TD, self.output_scale)), mb
        )
        norm = p.get("post_norm"), g.get("post_norm")
        return self.norms.before_backward(*norm, dnormed, saved.input, dy_TD)

    def mixer_backward(self, p: Params, g: Grads, saved: MixerSaved, dh_TD: Tensor, mb: MicroBatch) -> Tensor:
        """As `feed_forward_backward`, of the mixer."""
        norm = p.get("attention_norm"), g.get("attention_norm")
        dnormed = self.mixer.backward(
            p, g, saved.mixer, self.norms.after_backward(*norm, times(dh_TD, self.output_scale), saved.output), mb
        )
        norm = p.get("input_norm"), g.get("input_norm")
        return self.norms.before_backward(*norm, dnormed, saved.input, dh_TD)

    def _output_backward(self, p: Params, g: Grads, output: Tensor | None, dy_TD: Tensor) -> Tensor:
        """The gradient of the feed-forward part's output; the statistics of the norm after it are computed again."""
        if output is None:
            return dy_TD
        saved = self.norms.after(p.get("mlp_norm"), output)[1]
        return self.norms.after_backward(p.get("mlp_norm"), g.get("mlp_norm"), dy_TD, saved)

    @property
    def products(self) -> tuple[Product, ...]:
        """The products of all tokens with one weight, without that of a router."""
        return (*self.mixer.products, *self.feed_forward.products)

    @property
    def expert_products(self) -> tuple[ExpertProduct, ...]:
        return self.feed_forward.expert_products

    @property
    def adapters(self) -> tuple[Adapters | ExpertAdapters, ...]:
        products = (*self.products, *self.expert_products)
        return tuple(product.adapters for product in products if product.adapters is not None)

    @property
    def matrices(self) -> tuple[str, ...]:
        return tuple(product.name for product in (*self.products, *self.expert_products))

    @property
    def half_sums(self) -> bool:
        return any(product.half_sums for product in self.products)

    def with_products(self, change: Callable[[Any], Any]) -> Self:
        """The block with `change` of each product, those of experts included."""
        mixer, feed_forward = (part.with_products(change) for part in (self.mixer, self.feed_forward))
        return replace(self, mixer=mixer, feed_forward=feed_forward)

    def with_half_sums(self) -> Self:
        return replace(self, mixer=self.mixer.with_half_sums(), feed_forward=self.feed_forward.with_half_sums())

    @property
    def sizes(self) -> Sizes | None:
        """Its sizes as the paper's roofline names them; None if the paper has no such mixer."""
        sizes = self.mixer.sizes
        return None if sizes is None else self.feed_forward.sized(sizes)

    def work(self, tokens: int, length: int, itemsize: int) -> tuple[Work, Work]:
        works = [product.work(tokens, itemsize) for product in (*self.products, *self.expert_products)]
        works += [self._own_work(tokens, itemsize)]
        works += [self.mixer.work(tokens, length, itemsize), self.feed_forward.work(tokens, itemsize)]
        works += [adapters.work(tokens, itemsize) for adapters in self.adapters]
        forward, backward = works[0]
        for more_forward, more_backward in works[1:]:
            forward, backward = forward + more_forward, backward + more_backward
        return forward, backward

    def _own_work(self, tokens: int, itemsize: int) -> tuple[Work, Work]:
        """The work of norms, scales and residual sums."""
        hidden, norm = self.hidden, 2 * self.hidden * self.norms.pre
        forward = {"norm": norm, "sum and norm": 2 * hidden + norm, "sum": 3 * hidden}
        backward = {"norm and sum, backward": 8 * hidden}
        if self.norms.post:
            forward["output's norm"], backward["output's norm, backward"] = 5 * hidden, 8 * hidden
        if self.output_scale != 1:
            forward["scale"] = backward["scale, backward"] = 4 * hidden
        return (
            Work(elementwise=scaled(forward, tokens * itemsize)),
            Work(elementwise=scaled(backward, tokens * itemsize)),
        )

    def gradient_work(self, param: Param, tokens: int, itemsize: int) -> Work:
        for product in (*self.products, *self.expert_products):
            if product.owns(param):
                return product.gradient_work(param, tokens, itemsize)
        return product_gradient(param, tokens)

    def kept_bytes(self, tokens: int, itemsize: int) -> int:
        # the inputs of both norms, the first also scaled, and the outputs of the parts
        elements = self.hidden * (2 + (self.input_scale != 1) + 2 * self.norms.post)
        statistics = max(itemsize, 4) * (2 * self.norms.pre + self.norms.post)  # 1 / rms
        normed = sum(self._normed_bytes(part, itemsize) for part in (self.mixer, self.feed_forward))
        own = tokens * (elements * itemsize + statistics + normed)
        return own + self.mixer.kept_bytes(tokens, itemsize) + self.feed_forward.kept_bytes(tokens, itemsize)

    def _normed_bytes(self, part: Part, itemsize: int) -> int:
        """Bytes per token of a norm's output, kept as the input of a part: in FP8 with a scale."""
        if part.reads_codes:
            return self.hidden + 4
        return self.hidden * itemsize if self.norms.pre else 0  # without a norm it is what is kept anyway

    def workspace_bytes(self, tokens: int, itemsize: int, *, fused: bool = False) -> int:
        """Upper bound of the bytes that backward needs at once without the kept bytes, once per device.

        Gradients of products overwrite kept tensors, so they take no memory.
        """
        inside_products = max((adapters.workspace(tokens, itemsize) for adapters in self.adapters), default=0)
        inside_products += self._fp8_workspace(tokens, itemsize, fused=fused)
        # the gradient of an output is a scaled copy, or on the other side of its norm
        copies = tokens * itemsize * self.hidden * ((self.output_scale != 1) + self.norms.post)
        mixer, mixer_inside = self.mixer.workspace(itemsize, fused=fused)
        feed_forward, feed_forward_inside = self.feed_forward.workspace(itemsize)
        if fused:  # the gradient of the block's output; kernels of feed-forward parts need nothing inside
            between = tokens * max(mixer, itemsize * self.hidden + feed_forward)
            return copies + max(tokens * (mixer + mixer_inside), between + inside_products)
        between, inside = max(mixer, feed_forward), max(mixer_inside, feed_forward_inside)
        return copies + tokens * (between + inside) + inside_products

    def _fp8_workspace(self, tokens: int, itemsize: int, *, fused: bool) -> int:
        """Bytes that products in FP8 need at once; with DoRA also for the norms of rows."""
        dense = max((product.fp8_workspace(tokens, fused=fused) for product in self.products), default=0)
        norms = max((product.dora_workspace for product in self.products), default=0)
        of_experts = (each.fp8_workspace(tokens, itemsize, fused=fused) for each in self.expert_products)
        return max(dense + norms, *of_experts, 0)


def blocks(spec: ModelShape) -> tuple[Block, ...]:
    """The layers of a model without its head, which are all blocks."""
    return cast(tuple[Block, ...], spec.layers)
