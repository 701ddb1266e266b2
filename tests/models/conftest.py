"""Tiny random models, ours and Hugging Face's, and micro-batches for them."""

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rptrain.kernels.batch import MicroBatch
from rptrain.kernels.reference.dense import wide
from rptrain.models.families import registry
from rptrain.models.layers.rope import RotaryTables
from rptrain.models.locate import read_config
from rptrain.models.spec import ModelSpec
from rptrain.models.weights import pretrained
from tests.families import FAMILIES, VARIANTS

COMMON = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
CASES = {registry.MODEL_TYPES[kind]: cases for kind, cases in FAMILIES.items()}  # by architecture


class Native:
    """Our model in ordinary memory: flat buffers by unit, and a plain loop over its layers."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype):
        self.spec, self.dtype = spec, dtype
        self.params = [unit.views(torch.zeros(unit.numel, dtype=unit.dtype_in(dtype))) for unit in spec.units]
        self.grads = [
            unit.views(torch.zeros(unit.numel, dtype=wide(dtype))) if unit.trainable else {} for unit in spec.units
        ]

    def view(self, unit: int, name: str) -> Tensor:
        return self.params[unit][name]

    def of(self, layer: Any, buffers: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: tensor for unit in layer.units for name, tensor in buffers[unit].items()}

    def hidden(self, ids: Tensor, mb: MicroBatch, keep: bool = False) -> Tensor:
        """`keep`: by forward_saved, which autograd can follow: it writes over nothing that backward needs."""
        x = self.params[0]["embed"][ids]
        for layer in self.spec.layers:
            p = self.of(layer, self.params)
            x = layer.forward_saved(p, x, mb)[0] if keep else layer.forward(p, x, mb)
        return x

    def logits(self, ids: Tensor, mb: MicroBatch, keep: bool = False) -> Tensor:
        return self.spec.head.logits(self.of(self.spec.head, self.params), self.hidden(ids, mb, keep))

    def backward(self, ids: Tensor, mb: MicroBatch, scale: float = 1.0) -> Tensor:
        """The loss sum; fills `grads`."""
        x, saved = self.params[0]["embed"][ids], []
        for layer in self.spec.layers:
            x, kept = layer.forward_saved(self.of(layer, self.params), x, mb)
            saved.append(kept)
        head = self.spec.head
        loss, dx = head.loss_backward(self.of(head, self.params), self.of(head, self.grads), x, mb, scale)
        for layer, kept in zip(reversed(self.spec.layers), reversed(saved), strict=True):
            dx = layer.backward(self.of(layer, self.params), self.of(layer, self.grads), kept, dx, mb)
        if self.grads[0]:
            self.grads[0]["embed"].index_add_(0, ids, dx.to(wide(self.dtype)))
        return loss

    def gradients(self) -> dict[str, Tensor]:
        """By the checkpoint's names."""
        return self.tensors(self.grads)

    def tensors(self, buffers: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Views of buffers by unit, by the checkpoint's names."""
        return {
            part.key: piece
            for unit, tensors in zip(self.spec.units, buffers, strict=True)
            for param in unit.params
            if param.name in tensors
            for part, piece in zip(
                param.parts, tensors[param.name].split([part.rows for part in param.parts]), strict=True
            )
        }


@pytest.fixture
def native() -> Callable[..., Native]:
    def build(directory: Path, dtype: torch.dtype = torch.float32) -> Native:
        """The checkpoint in a directory."""
        model = Native(registry.build(read_config(directory)), dtype)
        pretrained.load(pretrained.check(directory, model.spec), model.spec, model.view)
        return model

    return build


@pytest.fixture
def fresh() -> Callable[..., Native]:
    def build(architecture: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Native:
        """Random weights, norms and biases included, without a checkpoint."""
        config = {**COMMON, "num_attention_heads": 4, "head_dim": 6, "architectures": [architecture]}
        model = Native(registry.build({**config, **CASES[architecture].layers, **settings}), dtype)
        pretrained.initialize(model.spec, model.view, seed=1)
        generator = torch.Generator().manual_seed(2)
        for unit, params in zip(model.spec.units, model.params, strict=True):
            for param in unit.params:
                if not param.std:
                    low = 0.5 if param.std is None else -0.5
                    params[param.name].uniform_(low, low + 1, generator=generator)
                if param.log_uniform is not None:  # so that delta nets do not forget at once
                    params[param.name].uniform_(-3, 0, generator=generator)
        return model

    return build


def make_micro_batch(
    spec: ModelSpec, documents: list[list[int]], labels: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> MicroBatch:
    """Each inner list is a row: the lengths of its documents."""
    flat = [length for row in documents for length in row]
    positions = torch.cat([torch.arange(length) for length in flat])
    return MicroBatch(
        sequences=len(documents),
        length=sum(documents[0]),
        positions=positions,
        labels=torch.full_like(positions, -100) if labels is None else labels,
        cu_seqlens=torch.tensor([0, *torch.tensor(flat).cumsum(0)], dtype=torch.int32),
        max_seqlen=max(flat),
        uniform=len({length for row in documents for length in row}) == 1,
        rotations=RotaryTables(spec.rotaries, wide(dtype), torch.device("cpu")).at(positions),
    )


def stored_bytes(files: pretrained.WeightFiles) -> int:
    """Of a checkpoint's tensors, by their shapes and types."""
    return sum(prod(stored.shape) * stored.dtype.itemsize for stored in files.tensors.values())


@pytest.fixture
def micro_batch() -> Callable[..., MicroBatch]:
    return make_micro_batch


@pytest.fixture(scope="session", params=VARIANTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A tiny random Hugging Face model in float32 and the directory where it is saved."""
    directory = tmp_path_factory.mktemp(request.param)
    return hugging_face(directory, **VARIANTS[request.param]), directory


def hugging_face(directory: Path, **changes: Any) -> Any:
    """A tiny random Hugging Face model in float32, which is saved to a directory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    settings = {**COMMON, **changes}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                low = 0.5 if parameter.any() else -0.5  # zero-centered ones are initialized to zeros
                parameter.uniform_(low, low + 1)
            if "bias" in name:
                parameter.uniform_(-0.5, 0.5)
            if name.endswith("A_log"):  # so that delta nets do not forget at once
                parameter.uniform_(-3, 0)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.uniform_(-0.2, 0.2)
    model.save_pretrained(directory)
    return model.eval()
