"""Dropout's mask in plain PyTorch integers: the reference of kernels/dropout.py, with the same bits."""

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
ROUNDS = 7  # the fewest that pass every statistical test of the paper


def philox(counter: list[Tensor], key: list[Tensor], rounds: int = ROUNDS) -> list[Tensor]:
    """Philox4x32 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): 4 words of 32 bits, in int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high_0, low_0 = _multiply(c0, 0xD2511F53)
        high_2, low_2 = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high_2 ^ c1 ^ k0, low_2, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return [c0, c1, c2, c3]


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low words of a product, by halves of b: the whole would not fit into int64."""
    upper, lower = a * (b >> 16), a * (b & 0xFFFF)
    high = (upper + (lower >> 16)) >> 16
    return high, ((upper << 16) + lower) & MASK


def kept(
    tokens: int, width: int, numbers: Tensor, length: int, place: int, threshold: int, *, begin: int = 0
) -> Tensor:
    """Bool [tokens, width] of the tokens from `begin` on; the other arguments are those of kernels/dropout.py.

    An element takes about 30 bytes on the way.
    """
    groups = -(-width // 8)
    seed, step, first = numbers.unbind()
    token = torch.arange(begin, begin + tokens, device=numbers.device)[:, None]
    group = torch.arange(groups, device=numbers.device)
    at = ((token % length) * groups + group) & MASK
    sample = ((first + token // length) & MASK).expand_as(at)
    rest = [(step & MASK).expand_as(at), sample, torch.full_like(at, place)]
    words = torch.stack(philox([at, *rest], [seed & MASK, (seed >> 32) & MASK]), -1)
    halves = torch.stack((words & 0xFFFF, words >> 16), -1)
    return halves.flatten(1)[:, :width] < threshold


def dropout(x_TD: Tensor, mask_TD: Tensor, scale: float) -> Tensor:
    return torch.where(mask_TD, x_TD * scale, 0)
