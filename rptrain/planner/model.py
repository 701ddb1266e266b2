"""The model that a config trains: where its files are, what of it is frozen, and which adapters it has."""

from pathlib import Path

from rptrain.config.schema import Config, Lora
from rptrain.models import registry
from rptrain.models.adapters.freeze import freeze
from rptrain.models.adapters.lora import LoRA, with_lora
from rptrain.models.layers.balance import balanced
from rptrain.models.spec import ModelSpec
from rptrain.models.weights.quantized import with_base


def training_model(config: Config) -> tuple[Path, ModelSpec]:
    """Its directory and its spec. UserError where there is none, or a key of [train] or [lora] does not go with it."""
    model_dir = registry.locate(config.model.path)
    spec = balanced(registry.build(registry.read_config(model_dir)), config.train.router_aux_loss_coef)
    if config.adapters is not None:
        return model_dir, with_base(with_lora(spec, lora_settings(config.adapters)), config.adapters.base_format)
    return model_dir, freeze(spec, config.train.freeze)


def lora_settings(lora: Lora) -> LoRA:
    """Those of the table, without where an adapter comes from and how the base is held."""
    return LoRA(**lora.model_dump(exclude={"adapter", "base", "double_quant"}))
