"""Experts in MXFP4 checkpoints, as GPT-OSS is published: names, shapes and dequantization.

A parameter KEY [E, in, out] is stored as KEY_blocks, bytes [E, out, in / 32, 16] of two elements each, and KEY_scales,
bytes [E, out, in / 32].
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from rptrain.kernels.quant import MXFP4, dequantize
from rptrain.models.weights.safetensors_io import Stored, read_here

DTYPE = torch.uint8  # suffixes of both tensors
ROWS = 256  # rows that a thread reads and dequantizes at a time


def names(key: str) -> tuple[str, str]:
    """Names of the blocks and of the scales."""
    return f"{key}_blocks", f"{key}_scales"


def shapes(key: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Shapes of the two tensors, by name, of a parameter [E, in, out]."""
    experts, inner, outer = shape
    scales = (experts, outer, ceil(inner / MXFP4.block))
    return dict(zip(names(key), ((*scales, MXFP4.code_bytes(MXFP4.block)), scales), strict=True))


def of(key: str, stored: Mapping[str, Stored]) -> tuple[Stored, Stored]:
    """The two tensors of a parameter."""
    blocks, scales = names(key)
    return stored[blocks], stored[scales]


class ExpertRows(NamedTuple):
    """Some stored rows of one expert, and the columns [in, rows] that they fill."""

    blocks: Stored
    scales: Stored
    target: Tensor


def pieces(blocks: Stored, scales: Stored, target: Tensor) -> Iterator[ExpertRows]:
    """All pieces of a parameter [E, in, out]."""
    _, outer, width, _ = blocks.shape
    for expert, place in enumerate(target):
        for begin in range(0, outer, ROWS):
            rows = min(ROWS, outer - begin)
            start = (expert * outer + begin) * width
            codes = replace(
                blocks, offset=blocks.offset + start * blocks.shape[3], shape=(rows * width * blocks.shape[3],)
            )
            exponents = replace(scales, offset=scales.offset + start, shape=(rows * width,))
            yield ExpertRows(codes, exponents, place[:, begin : begin + rows])


def load(piece: ExpertRows) -> None:
    """Reads and dequantizes a piece in the calling thread."""
    codes, exponents = (torch.empty(part.shape, dtype=DTYPE) for part in piece[:2])
    read_here(piece.blocks, codes)
    read_here(piece.scales, exponents)
    inner, rows = piece.target.shape
    dequantized = torch.empty(rows, exponents.numel() // rows * MXFP4.block, dtype=piece.target.dtype)
    piece.target.copy_(
        dequantize(codes, exponents, MXFP4, dequantized)[:, :inner].T
    )  # the last block of a row may be longer
