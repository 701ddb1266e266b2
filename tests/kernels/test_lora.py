"""The generator's published vectors, the mask's bits, and adapters against autograd."""

import pytest
import torch
from torch import Tensor

from rptrain.kernels import dropout as kernels
from rptrain.kernels.dropout import Dropout, add_dropout, dropout
from rptrain.kernels.lora import add_lora, lora_backward_input, lora_backward_weights
from rptrain.kernels.reference import dropout as reference
from tests.kernels.exact import close, dtypes, no_worse, random

from .autograd import AddLoRA

SEED = (7 << 32) + 5


def drop(p: float = 0.25, device: str = "cpu", length: int = 4, **changes: int) -> Dropout:
    where = {"seed": SEED, "step": 3, "sample": 11, "layer": 2, "place": 1} | changes
    numbers = torch.tensor([where["seed"], where["step"], where["sample"]], device=device)
    return Dropout(p, numbers, length, where["layer"], where["place"])


@pytest.mark.parametrize(
    ("rounds", "word", "expected"),
    [
        (7, 0x00000000, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        (7, 0xFFFFFFFF, "5207ddc2 45165e59 4d8ee751 8c52f662"),
        (10, 0x00000000, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (10, 0xFFFFFFFF, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ],
)
def test_philox_gives_the_known_answers(rounds, word, expected) -> None:
    """Those that the authors publish with Random123, counter and key all `word`."""
    words = [torch.tensor(word)] * 6
    found = reference.philox(words[:4], words[4:], rounds)
    assert " ".join(f"{each.item():08x}" for each in found) == expected


@pytest.mark.sample(4)
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (9, 24), (6, 2051)])
@pytest.mark.parametrize("p", [0.0, 0.25, 0.9])
def test_the_kernel_draws_the_bits_of_the_reference(tokens, width, p, device) -> None:
    where = drop(p, device)
    ours = kernels.dropout_triton(torch.ones(tokens, width, device=device), where)
    mask = reference.kept(tokens, width, where.numbers, where.length, where.number, where.threshold)
    assert torch.equal(ours != 0, mask)
    assert torch.equal(ours, torch.where(mask, torch.tensor(where.scale, device=device), 0))


@pytest.mark.parametrize("p", [0.05, 0.5])
def test_the_share_of_zeros_and_the_mean(p) -> None:
    ours = dropout(torch.ones(64, 4096), drop(p))
    assert (ours == 0).float().mean().item() == pytest.approx(p, abs=0.005)
    assert ours.mean().item() == pytest.approx(1, abs=0.02)


CHANGES = [{"seed": SEED + 1}, {"seed": SEED + (1 << 32)}, {"step": 4}, {"sample": 12}, {"layer": 3}, {"place": 2}]


@pytest.mark.parametrize("change", CHANGES)
def test_every_number_changes_the_mask(change) -> None:
    x = torch.ones(4, 512)
    same = (dropout(x, drop(0.5)) == dropout(x, drop(0.5, **change))).float().mean().item()
    assert same == pytest.approx(0.5, abs=0.06)


def test_a_sample_has_its_mask_in_any_micro_batch(device) -> None:
    x = torch.ones(12, 40, device=device)
    whole = kernels.dropout_triton(x, drop(0.5, device))
    assert not torch.equal(whole[:4], whole[4:8])
    assert torch.equal(kernels.dropout_triton(x[:8], drop(0.5, device, sample=12)), whole[4:])


def test_parts_are_those_of_the_whole(monkeypatch) -> None:
    """Parts end within samples, and a row may be longer than one."""
    x, where = random((11, 70), torch.float32, "cpu"), drop(0.3)
    mask = reference.kept(11, 70, where.numbers, where.length, where.number, where.threshold)
    whole = reference.dropout(x, mask, where.scale)
    for size in (200, 30):
        monkeypatch.setattr(kernels, "PART", size)
        assert torch.equal(dropout(x, where), whole)
        assert torch.equal(add_dropout(x.clone(), x, where), x + whole)


@dtypes
def test_values(dtype, device) -> None:
    x, out, where = random((5, 70), dtype, device), random((5, 70), dtype, device, 1), drop(0.3, device)
    exact = dropout(x.double(), where)
    no_worse(kernels.dropout_triton(x, where), dropout(x.cpu(), drop(0.3)).to(device), exact)
    added = kernels.add_dropout_triton(out.clone(), x, where)
    no_worse(added, (out.double() + exact).to(dtype), out.double() + exact)
    close(add_dropout(out.double(), x.double(), where), out.double() + exact)


FORMS = [((3,), (4,), (2,)), ((2, 0, 5), (2, 1, 3), (1, 4, 2)), ((0,), (8,), (1,))]  # starts, widths, ranks
forms = pytest.mark.parametrize(("starts", "widths", "ranks"), FORMS)


def adapters(widths, ranks, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    x, y, dy = (random((9, size), dtype, "cpu", seed) for seed, size in enumerate((6, 8, 8)))
    b = [random((width, rank), dtype, "cpu", rank) for width, rank in zip(widths, ranks, strict=True)]
    return x, y, dy, random((sum(ranks), 6), dtype, "cpu", 9), b


def expected(y: Tensor, x: Tensor, a: Tensor, b: list[Tensor], starts, mask: Tensor, factor: float) -> Tensor:
    """One adapter after the other, as it is defined."""
    first, y = 0, y.clone()
    for weight, start in zip(b, starts, strict=True):
        outer, rank = weight.shape
        y[:, start : start + outer] += 0.7 * (x * mask * factor) @ a[first : first + rank].T @ weight.T
        first += rank
    return y


@pytest.mark.sample(6)
@forms
@pytest.mark.parametrize("p", [None, 0.4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_forward_and_every_gradient(starts, widths, ranks, p, dtype) -> None:
    x, y, dy, a, b = adapters(widths, ranks, dtype)
    where = None if p is None else drop(p)
    mask = torch.ones(9, 6) if where is None else dropout(torch.ones(9, 6), where) != 0
    leaves = [tensor.double().requires_grad_() for tensor in (x, a, *b)]
    exact = expected(y.double(), leaves[0], leaves[1], leaves[2:], starts, mask, where.scale if where else 1)
    exact.backward(dy.double())

    tolerance = 0.04 if dtype == torch.bfloat16 else 1e-5
    ours = y.clone()
    add_lora(ours, x, a, b, starts, 0.7, where)
    dx = torch.ones_like(x)
    sums = [torch.ones_like(weight, dtype=torch.promote_types(dtype, torch.float32)) for weight in (a, *b)]
    dh = lora_backward_input(dy, a, b, starts, 0.7, where, dx)
    lora_backward_weights(dy, dh, x, a, starts, 0.7, where, sums[0], sums[1:])
    found = [(ours, exact), *((grad - 1, leaf.grad) for grad, leaf in zip((dx, *sums), leaves, strict=True))]
    for mine, theirs in found:
        assert theirs is not None
        assert (mine.double() - theirs).abs().max() <= tolerance * max(theirs.abs().max().item(), 1)


def test_autograd_function() -> None:
    (starts, widths, ranks), where = FORMS[1], drop(0.4)
    x, y, _, a, b = adapters(widths, ranks, torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (y, x, a, *b)]
    assert torch.autograd.gradcheck(lambda y, x, a, *b: AddLoRA.apply(y, x, a, starts, 0.7, where, *b), leaves)
