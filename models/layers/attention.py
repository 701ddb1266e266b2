"""Grouped-query attention with rotary positions, a mixer of a block: computation, state and costs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from rptrain.kernels import attention as attn
from rptrain.kernels import fp8, half
from rptrain.kernels.batch import MicroBatch, Rotation
from rptrain.kernels.fp8 import Form, Operand
from rptrain.kernels.half import SCALE_BYTES, TERMS, Heads
from rptrain.kernels.launch import fused
from rptrain.kernels.output_gate import output_gate, output_gate_backward
from rptrain.kernels.reference.dense import split_gates, wide
from rptrain.kernels.rope import QKNorm, qk_norm_rope, qk_norm_rope_backward
from rptrain.models.layer import Operation
from rptrain.models.layers.keys_values import KeysAndValues, Scores
from rptrain.models.layers.product import Product, Source, kept
from rptrain.models.layers.state import CurrentTokens
from rptrain.models.params import Grads, Params
from rptrain.schedule.costs import Work, scaled
from rptrain.schedule.roofline import Sizes

# Attention takes as long as if each query saw this many keys more: parts of tiles behind the mask, and the start and
# end of each row of tiles. Measured in training on an H200 with 2,048 and 65,536 tokens per sequence, both directions.
EDGE = 375
BACKENDS = ("hybrid", "triton", "reference")  # backends whose backward always sums in a fixed order


class AttentionSaved(NamedTuple):
    normed: Operand  # [T, D], the input
    qkv: Tensor  # [T, (H + 2K) C], gated [T, (2H + 2K) C]; v is in its memory, and without q/k norm q and k are too
    qk_rstd: Tensor | None  # [T, H + K], with q/k norm
    q: Heads  # [T, H, C], rotated; k, v [T, K, C]
    k: Heads
    v: Heads
    out: Tensor  # [T, H, C]
    attended: Operand | None  # [T, H C], out as the output projection reads it; None if gated
    attention: Any  # attn.Saved


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Grouped-query attention: a Mixer (models/layers/block.py).

    Parameters: qkv [(H + 2K) C, D], o [D, H C]; if `gated` qkv [(2H + 2K) C, D], which has the rows of a head's gate
    behind those of its query; with `qk_norm` q_norm and k_norm, [C] each, or with `whole_qk_norm` [H C] and [K C]; with
    biases qkv_bias, of as many rows as qkv, and o_bias [D]; with `sinks` sinks [H].

    It keeps its input, q, k, v (also before the norms of q and k, if any), gates, its output and log-sum-exp; of
    products in FP8, their inputs in FP8. Backward computes a gated output again.
    """

    qkv: Product
    o: Product
    heads: int
    kv_heads: int
    head_size: int
    eps: float  # of the norms of q and k
    rotary: int | None = 0  # the place of the rotary positions among the model's; None: queries and keys have none
    qk_norm: bool = False  # of every head's queries and keys
    whole_qk_norm: bool = False  # with `qk_norm`: of all heads of a token at once
    zero_centered: bool = False  # with norms of every head: their factors are 1 + weight
    gated: bool = False  # with norms of every head: the output is multiplied by the sigmoid of gates
    sinks: bool = False  # a score per head without a key
    window: int | None = None  # maximum keys per query, including itself
    scale: float | None = None  # factor of the scores; None: head_size ** -0.5
    half_sums: bool = False  # its products are summed in float16: models/transforms/half_sums.py

    @classmethod
    def of(
        cls, hidden: int, heads: tuple[int, int, int], *, qkv_bias: bool = False, o_bias: bool = False, **options: Any
    ) -> Self:
        """Attention of [T, hidden], with `heads` (H, K, C). `options`: its other fields."""
        number, kv_number, size = heads
        outputs = (number + 2 * kv_number) * size
        o: dict[str, Any] = {}
        if options.get("gated"):  # rows and columns of the gradient of o's output are quantized separately
            outputs += number * size
            o = {"source": Source.ACTIVATION, "gradient_reads": 2}
        return cls(
            qkv=Product(name="qkv", inputs=hidden, outputs=outputs, mask=0, bias=qkv_bias, source=Source.NORM),
            o=Product(name="o", inputs=number * size, outputs=hidden, mask=1, bias=o_bias, **o),
            heads=number,
            kv_heads=kv_number,
            head_size=size,
            **options,
        )

    @property
    def products(self) -> tuple[Product, ...]:
        return self.qkv, self.o

    def with_products(self, change: Callable[[Any], Any]) -> Self:
        return replace(self, qkv=change(self.qkv), o=change(self.o))

    def with_half_sums(self) -> Self:
        return replace(self.with_products(lambda product: replace(product, half_sums=True)), half_sums=True)

    def form(self, p: Params) -> Form:
        return self.qkv.form(p)

    def forward(self, p: Params, x: Operand, mb: MicroBatch) -> tuple[Tensor, AttentionSaved]:
        qkv = self.qkv.forward(p, x, mb)
        q, k, v, qk_rstd = self._rotated(p, qkv, mb.rotations, half_sums=self.half_sums)
        out, attention = attn.attention(q, k, v, mb, window=self.window, sinks=p.get("sinks"), scale=self.scale)
        attended = self._output_operand(p, out, qkv)
        product = self.o.forward(p, attended, mb)
        again = None if self.gated else kept(attended)
        return product, AttentionSaved(kept(x), qkv, qk_rstd, q, k, v, out, again, attention)

    def backward(self, p: Params, g: Grads, saved: AttentionSaved, dy_TD: Tensor, mb: MicroBatch) -> Tensor:
        if saved.attended is None:
            dout = self._gate_backward(p, g, saved, dy_TD, mb)
        else:
            dout = self.o.backward(p, g, dy_TD, saved.attended, mb)
        del dy_TD
        dheads = attn.attention_backward(
            dout.view_as(saved.out),
            saved.q,
            saved.k,
            saved.v,
            saved.out,
            saved.attention,
            mb,
            window=self.window,
            sinks=p.get("sinks"),
            grad_sinks=g.get("sinks"),
            scale=self.scale,
        )
        del dout
        norms, grads = self._norms(p), (g.get("q_norm"), g.get("k_norm")) if self.qk_norm else None
        rotation = self._rotation(mb.rotations)
        dqkv = qk_norm_rope_backward(*dheads, saved.qkv, rotation, norms, saved.qk_rstd, grads, gated=self.gated)
        del dheads
        return self.qkv.backward(p, g, dqkv, saved.normed, mb)

    def _gate_backward(self, p: Params, g: Grads, saved: AttentionSaved, dy_TD: Tensor, mb: MicroBatch) -> Tensor:
        """The gradient of attention's output; that of the gates is written over them."""
        attended, of_output = self.o.backward_input(p, dy_TD, mb)  # its gradient, until it is overwritten
        dout = output_gate_backward(attended, saved.out, self._gates(saved.qkv))
        self.o.backward_weights(p, g, of_output, attended, mb)
        return dout

    def step(self, p: Params, x: Operand, state: KeysAndValues, current: CurrentTokens) -> Tensor:
        qkv = self.qkv.forward(p, x, None)
        q, k, v, _ = self._rotated(p, qkv, current.rotations, half_sums=False)
        assert isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
        scores = Scores(self.window, p.get("sinks"), self.scale or self.head_size**-0.5)
        out = state.attend(q, k, v, current, scores)
        return self.o.forward(p, self._output_operand(p, out, qkv), None)

    def new_state(self, sequences: int, dtype: torch.dtype, device: torch.device) -> KeysAndValues:
        return KeysAndValues(torch.zeros(self._state_shape(sequences, 0), dtype=dtype, device=device))

    def state_bytes(self, sequences: int, longest: int, dtype: torch.dtype) -> int:
        return torch.Size(self._state_shape(sequences, longest)).numel() * dtype.itemsize

    def _state_shape(self, sequences: int, longest: int) -> tuple[int, ...]:
        return 2, sequences, longest, self.kv_heads, self.head_size

    def _rotated(
        self, p: Params, qkv: Tensor, rotations: Sequence[Rotation], *, half_sums: bool
    ) -> tuple[Any, Any, Any, Tensor | None]:
        form = self._rotation(rotations), self.kv_heads, self.head_size, self._norms(p)
        return qk_norm_rope(qkv, *form, half_sums=half_sums, gated=self.gated)

    def _output_operand(self, p: Params, out: Tensor, qkv: Tensor) -> Operand:
        """Attention's output [T, H, C] as the output projection reads it."""
        if self.gated:
            return output_gate(out, self._gates(qkv), self.o.form(p))
        return fp8.operand(out.flatten(1), self.o.form(p))

    def _gates(self, qkv: Tensor) -> Tensor:
        return split_gates(qkv, self.kv_heads, self.head_size)

    def _rotation(self, rotations: Sequence[Rotation]) -> Rotation | None:
        return None if self.rotary is None else rotations[self.rotary]

    def _norms(self, p: Params) -> QKNorm | None:
        if not self.qk_norm:
            return None
        return QKNorm(p["q_norm"], p["k_norm"], self.eps, self.whole_qk_norm, self.zero_centered)

    @property
    def reads_codes(self) -> bool:
        return self.qkv.reads_codes

    def work(self, tokens: int, length: int, itemsize: int) -> tuple[Work, Work]:
        heads, kv_heads = self._widths
        attention = 4.0 * tokens * self.attended(length) * heads
        edges = 4.0 * tokens * EDGE * heads
        half_attention = attention if self._has_half_sums(itemsize) else 0.0
        rotation = 0 if self.rotary is None and not self.qk_norm else 2 * (heads + kv_heads)
        # q and k before their norms; the values' gradient, copied
        rotation_back = rotation + self.qk_norm * (heads + kv_heads) + 2 * kv_heads
        forward, backward = {"rotation": rotation}, {"rotation, backward": rotation_back}
        if self.whole_qk_norm:
            forward["norms of q and k"], backward["norms of q and k, backward"] = 2 * rotation_back, 2 * rotation_back
        if self.gated:  # backward writes the gated output again
            forward["output gate"], backward["output gate, backward"] = 3 * heads, 6 * heads
        if half_attention:  # values are scaled in place, and a copy of the gradient of the output
            forward["values in float16"], backward["output's gradient in float16"] = 2 * kv_heads, 2 * heads
        return (
            Work(
                attention=attention,
                edges=edges,
                half_attention=half_attention,
                elementwise=scaled(forward, tokens * itemsize),
            ),
            Work(
                attention_backward=2 * attention,
                edges=2 * edges,
                half_attention_backward=2 * half_attention,
                elementwise=scaled(backward, tokens * itemsize),
            ),
        )

    def kept_bytes(self, tokens: int, itemsize: int) -> int:
        heads, kv_heads = self._widths
        elements, statistics = 2 * heads + 2 * kv_heads, self.heads  # log-sum-exp
        if self.qk_norm:  # q and k before their norms; the values lie in the same buffer
            elements += heads + kv_heads
            statistics += 2 if self.whole_qk_norm else self.heads + self.kv_heads
        elements += self.gated * heads
        codes = heads + 4 if self.o.reads_codes and not self.gated else 0
        scales = SCALE_BYTES * (self.heads + 2 * self.kv_heads) if self._has_half_sums(itemsize) else 0
        return tokens * (elements * itemsize + statistics * max(itemsize, 4) + codes + scales)

    def workspace(self, itemsize: int, *, fused: bool) -> tuple[int, int]:
        hidden, (heads, kv_heads) = self.qkv.inputs, self._widths
        if fused:  # the gradients of the block's output and, behind the MLP, of its middle; attention's sums of rows
            inside = itemsize * (2 * heads + 2 * kv_heads)
            if self._has_half_sums(itemsize):  # a copy of the gradient of attention's output
                inside += itemsize * heads + SCALE_BYTES * self.heads
            if self.whole_qk_norm:  # the gradient of the normed product
                inside += itemsize * (heads + kv_heads)
            return 2 * itemsize * hidden + max(inside, 2 * itemsize * hidden) + 8 * self.heads, 0
        # the gradients of the residual sum and of q, k and v, also turned back; or those on both sides of the norm
        whole = self.whole_qk_norm * (heads + kv_heads)  # the gradient of the normed product
        between = itemsize * (hidden + max(2 * heads + 3 * kv_heads + whole, 2 * hidden))
        return between, max(itemsize, 4) * max(5 * hidden, 5 * heads, 4 * (heads + kv_heads))  # norms, attention

    def attended(self, length: int) -> float:
        """The mean number of keys that a query attends to in a sequence of `length` tokens: causal half or window."""
        seen = length if self.window is None else min(length, self.window)
        return seen * (2 * length - seen + 1) / (2 * length)

    @property
    def sizes(self) -> Sizes | None:
        if self.gated:
            return None
        return Sizes(self.qkv.inputs, self.heads, self.kv_heads, self.head_size, intermediate=0, window=self.window)

    def operations(self, mb: MicroBatch, dtype: torch.dtype, device: torch.device) -> list[Operation]:
        """Attention by every deterministic implementation."""
        q, k, v = (
            torch.randn(len(mb.positions), heads, self.head_size, dtype=dtype, device=device)
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        )
        dout = torch.randn_like(q)
        sinks = torch.randn(self.heads, dtype=dtype, device=device) if self.sinks else None
        extras: dict[str, Any] = {"window": self.window, "sinks": sinks}
        back = {**extras, "grad_sinks": None if sinks is None else torch.zeros_like(sinks, dtype=wide(dtype))}

        def operation(name: str, heads: Sequence[Heads], force: str | None) -> Operation:
            q, k, v = heads
            out, saved = attn.attention(q, k, v, mb, force, **extras)
            return Operation(
                f"attention ({name})",
                lambda: attn.attention(q, k, v, mb, force, **extras),
                lambda: attn.attention_backward(dout, q, k, v, out, saved, mb, **back),
            )

        plain = self.window is None and not self.sinks
        found = [operation(name, (q, k, v), name) for name in _backends(dtype, device, self.head_size, plain)]
        if self.half_sums and fused(q) and half.takes_heads(q, self.head_size):
            found.append(operation("float16 sums", [half.scaled_heads(x) for x in (q, k, v)], None))
        return found

    def _has_half_sums(self, itemsize: int) -> bool:
        return self.half_sums and itemsize == 2 and self.head_size <= TERMS

    @property
    def _widths(self) -> tuple[int, int]:
        return self.heads * self.head_size, self.kv_heads * self.head_size


def _backends(dtype: torch.dtype, device: torch.device, head_size: int, plain: bool) -> list[str]:
    """The implementations for these inputs, `plain` without window and sinks; the reference only as a last resort."""
    found = []
    for name in BACKENDS:
        try:
            found.append(attn.backend(dtype, device.type, True, head_size, plain=plain, force=name))
        except ValueError:
            continue
    return found[:-1] or found
