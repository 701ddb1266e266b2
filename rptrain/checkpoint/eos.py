"""The EOS ids of a model: the tokens that end an answer. config.json, generation_config.json and the tokenizer name
them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rptrain.models import registry
from rptrain.utils.errors import UserError

GENERATION = "generation_config.json"
KEY = "eos_token_id"


def eos_ids(model_dir: Path, config: Mapping[str, Any], tokenizer: Any) -> frozenset[int]:
    """All EOS ids of a model. `config`: its config.json. `tokenizer`: None if there is none.

    UserError if a file in `model_dir` has something else than ids as its eos_token_id.
    """
    own = (None if tokenizer is None else tokenizer.eos_token_id,)
    named = configured(config, model_dir), generation_eos(model_dir)
    return frozenset(token for ids in (*named, own) for token in ids if token is not None)


def configured(config: Mapping[str, Any], model_dir: Path) -> list[int]:
    """The EOS ids in the config.json of a model, or in the part of it that describes the text model."""
    return listed(registry.text_only(config).get(KEY), model_dir / "config.json")


def generation_eos(model_dir: Path) -> list[int]:
    """The EOS ids in a folder's generation_config.json; none if there is no such file."""
    file = model_dir / GENERATION
    return listed(registry.read_config(file).get(KEY), file) if file.is_file() else []


def listed(value: object, file: Path) -> list[int]:
    """The ids of an eos_token_id, which is an id, a list of ids or null. UserError for anything else in `file`."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if wrong := [one for one in ids if not isinstance(one, int) or isinstance(one, bool)]:
        raise UserError(f"{file}: {KEY} has {wrong[0]!r}: set it to a token id or a list of token ids")
    return list(dict.fromkeys(ids))
