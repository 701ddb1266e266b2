"""Llama 3 and models of its shape; Mistral, Qwen2 and Qwen3 build on the same block."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rptrain.models.families.config import Shape, read_flag, read_shape
from rptrain.models.families.decoder import attention, block, dense_unit, model
from rptrain.models.families.family import Family
from rptrain.models.layers.mlp import MLP
from rptrain.models.layers.norms import Norms
from rptrain.models.spec import ModelSpec

ARCHITECTURE = "LlamaForCausalLM"


def build(config: Mapping[str, Any]) -> ModelSpec:
    """The model of a Hugging Face config.json. Raises UserError if it needs unsupported features."""
    found: list[str] = []
    biases = read_flag(config, "attention_bias", found)
    shape = read_shape(config, unsupported=found, biases=biases)
    return decoder(ARCHITECTURE, config, shape, qkv_bias=biases, o_bias=biases)


@dataclass(frozen=True)
class Factors:
    """Factors in a decoder."""

    scores: float | None = None  # of attention; None: the head size to the power of -0.5
    embeddings: float = 1.0
    residual: float = 1.0  # of what attention and MLP add
    logits: float = 1.0


def decoder(
    architecture: str,
    config: Mapping[str, Any],
    shape: Shape,
    windows: Sequence[int | None] | None = None,
    rotaries: Sequence[int | None] | None = None,
    *,
    fused: bool = False,
    factors: Factors = Factors(),
    **form: bool,
) -> ModelSpec:
    """A decoder: embedding, blocks, norm and head.

    By layer, `windows` has the window, None for full attention, and `rotaries` the place of the rotary positions in
    `shape`, None for none. `fused`: checkpoints have one tensor of queries, keys and values, and one of gate and up.
    `form`: `pre_norms` and `post_norms` of blocks (models/layers/norms.py), and norms and biases of attention.
    """
    norms = Norms(shape.eps, form.pop("pre_norms", True), form.pop("post_norms", False))
    options: dict[str, Any] = {**form, "scale": factors.scores}
    mixers = [
        attention(shape, **options, window=window, rotary=rotary)
        for window, rotary in zip(windows or [None] * shape.layers, rotaries or [0] * shape.layers, strict=True)
    ]
    units = [dense_unit(shape, index, mixer, norms, fused=fused) for index, mixer in enumerate(mixers)]
    layers = [
        block(
            shape,
            index,
            mixer,
            MLP.of(shape.hidden, shape.intermediate),
            norms=norms,
            input_scale=1.0 if index else factors.embeddings,
            output_scale=factors.residual,
        )
        for index, mixer in enumerate(mixers)
    ]
    return model(architecture, config, shape, units, layers, logits_scale=factors.logits)


FAMILY = Family(ARCHITECTURE, "llama", build)
