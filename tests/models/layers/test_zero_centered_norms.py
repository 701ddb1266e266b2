"""Zero-centered norms: against those of transformers, and in models against ordinary norms."""

import pytest
import torch
from torch import Tensor

from rptrain.kernels.fp8 import Form
from rptrain.models.decode.generate import generate
from rptrain.models.families import decoder
from rptrain.models.families.config import read_shape
from rptrain.models.layers.mlp import MLP
from rptrain.models.layers.norms import Norms
from rptrain.models.weights import pretrained
from tests.models.conftest import COMMON, Native

EPS = 1e-3
DOCUMENTS = [[5, 6], [11]]
Results = dict[str, Tensor]


def drawn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_and_gradients_are_those_of_transformers(dtype) -> None:
    """Values to the bit; gradients within the rounding of the model's type."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

    x, residual, dy = (drawn(37, 130, dtype=dtype, seed=seed) for seed in range(3))
    weight = drawn(130, dtype=dtype, seed=3)
    theirs = Qwen3_5RMSNorm(130, EPS).to(dtype)
    with torch.no_grad():
        theirs.weight.copy_(weight)
    total = (x + residual).requires_grad_()
    expected = theirs(total)
    expected.backward(dy)

    norms, grad = Norms(EPS, zero_centered=True), torch.zeros(130)
    saved, normed = norms.before(weight, x, residual, Form.PLAIN)
    y, _ = norms.after(weight, saved.x)
    assert normed.plain is not None and torch.equal(normed.plain, expected) and torch.equal(y, expected)
    torch.testing.assert_close(norms.after_backward(weight, grad, dy, saved), total.grad)
    torch.testing.assert_close(grad.to(dtype), theirs.weight.grad)
    dx = norms.before_backward(weight, grad, dy, saved, torch.zeros_like(x))
    torch.testing.assert_close(dx, total.grad)


@pytest.mark.parametrize(("pre", "post"), [(True, False), (False, True)])
def test_a_model_is_the_one_whose_norms_have_one_more(pre, post, micro_batch) -> None:
    """Logits, loss, every gradient and answers, in float64."""
    centered, ordinary = (model(Norms(EPS, pre, post, zero_centered)) for zero_centered in (True, False))
    assert centered.spec.num_parameters == ordinary.spec.num_parameters
    count = 0
    for unit, ours, theirs in zip(centered.spec.units, centered.params, ordinary.params, strict=True):
        for param in unit.params:
            if param.name.endswith("norm"):
                assert not ours[param.name].any() and (theirs[param.name] == 1).all() and not param.decay
                ours[param.name].uniform_(-0.5, 0.5, generator=torch.Generator().manual_seed(count))
                theirs[param.name].copy_(ours[param.name] + 1)
                count += 1
            else:
                assert torch.equal(ours[param.name], theirs[param.name])
    assert count == 5

    def results(native: Native) -> tuple[Results, list[list[int]]]:
        ids, labels = torch.arange(22), torch.arange(30, 52)
        mb = micro_batch(native.spec, DOCUMENTS, labels, torch.float64)
        found = {"logits": native.logits(ids, mb), "loss": native.backward(ids, mb)}
        for index, grads in enumerate(native.grads):
            found |= {f"{index} {name}": gradient for name, gradient in grads.items()}
        return found, generate(native.spec, native.params.__getitem__, [[1, 2, 3], [4]], 5)

    (found, answers), (expected, same) = results(centered), results(ordinary)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert answers == same


def model(norms: Norms) -> Native:
    """A model of two blocks with these norms and a last one of their kind."""
    config = {**COMMON, "num_attention_heads": 4, "head_dim": 6, "tie_word_embeddings": False, "rms_norm_eps": EPS}
    shape = read_shape(config)
    attention, mlp = decoder.attention(shape), MLP.of(shape.hidden, shape.intermediate)
    units = [decoder.dense_unit(shape, index, attention, norms) for index in range(shape.layers)]
    layers = [decoder.block(shape, index, attention, mlp, norms=norms) for index in range(shape.layers)]
    spec = decoder.model("Normed", config, shape, units, layers, zero_centered=norms.zero_centered)
    native = Native(spec, torch.float64)
    pretrained.initialize(spec, native.view, seed=1)
    return native
