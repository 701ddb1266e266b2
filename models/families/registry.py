"""Lookup of models: from a name to files, and from a config.json to a ModelSpec."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from rptrain.models import families
from rptrain.models.families.family import Family
from rptrain.models.families.text_tower import TextTower
from rptrain.models.locate import read_config
from rptrain.models.spec import ModelSpec
from rptrain.models.weights.pretrained import embedding_is_head
from rptrain.utils.errors import UserError


def _declared(name: str) -> Iterator[Any]:
    """The values of this name in the modules of families/."""
    for found in iter_modules(families.__path__):
        module = import_module(f"{families.__name__}.{found.name}")
        if hasattr(module, name):
            yield getattr(module, name)


FAMILIES: Mapping[str, Family] = {family.architecture: family for family in _declared("FAMILY")}
TOWERS: Mapping[str, TextTower] = {tower.architecture: tower for tower in _declared("TOWER")}
MODEL_TYPES = {known.model_type: known.architecture for known in (*FAMILIES.values(), *TOWERS.values())}
OTHERS = ("Model", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


def build(config: Mapping[str, Any]) -> ModelSpec:
    """The model of a config.json, by `architectures` or else `model_type`. Raises UserError if it is unknown, or if the
    two name different models.
    """
    architecture = _architecture(config)
    kind = config.get("model_type")
    if kind and architecture in {**FAMILIES, **TOWERS} and architecture != MODEL_TYPES.get(str(kind)):
        raise UserError(
            f"config.json: architectures names {architecture}, but model_type {kind!r} names another model, which "
            "transformers would load: correct the wrong one"
        )
    if family := FAMILIES.get(architecture):
        return replace(family.build(config), has_experts=family.has_experts, mlp_modules=family.mlp_modules)
    if tower := TOWERS.get(architecture):
        return tower.wrap(build(tower.text_config(config)), config)
    problem = f"architecture {architecture!r} is not supported" if architecture else "no architecture named"
    nested = config.get("text_config")
    if "kv_lora_rank" in {**config, **(nested if isinstance(nested, Mapping) else {})}:
        problem += ", nor is its multi-head latent attention"
    raise UserError(f"config.json: {problem}; supported are {', '.join(sorted([*FAMILIES, *TOWERS]))}")


def text_only(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config.json of the text model alone; the same one if the model has no other parts."""
    tower = TOWERS.get(_architecture(config))
    return config if tower is None else tower.text_config(config, alone=True)


def model_config(directory: Path) -> Mapping[str, Any]:
    """The config.json of a directory with weights.

    For a model with a text model and other parts, it says whether the embedding is the head, as transformers decides:
    unless the config.json, or its class by default, says no, or the files have a head that differs. Raises UserError if
    the config.json is invalid.
    """
    config = read_config(directory)
    tower = TOWERS.get(_architecture(config))
    if tower is None or config.get("tie_word_embeddings", tower.tied) is not True:
        return config
    return {**config, "tie_word_embeddings": embedding_is_head(directory)}


def _architecture(config: Mapping[str, Any]) -> str:
    """The name of the architecture; empty if there is none. Of a model without a head, or with that of another task,
    it is the language model's, as for AutoModelForCausalLM.
    """
    kind = config.get("model_type")
    by_type = MODEL_TYPES.get(str(kind))
    named = config.get("architectures") or [by_type or kind]
    first = named[0] if isinstance(named, list) else named
    if by_type is not None and first in [f"{by_type.partition('For')[0]}{other}" for other in OTHERS]:
        return by_type
    return first if isinstance(first, str) else repr(first) if first else ""
