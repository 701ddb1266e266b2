"""Inputs of a gated delta net's operations: views of a product's output, in both of its layouts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.kernels.exact import random


@dataclass(frozen=True)
class Sizes:
    """K key heads of C columns, r value heads of V columns for each, and the width of the convolution."""

    heads: int
    repeat: int
    columns: int
    values: int
    width: int

    @property
    def channels(self) -> int:
        return self.heads * (2 * self.columns + self.repeat * self.values)


def views(product: Tensor, sizes: Sizes, by_head: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and z [T, K, C or r V] of a product's output, with its columns by key head or by kind."""
    values = sizes.repeat * sizes.values
    parts = [sizes.columns, sizes.columns, values, values]
    if by_head:
        q, k, v, z = product.unflatten(1, (sizes.heads, sum(parts))).split(parts, -1)
    else:
        split = product.split([sizes.heads * part for part in parts], 1)
        q, k, v, z = (x.unflatten(1, (sizes.heads, part)) for x, part in zip(split, parts, strict=True))
    return q, k, v, z


def product(tokens: int, sizes: Sizes, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    columns = 2 * sizes.heads * (sizes.columns + sizes.repeat * sizes.values)
    return random((tokens, columns), dtype, device, seed)


def positions_of(documents: list[int], device: str) -> Tensor:
    return torch.cat([torch.arange(length) for length in documents]).to(device)
