"""Models of which some parameters that are trained have a type of their own: GPT-OSS with sinks in float32."""

from dataclasses import replace

import torch

from rptrain.models.families import registry
from rptrain.models.layers.block import blocks
from rptrain.models.params import Unit

SINKS = "GptOssForCausalLM"


def with_own_sinks(spec):
    """The model with the sinks of each layer in a unit of their own, `layers.N.sinks`, in float32."""
    units, layers = list(spec.units), []
    for block in blocks(spec):
        (first, *others) = block.units
        (sinks,) = (param for param in units[first].params if param.name == "sinks")
        units[first] = replace(units[first], params=tuple(p for p in units[first].params if p is not sinks))
        layers.append(replace(block, units=(first, *others, len(units))))
        units.append(Unit(f"{block.name}.sinks", (replace(sinks, dtype=torch.float32),)))
    return replace(spec, units=tuple(units), layers=tuple(layers))


def use_own_sinks(monkeypatch):
    """Builds every GPT-OSS as `with_own_sinks` does."""
    family = registry.FAMILIES[SINKS]
    own = replace(family, build=lambda config: with_own_sinks(family.build(config)))
    monkeypatch.setattr(registry, "FAMILIES", {**registry.FAMILIES, SINKS: own})


def sinks(units):
    """The states of the units with sinks, of a store's or a checkpoint's units."""
    return [state for state in units if state.unit.name.endswith(".sinks")]
