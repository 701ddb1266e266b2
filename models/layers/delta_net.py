"""The gated delta net (Yang et al. 2024, arXiv 2412.06464), a mixer of a block: computation and costs.

Further shape suffixes: H value heads of V columns, each reading one of K key heads of C columns; r = H / K.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from rptrain.kernels import delta_rule, fp8
from rptrain.kernels.batch import CHUNK, MicroBatch
from rptrain.kernels.causal_conv import causal_conv, causal_conv_backward, causal_conv_from, last_inputs
from rptrain.kernels.delta_gates import gates, gates_backward
from rptrain.kernels.delta_rule import gated_delta_rule, gated_delta_rule_backward
from rptrain.kernels.fp8 import Form, Operand
from rptrain.kernels.gated_norm import gated_norm, gated_norm_backward
from rptrain.kernels.reference.dense import wide
from rptrain.models.layer import Operation
from rptrain.models.layers.delta_state import DeltaState
from rptrain.models.layers.product import Product, Source, kept
from rptrain.models.layers.state import CurrentTokens
from rptrain.models.params import Grads, Params
from rptrain.schedule.costs import Work, scaled


class DeltaSaved(NamedTuple):
    normed: Operand  # [T, D], the input
    qkvz: Tensor  # [T, 2 K C + 2 H V]; backward convolves it again
    ba: Tensor  # [T, 2 H]
    decay: Tensor  # [T, H], wide
    beta: Tensor  # [T, H], wide
    rule: Any  # of the delta rule: chunk states
    out: Tensor  # [T, H, V], of the delta rule; backward norms it again


class Columns(NamedTuple):
    """Views of the columns of qkvz, and of their gradients."""

    q: Tensor  # [T, K, C]
    k: Tensor
    v: Tensor  # [T, K, r V]
    z: Tensor


@dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """A gated delta net: a Mixer (models/layers/block.py).

    Parameters: delta_qkvz [2 K C + 2 H V, D], delta_ba [2 H, D], delta_out [D, H V], the convolution delta_conv
    [2 K C + H V, 1, width], the norm delta_norm [V], and in float32 a_log [H] and dt_bias [H].

    It keeps its input, both of its products, the gates, and the delta rule's output and chunk states. Backward computes
    queries, keys and values after the convolution again, and the normed output: kept, they would be a sixth of a
    block's memory in a model of 27B, and these passes over memory take less than a hundredth of its time.
    """

    qkvz: Product
    ba: Product
    out: Product
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    width: int  # of the convolution
    eps: float  # of the output's norm
    by_key_head: bool = False  # whether the products' columns are ordered by key head, and not by kind

    @classmethod
    def of(
        cls,
        hidden: int,
        key_heads: int,
        value_heads: int,
        key_size: int,
        value_size: int,
        width: int,
        eps: float,
        *,
        by_key_head: bool = False,
    ) -> Self:
        """The delta net of [T, hidden]."""
        values = value_heads * value_size
        columns = 2 * key_heads * key_size + 2 * values
        return cls(
            qkvz=Product(name="delta_qkvz", inputs=hidden, outputs=columns, mask=6, source=Source.NORM),
            ba=Product(name="delta_ba", inputs=hidden, outputs=2 * value_heads, mask=7, source=Source.SHARED),
            out=Product(name="delta_out", inputs=values, outputs=hidden, mask=8),
            key_heads=key_heads,
            value_heads=value_heads,
            key_size=key_size,
            value_size=value_size,
            width=width,
            eps=eps,
            by_key_head=by_key_head,
        )

    @property
    def products(self) -> tuple[Product, ...]:
        return self.qkvz, self.ba, self.out

    def with_products(self, change: Callable[[Any], Any]) -> Self:
        return replace(self, qkvz=change(self.qkvz), ba=change(self.ba), out=change(self.out))

    def with_half_sums(self) -> Self:
        return self.with_products(lambda product: replace(product, half_sums=True))

    def form(self, p: Params) -> Form:
        return self.qkvz.form(p) | self.ba.form(p)

    def forward(self, p: Params, x: Operand, mb: MicroBatch) -> tuple[Tensor, DeltaSaved]:
        qkvz, ba = self.qkvz.forward(p, x, mb), self.ba.forward(p, x, mb)
        decay, beta = self._gates(p, ba)
        q, k, v = self._convolved(p, qkvz, mb.positions)
        out, _, rule = gated_delta_rule(q, k, v, decay, beta, mb.documents)
        del q, k, v
        product = self.out.forward(p, self._attended(p, out, qkvz), mb)
        return product, DeltaSaved(kept(x), qkvz, ba, decay, beta, rule, out)

    def backward(self, p: Params, g: Grads, saved: DeltaSaved, dy_TD: Tensor, mb: MicroBatch) -> Tensor:
        dattended = self.out.backward(p, g, dy_TD, self._attended(p, saved.out, saved.qkvz), mb)
        del dy_TD
        columns, dqkvz = self._columns(saved.qkvz), torch.empty_like(saved.qkvz)
        *dqkv, dz = self._columns(dqkvz)
        dout = gated_norm_backward(dattended, saved.out, columns.z, p["delta_norm"], self.eps, dz, g.get("delta_norm"))
        del dattended
        q, k, v = self._convolved(p, saved.qkvz, mb.positions)
        dq, dk, dv, ddecay, dbeta = gated_delta_rule_backward(
            dout, q, k, v, saved.decay, saved.beta, saved.rule, mb.documents
        )
        del dout
        q, k, v, _ = columns
        into = dqkv[0], dqkv[1], dqkv[2]
        causal_conv_backward(dq, dk, dv, q, k, v, p["delta_conv"], mb.positions, into, g.get("delta_conv"))
        del dq, dk, dv
        b, a = self._gate_columns(saved.ba)  # overwritten by their gradients
        grads = g.get("a_log"), g.get("dt_bias")
        gates_backward(ddecay, dbeta, b, a, p["a_log"], p["dt_bias"], (b, a), grads)
        dx_TD = self.qkvz.backward(p, g, dqkvz, saved.normed, mb)
        return self.ba.backward(p, g, saved.ba, saved.normed, mb, total=dx_TD)

    def step(self, p: Params, x: Operand, state: DeltaState, current: CurrentTokens) -> Tensor:
        qkvz, (decay, beta) = self.qkvz.forward(p, x, None), self._gates(p, self.ba.forward(p, x, None))
        initial = history = None
        if current.prompts is None:
            initial, history = state.matrices, state.history
        q, k, v = self._convolved(p, qkvz, current.positions, history, current.cu_seqlens)
        out, matrices, _ = gated_delta_rule(q, k, v, decay, beta, current.documents, initial=initial, final=True)
        assert matrices is not None
        q, k, v, _ = self._columns(qkvz)
        state.replace(last_inputs(q, k, v, self.width, current.cu_seqlens, history), matrices, current.ends)
        return self.out.forward(p, self._attended(p, out, qkvz), None)

    def _convolved(
        self,
        p: Params,
        qkvz: Tensor,
        positions: Tensor,
        history: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q and k [T, K, C], v [T, H, V]; `history`: of the documents at `cu_seqlens`, see `causal_conv_from`."""
        q, k, v, _ = self._columns(qkvz)
        if history is None or cu_seqlens is None:
            q, k, v = causal_conv(q, k, v, p["delta_conv"], positions)
        else:
            q, k, v = causal_conv_from(q, k, v, p["delta_conv"], history, cu_seqlens)
        return q, k, v.view(len(v), self.value_heads, self.value_size)

    def _gates(self, p: Params, ba: Tensor) -> tuple[Tensor, Tensor]:
        """Decay and beta [T, H]."""
        return gates(*self._gate_columns(ba), p["a_log"], p["dt_bias"])

    def _attended(self, p: Params, out_THV: Tensor, qkvz: Tensor) -> Operand:
        """The input of the last product."""
        normed = gated_norm(out_THV, self._columns(qkvz).z, p["delta_norm"], self.eps)
        return fp8.operand(normed, self.out.form(p))

    def _columns(self, qkvz: Tensor) -> Columns:
        values = self.value_heads // self.key_heads * self.value_size
        return Columns(*self._views(qkvz, self.key_size, self.key_size, values, values))

    def _gate_columns(self, ba: Tensor) -> tuple[Tensor, Tensor]:
        """Views of b and a [T, K, r]."""
        repeats = self.value_heads // self.key_heads
        b, a = self._views(ba, repeats, repeats)
        return b, a

    def _views(self, x: Tensor, *widths: int) -> tuple[Tensor, ...]:
        """The kinds of columns of a product's output, of these widths for a key head."""
        if self.by_key_head:
            return x.unflatten(1, (self.key_heads, -1)).split(widths, 2)
        kinds = x.split([self.key_heads * width for width in widths], 1)
        return tuple(kind.unflatten(1, (self.key_heads, -1)) for kind in kinds)

    def new_state(self, sequences: int, dtype: torch.dtype, device: torch.device) -> DeltaState:
        return DeltaState(
            torch.zeros(sequences, self._channels, self.width - 1, dtype=dtype, device=device),
            torch.zeros(sequences, *self._matrix_shape, dtype=wide(dtype), device=device),
        )

    def state_bytes(self, sequences: int, longest: int, dtype: torch.dtype) -> int:
        history, matrices = self._channels * (self.width - 1), torch.Size(self._matrix_shape).numel()
        return sequences * (history * dtype.itemsize + matrices * wide(dtype).itemsize)

    @property
    def _matrix_shape(self) -> tuple[int, int, int]:
        return self.value_heads, self.key_size, self.value_size

    @property
    def reads_codes(self) -> bool:
        return self.qkvz.reads_codes and self.ba.reads_codes

    def work(self, tokens: int, length: int, itemsize: int) -> tuple[Work, Work]:
        channels, values, heads = self._channels, self.out.inputs, self.value_heads
        of_gates = 2 * heads * max(itemsize, 4) / itemsize  # decay and beta are wide
        forward = {
            "convolution": 2 * channels,
            "gates": 2 * heads + of_gates,
            "gated norm": 3 * values,
        }
        backward = {
            "convolution, backward": (2 + 3) * channels,  # with the convolution again
            "gates, backward": 4 * heads + of_gates,
            "gated norm, backward": (3 + 5) * values,  # with the norm again
        }
        again = values * (itemsize + 1) if self.out.in_fp8 else 0  # the normed output is quantized again
        rule = float(tokens * heads * self.rule_operations)
        return (
            Work(delta_rule=rule, elementwise=scaled(forward, tokens * itemsize)),
            Work(
                delta_rule_backward=2 * rule,
                elementwise=scaled(backward, tokens * itemsize),
                quantization=tokens * again,
            ),
        )

    @property
    def rule_operations(self) -> int:
        """Operations of the delta rule in forward, by chunks, for a token and a value head.

        With the state: what it predicts, its outputs, its update. In a chunk of L tokens: products of keys with keys
        and with queries [L, L], the solution of the triangular system for values, and outputs.
        """
        keys, values = self.key_size, self.value_size
        return 6 * keys * values + 4 * CHUNK * keys + 4 * CHUNK * values

    def kept_bytes(self, tokens: int, itemsize: int) -> int:
        elements = self.qkvz.outputs + self.ba.outputs + self.out.inputs
        statistics = 2 * self.value_heads * max(itemsize, 4)
        return tokens * (elements * itemsize + statistics) + self.rule_kept_bytes(tokens, itemsize)

    def rule_kept_bytes(self, tokens: int, itemsize: int) -> int:
        """The part of `kept_bytes` that the delta rule's kernels keep, but not its reference."""
        return delta_rule.kept_bytes(tokens, *self._matrix_shape, itemsize)

    def workspace(self, itemsize: int, *, fused: bool) -> tuple[int, int]:
        hidden, channels, values = self.qkvz.inputs, self._channels, self.out.inputs
        rule = itemsize * (self.qkvz.outputs + values + channels)  # the gradient of qkvz and its output's; operands
        if fused:  # the gradients of the block's output and, behind the feed-forward part, of its middle
            rule += delta_rule.workspace_bytes(self.key_heads, *self._matrix_shape, itemsize)
            products = itemsize * (self.qkvz.outputs + 2 * hidden)
            return 2 * itemsize * hidden + products, max(0, rule - products)
        # autograd keeps what the reference computes, of repeated keys and queries; documents have a chunk or more
        heads, wide = self.value_heads, max(itemsize, 4)
        chunks = heads * (6 * CHUNK + 6 * self.key_size + 10 * self.value_size)
        states = -(-heads * 6 * self.key_size * self.value_size // CHUNK)
        convolution = (self.width + 6) * channels
        return itemsize * hidden + rule, wide * max(chunks + states + 2 * channels, convolution, 5 * hidden)

    @property
    def sizes(self) -> None:
        return None

    def operations(self, mb: MicroBatch, dtype: torch.dtype, device: torch.device) -> list[Operation]:
        """The delta rule."""
        tokens, heads, (key_heads, size) = len(mb.positions), self.value_heads, (self.key_heads, self.key_size)
        q, k = (F.normalize(torch.randn(tokens, key_heads, size, dtype=dtype, device=device), dim=-1) for _ in range(2))
        v, dout = (torch.randn(tokens, heads, self.value_size, dtype=dtype, device=device) for _ in range(2))
        decay, beta = (torch.rand(tokens, heads, dtype=wide(dtype), device=device) for _ in range(2))
        operands = q, k, v, -decay, beta
        _, _, rule = gated_delta_rule(*operands, mb.documents)
        return [
            Operation(
                "delta rule",
                lambda: gated_delta_rule(*operands, mb.documents),
                lambda: gated_delta_rule_backward(dout, *operands, rule, mb.documents),
            )
        ]

    @property
    def _channels(self) -> int:
        """The columns of qkvz that are convolved: q, k and v."""
        return self.qkvz.outputs - self.out.inputs
