"""The files of a base model that every checkpoint and export includes: all but the weights."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rptrain.utils.errors import UserError
from rptrain.utils.files import check_size, open_regular, read_small
from rptrain.utils.objects import check_keys
from rptrain.utils.paths import leads_out

BASE = "base"  # the folder in a checkpoint
MAX_FILE = 512 << 20  # bytes: more than a tokenizer has
TEMPLATE = "chat_template.jinja"
PROCESSORS = ("processor_config.json", "preprocessor_config.json")  # of models with more than a text model
# The files that are copied, by name.
PARSED = (
    "config.json",
    "generation_config.json",
    *PROCESSORS,
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer.model.v*",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.tiktoken",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
# Nothing else reads these, so they may hold anything: they are not copied from outside of the model's folder.
LICENSES = ("LICENSE*", "NOTICE*")
# The JSON files that transformers reads, but for vocabularies, which are large.
SETTINGS = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def base_files(model_dir: Path) -> dict[str, bytes]:
    """The contents of the config, tokenizer, template and license files of a model directory, by name.

    UserError if config.json is missing, or if a file is larger than MAX_FILE.
    """
    if not (model_dir / "config.json").is_file():
        raise UserError(f"the base model's config.json is no longer in {model_dir}")
    return {path.relative_to(model_dir).as_posix(): read_small(path, MAX_FILE) for path in base_paths(model_dir)}


def with_replaced(
    files: Mapping[str, bytes], chat_template: str | None, config: Mapping[str, Any] | None
) -> dict[str, bytes]:
    """The files with another template (Jinja text) and config; None keeps the model's own. With the config of a text
    model alone, settings of other parts are left out.
    """
    files = dict(files)
    if chat_template is not None:
        files[TEMPLATE] = chat_template.encode()
    if config is not None:
        if "text_config" not in config:
            files = {name: content for name, content in files.items() if name not in PROCESSORS}
        files["config.json"] = json.dumps(config, indent=2).encode()
    return files


def check_base_files(model_dir: Path) -> None:
    """UserError if one of the files cannot be copied, because it is not a regular file or larger than MAX_FILE, or if
    one of SETTINGS has duplicate keys.
    """
    for path in base_paths(model_dir):
        with open_regular(path) as file:
            check_size(file, path, MAX_FILE)
        if path.name in SETTINGS:
            check_keys(path)


def base_paths(model_dir: Path) -> list[Path]:
    """The paths of these files, sorted. Pipes, devices and sockets are among them, for the reader to refuse."""
    licenses = {path for path in _found(model_dir, LICENSES) if not leads_out(model_dir, path)}
    return sorted(_found(model_dir, PARSED) | licenses)


def left_out(model_dir: Path) -> list[Path]:
    """The license files that are not copied, because they are links that lead out of the model's folder."""
    return sorted(path for path in _found(model_dir, LICENSES) if leads_out(model_dir, path))


def _found(model_dir: Path, patterns: Iterable[str]) -> set[Path]:
    found = {path for pattern in patterns for path in model_dir.glob(pattern)}
    return {path for path in found if path.exists() and not path.is_dir()}
