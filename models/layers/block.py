"""The sizes and costs of a decoder block with its attention; subclasses add the MLP."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from rptrain.kernels.fp8_products import product_workspace
from rptrain.kernels.half import SCALE_BYTES, TERMS
from rptrain.models.layers.adapters import Adapters
from rptrain.models.layers.expert_adapters import ExpertAdapters
from rptrain.models.params import Param
from rptrain.schedule.costs import Work, scaled

# Attention takes as long as if each query saw this many keys more: parts of tiles behind the mask, and the start and
# end of each row of tiles. Measured in training on an H200 with 2,048 and 65,536 tokens per sequence, both directions.
EDGE = 375


@dataclass(frozen=True, kw_only=True)
class BlockShape(ABC):
    """A decoder block with grouped-query attention: a LayerShape (models/layer.py).

    Memory is that of an explicit backward, which keeps the inputs of both norms, their outputs and 1 / rms, q, k, v
    (also before the norms of q and k, if any), attention's output and log-sum-exp, and the MLP's part; of products in
    FP8, their inputs in FP8.
    """

    name: str
    units: tuple[int, ...]
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    rotary: int | None = 0  # the place of the rotary positions among the model's; None: queries and keys have none
    pre_norms: bool = True  # of the inputs of attention and of the MLP
    post_norms: bool = False  # of their outputs, before they are added
    qk_norm: bool = False  # of every head's queries and keys
    whole_qk_norm: bool = False  # with `qk_norm`: of all heads of a token at once
    qkv_bias: bool = False  # biases on queries, keys and values
    o_bias: bool = False  # bias on the output projection
    window: int | None = None  # maximum keys per query, including itself
    scale: float | None = None  # factor of attention's scores; None: head_size ** -0.5
    input_scale: float = 1.0  # factor of the block's input; the first block scales embeddings
    output_scale: float = 1.0  # factor of attention's and of the MLP's output before they are added
    adapters: tuple[Adapters | ExpertAdapters, ...] = ()
    fp8: tuple[str, ...] = ()  # products whose weights are in FP8: models/transforms/fp8.py
    half_sums: bool = (
        False  # attention's products, and gradients of weights, are summed in float16: models/transforms/half_sums.py
    )

    def work(self, tokens: int, length: int, itemsize: int) -> tuple[Work, Work]:
        forward, backward = self._product_work(tokens, itemsize)
        parts = [self._attention_work(tokens, length, itemsize), self.mlp_work(tokens, itemsize)]
        parts += [adapters.work(tokens, itemsize) for adapters in self.adapters]
        for part_forward, part_backward in parts:
            forward, backward = forward + part_forward, backward + part_backward
        return forward, backward

    def gradient_work(self, param: Param, tokens: int, itemsize: int) -> Work:
        work = product_gradient(param, tokens)
        if not param.in_fp8:
            return work
        return Work(fp8=work.matmul, quantization=tokens * self._gradient_bytes(param.name, itemsize))

    def kept_bytes(self, tokens: int, itemsize: int) -> int:
        """Bytes kept from the recomputed forward until backward."""
        heads, kv_heads = self._widths
        elements = self.hidden * (2 if self.input_scale != 1 else 1) + 2 * heads + 2 * kv_heads
        elements += self.hidden if self.post_norms else 0
        statistics = self.pre_norms + self.post_norms + self.heads  # 1 / rms, log-sum-exp
        if self.qk_norm:  # q and k before their norms; the values lie in the same buffer
            elements += heads + kv_heads
            statistics += 2 if self.whole_qk_norm else self.heads + self.kv_heads
        inputs = self.normed_bytes("qkv", itemsize) + (heads + 4 if self._reads_codes("o") else 0)
        inputs += SCALE_BYTES * (self.heads + 2 * self.kv_heads) if self._in_half(itemsize) else 0
        return tokens * (elements * itemsize + inputs + statistics * max(itemsize, 4)) + self.mlp_kept(tokens, itemsize)

    def workspace_bytes(self, tokens: int, itemsize: int, *, fused: bool = False) -> int:
        """Upper bound of the bytes that backward needs at once without the kept bytes, once per device.

        Gradients of products overwrite kept tensors, so they take no memory.
        """
        heads, kv_heads = self._widths
        inside_products = max((adapters.workspace(tokens, itemsize) for adapters in self.adapters), default=0)
        inside_products += self._fp8_workspace(tokens, itemsize, fused=fused)
        # the gradient of an output is a scaled copy, or on the other side of its norm
        inside_products += tokens * itemsize * self.hidden * ((self.output_scale != 1) + self.post_norms)
        mlp, mlp_inside = self.mlp_workspace(itemsize)
        if fused:  # the gradients of the block's output and, behind the MLP, of its middle; attention's sums of rows
            inside_attention = itemsize * (2 * heads + 2 * kv_heads)
            if self._in_half(itemsize):  # a copy of the gradient of attention's output
                inside_attention += itemsize * heads + SCALE_BYTES * self.heads
            if self.whole_qk_norm:  # the gradient of the normed product
                inside_attention += itemsize * (heads + kv_heads)
            attention = 2 * itemsize * self.hidden + max(inside_attention, 2 * itemsize * self.hidden) + 8 * self.heads
            return tokens * max(attention, itemsize * self.hidden + mlp) + inside_products
        # the gradients of the residual sum and of q, k and v, also turned back; or those on both sides of the norm
        whole = self.whole_qk_norm * (heads + kv_heads)  # the gradient of the normed product
        attention = itemsize * (self.hidden + max(2 * heads + 3 * kv_heads + whole, 2 * self.hidden))
        inside = max(itemsize, 4) * max(5 * self.hidden, 5 * heads, 4 * (heads + kv_heads))  # norms, attention
        return tokens * (max(attention, mlp) + max(inside, mlp_inside)) + inside_products

    def normed_bytes(self, name: str, itemsize: int) -> int:
        """Bytes per token of a norm's output, kept as the input of product `name`: in FP8 with a scale."""
        if self._reads_codes(name):
            return self.hidden + 4
        return self.hidden * itemsize if self.pre_norms else 0  # without a norm it is what is kept anyway

    def attended(self, length: int) -> float:
        """The mean number of keys that a query attends to in a sequence of `length` tokens: causal half or window."""
        seen = length if self.window is None else min(length, self.window)
        return seen * (2 * length - seen + 1) / (2 * length)

    @property
    def product_sizes(self) -> dict[str, tuple[int, int]]:
        """The inputs and outputs of products with one weight for all tokens, by name, without those of a router."""
        heads, kv_heads = self._widths
        return {"qkv": (self.hidden, heads + 2 * kv_heads), "o": (heads, self.hidden)}

    @abstractmethod
    def mlp_work(self, tokens: int, itemsize: int) -> tuple[Work, Work]:
        """The work of the MLP's forward and backward, from the output of its norm to the residual sum.

        Products in `product_sizes` are not included.
        """

    @abstractmethod
    def mlp_kept(self, tokens: int, itemsize: int) -> int:
        """Bytes that the MLP keeps, including its norm."""

    @abstractmethod
    def mlp_workspace(self, itemsize: int) -> tuple[int, int]:
        """Bytes per token in the MLP's backward: the maximum between operations, and the maximum inside one."""

    def _in_half(self, itemsize: int) -> bool:
        return self.half_sums and itemsize == 2 and self.head_size <= TERMS

    @property
    def _widths(self) -> tuple[int, int]:
        return self.heads * self.head_size, self.kv_heads * self.head_size

    def _attention_work(self, tokens: int, length: int, itemsize: int) -> tuple[Work, Work]:
        heads, kv_heads = self._widths
        attention = 4.0 * tokens * self.attended(length) * heads
        edges = 4.0 * tokens * EDGE * heads
        half = attention if self._in_half(itemsize) else 0.0
        rotation = 0 if self.rotary is None and not self.qk_norm else 2 * (heads + kv_heads)
        norm = 2 * self.hidden * self.pre_norms
        forward = {"norm": norm, "rotation": rotation, "sum and norm": 2 * self.hidden + norm}
        # q and k before their norms; the values' gradient, copied
        rotation_back = rotation + self.qk_norm * (heads + kv_heads) + 2 * kv_heads
        backward = {"norm and sum, backward": 4 * self.hidden, "rotation, backward": rotation_back}
        if self.qkv_bias or self.o_bias:
            biases = self.qkv_bias * (heads + 2 * kv_heads) + self.o_bias * self.hidden
            backward["biases, backward"] = biases
        if self.whole_qk_norm:
            forward["norms of q and k"], backward["norms of q and k, backward"] = 2 * rotation_back, 2 * rotation_back
        if self.post_norms:
            forward["output's norm"], backward["output's norm, backward"] = 5 * self.hidden, 8 * self.hidden
        if self.output_scale != 1:
            forward["scale"] = backward["scale, backward"] = 4 * self.hidden
        if half:  # values are scaled in place, and a copy of the gradient of the output
            forward["values in float16"], backward["output's gradient in float16"] = 2 * kv_heads, 2 * heads
        return (
            Work(attention=attention, edges=edges, half_attention=half, elementwise=scaled(forward, tokens * itemsize)),
            Work(
                attention_backward=2 * attention,
                edges=2 * edges,
                half_attention_backward=2 * half,
                elementwise=scaled(backward, tokens * itemsize),
            ),
        )

    def _product_work(self, tokens: int, itemsize: int) -> tuple[Work, Work]:
        """The work of the products in `product_sizes`."""
        forward, backward = Work(), Work()
        for name, (inputs, outputs) in self.product_sizes.items():
            operations = 2.0 * tokens * inputs * outputs
            if name in self.fp8:
                back = _row_bytes(outputs, itemsize) + self._gradient_bytes(name, itemsize)
                forward += Work(fp8=operations, quantization=tokens * self._quantizing_bytes(name, itemsize))
                backward += Work(fp8=2 * operations, quantization=tokens * back)
            else:
                forward, backward = forward + Work(matmul=operations), backward + Work(matmul=2 * operations)
        return forward, backward

    def _reads_codes(self, name: str) -> bool:
        """Whether a product reads its input in FP8 alone; adapters read it in the model's type."""
        return name in self.fp8 and all(adapters.name != name for adapters in self.adapters)

    def _quantizing_bytes(self, name: str, itemsize: int) -> int:
        """Bytes per token to quantize the input of a product, beyond what the operation that computes it moves.

        Norms and SwiGLU write codes in place of their output where nothing else reads it; norms also in addition to it.
        """
        inputs, _ = self.product_sizes[name]
        if name in ("o", "shared_gate_up") or (name in ("down", "shared_down") and not self._reads_codes(name)):
            return _row_bytes(inputs, itemsize)
        return inputs * (1 - itemsize if self._reads_codes(name) else 1)

    def _gradient_bytes(self, name: str, itemsize: int) -> int:
        """Bytes per token for the operands of a weight's gradient.

        The output's gradient: columns are quantized together with rows, and their maxima take a pass of their own; not
        those of `gate_up`, which SwiGLU's backward finds, while the rows and columns of `down` are quantized
        separately. The input: codes are transposed; those of `down` are written transposed.
        """
        inputs, outputs = self.product_sizes[name]
        of_output = {"gate_up": 1, "down": 2 * itemsize + 1}.get(name, itemsize + 1)
        of_input = {"down": itemsize + 1, "shared_down": itemsize + 1}.get(name, 2)
        return of_output * outputs + of_input * inputs

    def _fp8_workspace(self, tokens: int, itemsize: int, *, fused: bool) -> int:
        """Bytes that products in FP8 need at once; with DoRA also for the norms of rows."""
        sizes = (self.product_sizes[name] for name in self.fp8 if name in self.product_sizes)
        products = [product_workspace(tokens, *each, fused=fused) for each in sizes]
        norms = [a.dequantized_bytes for a in self.adapters if isinstance(a, Adapters) and a.name in self.fp8]
        return max(products, default=0) + max(norms, default=0)


def _row_bytes(columns: int, itemsize: int) -> int:
    """Bytes read and written to quantize a row."""
    return columns * (itemsize + 1)


def product_gradient(param: Param, tokens: int) -> Work:
    """The gradient work of a weight [out, in] that is multiplied with every token; none for vectors."""
    return Work(matmul=2.0 * tokens * param.numel if len(param.shape) == 2 else 0.0)
