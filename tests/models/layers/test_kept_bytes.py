"""What a block keeps for backward: the bytes that are planned are those of the tensors that it keeps."""

from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_leaves

from rptrain.models.families import registry
from rptrain.models.layers.delta_net import DeltaNet
from rptrain.models.transforms.balance import balanced
from rptrain.models.transforms.fp8 import with_fp8
from rptrain.models.transforms.freeze import freeze
from rptrain.models.transforms.half_sums import with_half_sums
from rptrain.models.transforms.lora import LoRA, with_lora
from rptrain.utils.errors import UserError

EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
FP8_SIZES = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "moe_intermediate_size": 16}
TRANSFORMS = {
    "none": lambda spec: spec,
    "freeze": lambda spec: freeze(spec, ["model.layers.0.*"]),
    "lora": lambda spec: with_lora(spec, LoRA(r=3)),
    "dropout": lambda spec: with_lora(spec, LoRA(r=3, lora_dropout=0.3)),
    "dora": lambda spec: with_lora(spec, LoRA(r=3, use_dora=True)),
    "experts": lambda spec: with_lora(spec, LoRA(r=3, target_parameters=EXPERTS)),
    "balance": lambda spec: balanced(spec, 0.01),
    "half sums": with_half_sums,  # of 16-bit types, whose scales only GPUs keep
    "fp8": with_fp8,
    "fp8, lora": lambda spec: with_fp8(with_lora(spec, LoRA(r=3, target_modules=r".*(q|qkv|o)_proj"))),
    "fp8, dora": lambda spec: with_fp8(with_lora(spec, LoRA(r=3, use_dora=True))),
    "fp8, experts": lambda spec: with_fp8(with_lora(spec, LoRA(r=3, target_parameters=EXPERTS))),
}
WITH_EXPERTS_ALONE = ("experts", "balance", "fp8, experts")
TOKENS = 22


@pytest.mark.parametrize("architecture", registry.FAMILIES)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_kept_bytes_are_those_of_the_kept_tensors(transform, architecture, fresh, micro_batch) -> None:
    spec = fresh(architecture, **(FP8_SIZES if "fp8" in transform else {})).spec
    if transform in WITH_EXPERTS_ALONE and not spec.has_experts:
        with pytest.raises(UserError, match="this model has no"):
            TRANSFORMS[transform](spec)
        return
    assert_kept_bytes(spec, transform, micro_batch)


def assert_kept_bytes(spec, transform, micro_batch) -> None:
    """With the transform of this name."""
    spec, dtype = TRANSFORMS[transform](spec), torch.float32 if transform == "half sums" else torch.bfloat16
    generator = torch.Generator().manual_seed(1)
    mb = micro_batch(spec, [[5, 6], [11]], torch.ones(TOKENS, dtype=torch.int64), dtype)
    mb = replace(mb, sample=torch.tensor([7, 3, 0]))
    x = torch.randn(TOKENS, spec.hidden_size, generator=generator).to(dtype)
    for layer in spec.layers:
        p = parameters(spec, layer, dtype, generator)
        planned = layer.kept_bytes(TOKENS, dtype.itemsize)
        if isinstance(layer.mixer, DeltaNet):  # only kernels keep these
            planned -= layer.mixer.rule_kept_bytes(TOKENS, dtype.itemsize)
        for saved in (layer.forward_saved(p, x, mb)[1], layer.recompute(p, x, mb)):
            assert storage_bytes((saved, x)) == planned, layer.name


def parameters(spec, layer, dtype, generator) -> dict:
    """Random ones of a layer, in FP8 where it reads them so."""
    found = {}
    for unit in (spec.units[index] for index in layer.units):
        found |= unit.views(torch.randn(unit.numel, generator=generator).mul_(0.2).to(unit.dtype_in(dtype)))
        for param in unit.in_fp8:
            weight = param.fp8_view(torch.empty(param.fp8_bytes(columns=True), dtype=torch.uint8), columns=True)
            weight.write(found[param.name])
            found[param.name] = weight
    return found


def storage_bytes(tensors) -> int:
    leaves = (leaf for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor))
    return sum({leaf.untyped_storage().data_ptr(): leaf.untyped_storage().nbytes() for leaf in leaves}.values())
