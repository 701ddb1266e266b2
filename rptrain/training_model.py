"""The model that a config trains: where its files are, and what of it is frozen."""

from pathlib import Path

from rptrain.config import Config
from rptrain.models import registry
from rptrain.models.freeze import freeze
from rptrain.models.spec import ModelSpec


def training_model(config: Config) -> tuple[Path, ModelSpec]:
    """Its directory and its spec. UserError where there is none, or train.freeze does not go with it."""
    model_dir = registry.locate(config.model.path)
    return model_dir, freeze(registry.build(registry.read_config(model_dir)), config.train.freeze)
