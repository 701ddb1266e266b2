"""Specifications of models: their units, layers and head."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from rptrain.models.layer import HeadLayer, Layer, LayerShape, Rotary
from rptrain.models.params import Unit


@dataclass(frozen=True)
class ModelShape:
    """The shape of a model, which is sufficient for planning.

    units[0] is the embedding table, on the host; its parameter is named `embed`.

    `layers` are the blocks in order; `head` comes after them. `config` is the checkpoint's config.json. Parts of
    parameters are named by transformers' modules.
    """

    architecture: str
    config: Mapping[str, Any]
    units: tuple[Unit, ...]
    layers: tuple[LayerShape, ...]
    head: LayerShape
    rotaries: tuple[Rotary, ...]  # which layers name by their places
    hidden_size: int
    vocab_size: int
    tied: bool
    padding_row: int | None = None  # of the embedding; look-ups add nothing to its gradient. Read from pad_token_id
    carried: tuple[str, ...] = ()  # patterns of tensors of its checkpoints that training leaves out
    has_experts: bool = False  # whether its class has experts, for transformers and PEFT: even if all layers are dense
    mlp_modules: bool = False  # whether PEFT finds MLPs' modules by their names although the class has experts
    stored_prefixes: tuple[tuple[str, str], ...] = ()  # each of module names, and that of checkpoints
    read_prefixes: tuple[tuple[str, str], ...] = ()  # likewise, of checkpoints that are read, but not written
    narrow: tuple[str, ...] = ()  # tensors that its files have in fewer bytes than their parameters' own types

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The part of `config` that describes the text model: all of it, unless the model has other parts."""
        return self.config["text_config"] if self.stored_prefixes else self.config

    def module_name(self, name: str) -> str:
        """The name among modules, which is used everywhere else, of a tensor in a checkpoint."""
        for module, stored in (*self.stored_prefixes, *self.read_prefixes):
            if name.startswith(stored):
                return module + name.removeprefix(stored)
        return name

    def stored_name(self, name: str) -> str:
        """The name in checkpoints that are written, of a tensor's name among modules."""
        for module, stored in self.stored_prefixes:
            if name.startswith(module):
                return stored + name.removeprefix(module)
        return name

    def carries(self, name: str) -> bool:
        """Whether training leaves out a checkpoint's tensor of this name."""
        name = self.module_name(name)
        names = (name, f"model.{name}")  # which transformers adds
        return any(fnmatchcase(one, pattern) for one in names for pattern in self.carried)

    @property
    def stack(self) -> tuple[LayerShape, ...]:
        """Every layer that runs on a device, the head last."""
        return (*self.layers, self.head)

    def trained(self, units: Iterable[int]) -> tuple[int, ...]:
        """The trainable ones among these units."""
        return tuple(unit for unit in units if self.units[unit].trainable)

    @property
    def frozen(self) -> tuple[int, ...]:
        """The units that are not trainable."""
        return tuple(index for index, unit in enumerate(self.units) if not unit.trainable)

    @property
    def num_parameters(self) -> int:
        return sum(param.numel for unit in self.units for param in unit.params)

    @property
    def num_trainable(self) -> int:
        """The parameters that are trained."""
        return sum(param.numel for unit in self.units if unit.trainable for param in unit.params)

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the weights in a model of this type, dequantized."""
        return sum(param.numel * param.dtype_in(dtype).itemsize for unit in self.units for param in unit.params)


@dataclass(frozen=True)
class ModelSpec(ModelShape):
    """A model whose layers compute."""

    layers: tuple[Layer, ...]
    head: HeadLayer
    router_aux_loss_coef: float = 0.0  # models/transforms/balance.py

    @property
    def stack(self) -> tuple[Layer | HeadLayer, ...]:
        return (*self.layers, self.head)
