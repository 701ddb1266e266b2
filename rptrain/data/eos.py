"""The EOS ids of a model: the tokens that end an answer. config.json, generation_config.json and the tokenizer name
them, and training may add others: the tokens that end replies in its data.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from rptrain.models.base_files import GENERATION
from rptrain.models.families import registry
from rptrain.models.locate import read_config
from rptrain.utils.errors import UserError
from rptrain.utils.text import one_line

KEY = "eos_token_id"
FROM_CONFIG = "_from_model_config"  # true: the file repeats config.json, which transformers 4 may then use instead


def eos_ids(model_dir: Path, config: Mapping[str, Any], tokenizer: Any) -> frozenset[int]:
    """All EOS ids of a model. `config`: its config.json. `tokenizer`: None if there is none.

    UserError if a file in `model_dir` has something else than ids as its eos_token_id.
    """
    own = () if tokenizer is None else (tokenizer.eos_token_id,)
    named = (*configured(config, model_dir), *generation_eos(model_dir), *own)
    return frozenset(token for token in named if token is not None)


def configured(config: Mapping[str, Any], model_dir: Path) -> list[int]:
    """The EOS ids in the config.json of a model, or in the part of it that describes the text model."""
    return listed(registry.text_only(config).get(KEY), model_dir / "config.json")


def generation_eos(model_dir: Path) -> list[int]:
    """The EOS ids in a folder's generation_config.json; none if there is no such file."""
    file = model_dir / GENERATION
    return listed(read_config(file).get(KEY), file) if file.is_file() else []


def listed(value: object, file: Path) -> list[int]:
    """The ids of an eos_token_id, which is an id, a list of ids or null. UserError for anything else in `file`."""
    ids: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    if wrong := [one for one in ids if not isinstance(one, int) or isinstance(one, bool)]:
        raise UserError(f"{file}: {KEY} has {wrong[0]!r}: set it to a token id or a list of token ids")
    return list(dict.fromkeys(ids))


def stops(model_dir: Path, config: Mapping[str, Any]) -> list[int]:
    """The ids on which `generate` of transformers stops: those of generation_config.json, or without that file those
    of config.json.
    """
    return generation_eos(model_dir) if (model_dir / GENERATION).is_file() else configured(config, model_dir)


def added(ends: Iterable[int], stops: Collection[int], tokenizer: Any) -> tuple[int, ...]:
    """The ids that the generation_config.json of a trained model has to list besides `stops`: `ends`, which end replies
    in the data, and the EOS of the tokenizer, which ends texts.
    """
    known = {None, *stops}
    return tuple(token for token in dict.fromkeys((*ends, tokenizer.eos_token_id)) if token not in known)


def sentence(ends: Collection[int], tokenizer: Any) -> str:
    """What a plan and the log of a run say about `ends`: tokens that end replies in the data, but no EOS ids."""
    names = " or ".join(one_line(str(tokenizer.convert_ids_to_tokens(token))) for token in ends)
    are, them = ("is not an EOS token", "it") if len(ends) == 1 else ("are not EOS tokens", "them")
    return (
        f"replies end with {names}, which {are} of the model: the export's {GENERATION} will list {them}, and generate "
        f"and chat stop on {them}"
    )


def generation_config(model_dir: Path, config: Mapping[str, Any], ends: Collection[int]) -> dict[str, bytes]:
    """The generation_config.json of a model with `ends` after its own EOS ids, by name; empty without `ends`."""
    if not ends:
        return {}
    file = model_dir / GENERATION
    content = read_config(file) if file.is_file() else special_tokens(config)
    content = {key: value for key, value in content.items() if key != FROM_CONFIG}
    own = generation_eos(model_dir) or configured(config, model_dir)
    return {GENERATION: json.dumps(content | {KEY: list(dict.fromkeys((*own, *ends)))}, indent=2).encode()}


def special_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """The ids of special tokens in a config.json, which a generation_config.json has too."""
    config = registry.text_only(config)
    keys = ("bos_token_id", KEY, "pad_token_id")
    return {key: config[key] for key in keys if config.get(key) is not None}
