"""Lookup of models: from a name to files, and from a config.json to a ModelSpec."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rptrain.models import (
    glm4_moe,
    gpt_oss,
    granite,
    llama,
    minimax_m2,
    ministral3,
    mistral,
    mistral3,
    olmo3,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    seed_oss,
    smollm3,
)
from rptrain.models.spec import ModelSpec
from rptrain.models.text_tower import TextTower
from rptrain.utils.errors import UserError
from rptrain.utils.files import read_small, read_small_text
from rptrain.utils.objects import unique_keys
from rptrain.utils.paths import expanded, from_environment
from rptrain.utils.suggest import nearest
from rptrain.utils.text import quoted

BUILDERS: Mapping[str, Callable[[Mapping[str, Any]], ModelSpec]] = {
    "LlamaForCausalLM": llama.build,
    mistral.ARCHITECTURE: mistral.build,
    qwen2.ARCHITECTURE: qwen2.build,
    "Qwen3ForCausalLM": qwen3.build,
    qwen3_moe.ARCHITECTURE: qwen3_moe.build,
    gpt_oss.ARCHITECTURE: gpt_oss.build,
    glm4_moe.ARCHITECTURE: glm4_moe.build,
    granite.ARCHITECTURE: granite.build,
    minimax_m2.ARCHITECTURE: minimax_m2.build,
    ministral3.ARCHITECTURE: ministral3.build,
    olmo3.ARCHITECTURE: olmo3.build,
    phi3.ARCHITECTURE: phi3.build,
    seed_oss.ARCHITECTURE: seed_oss.build,
    smollm3.ARCHITECTURE: smollm3.build,
}
MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": mistral.ARCHITECTURE,
    "qwen2": qwen2.ARCHITECTURE,
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": qwen3_moe.ARCHITECTURE,
    "gpt_oss": gpt_oss.ARCHITECTURE,
    "glm4_moe": glm4_moe.ARCHITECTURE,
    "granite": granite.ARCHITECTURE,
    "minimax_m2": minimax_m2.ARCHITECTURE,
    "ministral3": ministral3.ARCHITECTURE,
    "olmo3": olmo3.ARCHITECTURE,
    "phi3": phi3.ARCHITECTURE,
    "seed_oss": seed_oss.ARCHITECTURE,
    "smollm3": smollm3.ARCHITECTURE,
    "mistral3": mistral3.TOWER.architecture,
}
OTHERS = ("Model", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
TOWERS: Mapping[str, TextTower] = {tower.architecture: tower for tower in (mistral3.TOWER,)}
PRESETS = Path(__file__).parent / "presets"


def presets() -> list[str]:
    """Names of the bundled presets."""
    return sorted(path.parent.name for path in PRESETS.glob("*/config.json"))


def locate(model_path: str) -> Path:
    """The directory of a model: a local one, a bundled preset, or a hub id that the local cache holds.

    Nothing is downloaded. Raises UserError, with the presets and the nearest name, if nothing is found.
    """
    directory = expanded(model_path)
    if model_path and os.path.isfile(directory / "config.json"):
        return directory
    if model_path in presets():
        return PRESETS / model_path
    cached = _cached(model_path)
    if cached is not None:
        return cached
    if model_path and os.path.isdir(directory):
        raise UserError(f"{directory} is not a model directory: it has no config.json")
    near = nearest(model_path.rsplit("/", 1)[-1].lower(), presets())
    raise UserError(
        f"no model {quoted(repr(model_path))}: it is neither a directory, nor a preset ({', '.join(presets())}), "
        f"nor in the hub cache {_hub_cache()}, and nothing is downloaded."
        + (f" Did you mean {near[0]!r}?" if near else "")
    )


def read_config(path: str | Path) -> dict[str, Any]:
    """The content of config.json in a model directory, or of the file itself. Raises UserError if it is invalid."""
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(read_small_text(file), object_pairs_hook=unique_keys)
    except UserError:  # a ValueError, too
        raise
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{file} must hold a JSON object, not a {type(config).__name__}")
    return config


def build(config: Mapping[str, Any]) -> ModelSpec:
    """The model of a config.json, by `architectures` or else `model_type`. Raises UserError if it is unknown, or if the
    two name different models.
    """
    architecture = _architecture(config)
    kind = config.get("model_type")
    if kind and architecture in {**BUILDERS, **TOWERS} and architecture != MODEL_TYPES.get(str(kind)):
        raise UserError(
            f"config.json: architectures names {architecture}, but model_type {kind!r} names another model, which "
            "transformers would load: correct the wrong one"
        )
    if architecture in BUILDERS:
        return BUILDERS[architecture](config)
    if architecture in TOWERS:
        tower = TOWERS[architecture]
        return tower.wrap(build(tower.text_config(config)), config)
    problem = f"architecture {architecture!r} is not supported" if architecture else "no architecture named"
    nested = config.get("text_config")
    if "kv_lora_rank" in {**config, **(nested if isinstance(nested, Mapping) else {})}:
        problem += ", nor is its multi-head latent attention"
    raise UserError(f"config.json: {problem}; supported are {', '.join(sorted([*BUILDERS, *TOWERS]))}")


def text_only(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config.json of the text model alone; the same one if the model has no other parts."""
    tower = TOWERS.get(_architecture(config))
    return config if tower is None else tower.text_config(config, alone=True)


def has_other_parts(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a model with a text model and other parts."""
    return _architecture(config) in TOWERS


def _architecture(config: Mapping[str, Any]) -> str:
    """The name of the architecture; empty if there is none. Of a model without a head, or with that of another task,
    it is the language model's, as for AutoModelForCausalLM.
    """
    by_type = MODEL_TYPES.get(str(config.get("model_type")), config.get("model_type"))
    named = config.get("architectures") or [by_type]
    first = named[0] if isinstance(named, list) else named
    if by_type in {**BUILDERS, **TOWERS} and first in [f"{by_type.partition('For')[0]}{other}" for other in OTHERS]:
        return by_type
    return first if isinstance(first, str) else repr(first) if first else ""


def cached() -> list[tuple[str, Path]]:
    """The models in the hub's cache: ids and directories."""
    found = []
    for repository in sorted(_hub_cache().glob("models--*--*")):
        hub_id = repository.name.removeprefix("models--").replace("--", "/", 1)
        if (directory := _cached(hub_id)) is not None:
            found.append((hub_id, directory))
    return found


def _hub_cache() -> Path:
    if explicit := os.environ.get("HF_HUB_CACHE"):
        return expanded(explicit, "HF_HUB_CACHE")
    if home := os.environ.get("HF_HOME"):
        return expanded(home, "HF_HOME") / "hub"
    return from_environment("XDG_CACHE_HOME", "~/.cache") / "huggingface" / "hub"


def _cached(hub_id: str) -> Path | None:
    """The snapshot of `main`, or otherwise the newest one with a config.json."""
    if hub_id.count("/") != 1 or ".." in hub_id or hub_id.startswith("/"):
        return None
    repository = _hub_cache() / f"models--{hub_id.replace('/', '--')}"
    snapshots = sorted(
        (config.parent for config in repository.glob("snapshots/*/config.json")),
        key=lambda path: path.stat().st_mtime,
    )
    main = repository / "refs" / "main"
    if main.is_file():
        commit = read_small(main).decode(errors="replace").strip()
        snapshots += [path for path in snapshots if path.name == commit]
    return snapshots[-1] if snapshots else None
