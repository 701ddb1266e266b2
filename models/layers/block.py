"""The sizes and costs of a decoder block with its attention; subclasses add the MLP."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from rptrain.kernels.fp8 import product_workspace
from rptrain.models.adapters.expert_lora import ExpertAdapters
from rptrain.models.adapters.products import Adapters
from rptrain.models.spec import Param
from rptrain.schedule.costs import Work, scaled


@dataclass(frozen=True, kw_only=True)
class BlockShape(ABC):
    """A pre-norm decoder block with grouped-query attention: a LayerShape (models/spec.py).

    Memory is that of an explicit backward, which keeps the inputs of both norms, their outputs and 1 / rms, q, k, v
    (also before the norms of q and k, if any), attention's output and log-sum-exp, and the MLP's part.
    """

    name: str
    units: tuple[int, ...]
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    qk_norm: bool = False
    qkv_bias: bool = False  # biases on queries, keys and values
    o_bias: bool = False  # bias on the output projection
    window: int | None = None  # maximum keys per query, including itself
    adapters: tuple[Adapters | ExpertAdapters, ...] = ()
    fp8: bool = False  # products with matrices are computed in FP8: models/fp8.py

    def work(self, tokens: int, length: int, itemsize: int) -> tuple[Work, Work]:
        forward, backward = self._attention_work(tokens, length, itemsize)
        parts = [self.mlp_work(tokens, itemsize), *(adapters.work(tokens, itemsize) for adapters in self.adapters)]
        for part_forward, part_backward in parts:
            forward, backward = forward + part_forward, backward + part_backward
        if not self.fp8:
            return forward, backward
        ahead, back = zip(*(_quantized(*sizes, itemsize) for sizes in self.products), strict=True)
        return forward + Work(quantization=tokens * sum(ahead)), backward + Work(quantization=tokens * sum(back))

    def gradient_work(self, param: Param, tokens: int) -> Work:
        work = product_gradient(param, tokens)
        if not self.fp8 or not work.matmul or param.name == "router":
            return work
        return Work(fp8=work.matmul)

    def dense(self, operations: float) -> Work:
        """Operations of products that may be in FP8."""
        return Work(fp8=operations) if self.fp8 else Work(matmul=operations)

    def kept_bytes(self, tokens: int, itemsize: int) -> int:
        """Bytes kept from the recomputed forward until backward."""
        heads, kv_heads = self._widths
        elements = 2 * self.hidden + 2 * heads + 2 * kv_heads
        statistics = 1 + self.heads  # 1 / rms, log-sum-exp
        if self.qk_norm:  # q and k before their norms; the values lie in the same buffer
            elements += heads + kv_heads
            statistics += self.heads + self.kv_heads
        return tokens * (elements * itemsize + statistics * max(itemsize, 4)) + self.mlp_kept(tokens, itemsize)

    def workspace_bytes(self, tokens: int, itemsize: int, *, fused: bool = False) -> int:
        """Upper bound of the bytes that backward needs at once without the kept bytes, once per device.

        Gradients of products overwrite kept tensors, so they take no memory.
        """
        heads, kv_heads = self._widths
        inside_products = max((adapters.workspace(tokens, itemsize) for adapters in self.adapters), default=0)
        if self.fp8:
            inside_products += max(product_workspace(tokens, *sizes, fused=fused) for sizes in self.products)
        mlp, mlp_inside = self.mlp_workspace(itemsize)
        if fused:  # the gradients of the block's output and, behind the MLP, of its middle; attention's sums of rows
            attention = itemsize * (2 * self.hidden + max(2 * heads + 2 * kv_heads, 2 * self.hidden)) + 8 * self.heads
            return tokens * max(attention, itemsize * self.hidden + mlp) + inside_products
        # the gradients of the residual sum and of q, k and v, also turned back; or those on both sides of the norm
        attention = itemsize * (self.hidden + max(2 * heads + 3 * kv_heads, 2 * self.hidden))
        inside = max(itemsize, 4) * max(5 * self.hidden, 5 * heads, 4 * (heads + kv_heads))  # norms, attention
        return tokens * (max(attention, mlp) + max(inside, mlp_inside)) + inside_products

    def attended(self, length: int) -> float:
        """The mean number of keys that a query attends to in a sequence of `length` tokens: causal half or window."""
        seen = length if self.window is None else min(length, self.window)
        return seen * (2 * length - seen + 1) / (2 * length)

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """The inputs and outputs of the products that may be in FP8."""
        heads, kv_heads = self._widths
        return (self.hidden, heads + 2 * kv_heads), (heads, self.hidden)

    @abstractmethod
    def mlp_work(self, tokens: int, itemsize: int) -> tuple[Work, Work]:
        """The work of the MLP's forward and backward, from the output of its norm to the residual sum."""

    @abstractmethod
    def mlp_kept(self, tokens: int, itemsize: int) -> int:
        """Bytes that the MLP keeps, including its norm."""

    @abstractmethod
    def mlp_workspace(self, itemsize: int) -> tuple[int, int]:
        """Bytes per token in the MLP's backward: the maximum between operations, and the maximum inside one."""

    @property
    def _widths(self) -> tuple[int, int]:
        return self.heads * self.head_size, self.kv_heads * self.head_size

    def _attention_work(self, tokens: int, length: int, itemsize: int) -> tuple[Work, Work]:
        heads, kv_heads = self._widths
        matmul = 4.0 * tokens * self.hidden * (heads + kv_heads)
        attention = 4.0 * tokens * self.attended(length) * heads
        rotation = 2 * (heads + kv_heads)
        forward = {"norm": 2 * self.hidden, "rotation": rotation, "sum and norm": 4 * self.hidden}
        # q and k before their norms; the values' gradient, copied
        rotation_back = rotation + self.qk_norm * (heads + kv_heads) + 2 * kv_heads
        backward = {"norm and sum, backward": 4 * self.hidden, "rotation, backward": rotation_back}
        if self.qkv_bias or self.o_bias:
            biases = self.qkv_bias * (heads + 2 * kv_heads) + self.o_bias * self.hidden
            backward["biases, backward"] = biases
        return (
            self.dense(matmul) + Work(attention=attention, elementwise=scaled(forward, tokens * itemsize)),
            self.dense(2 * matmul) + Work(attention=2 * attention, elementwise=scaled(backward, tokens * itemsize)),
        )


def _quantized(inputs: int, outputs: int, itemsize: int) -> tuple[int, int]:
    """Bytes per token to quantize the operands of a product, in forward and in backward.

    Backward reads the gradient once for its rows and twice for its columns, and quantizes the input again.
    """
    again = inputs * (itemsize + 1)
    return again, again + 2 * inputs + outputs * (3 * itemsize + 2)


def product_gradient(param: Param, tokens: int) -> Work:
    """The gradient work of a weight [out, in] that is multiplied with every token; none for vectors."""
    return Work(matmul=2.0 * tokens * param.numel if len(param.shape) == 2 else 0.0)
