"""The files of a base model that every checkpoint and export includes: all but the weights."""

from pathlib import Path

from rptrain.utils.errors import UserError
from rptrain.utils.files import check_size, open_regular, read_small

BASE = "base"  # the folder in a checkpoint
MAX_FILE = 512 << 20  # bytes: more than a tokenizer has
TEMPLATE = "chat_template.jinja"
PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "spiece.model",
    "chat_template*",
    "additional_chat_templates/*.jinja",
    "LICENSE*",
    "NOTICE*",
)


def base_files(model_dir: Path, chat_template: str | None = None) -> dict[str, bytes]:
    """The contents of the config, tokenizer, template and license files of a model directory, by name.

    `chat_template` is Jinja text that replaces the model's own template. UserError if config.json is missing, or if
    a file is larger than MAX_FILE.
    """
    if not (model_dir / "config.json").is_file():
        raise UserError(f"the base model's config.json is no longer in {model_dir}")
    files = {path.relative_to(model_dir).as_posix(): read_small(path, MAX_FILE) for path in base_paths(model_dir)}
    return files if chat_template is None else files | {TEMPLATE: chat_template.encode()}


def check_base_files(model_dir: Path) -> None:
    """UserError if one of the files cannot be copied: it is no regular file, or larger than MAX_FILE."""
    for path in base_paths(model_dir):
        with open_regular(path) as file:
            check_size(file, path, MAX_FILE)


def base_paths(model_dir: Path) -> list[Path]:
    """The paths of these files, sorted. Pipes, devices and sockets are among them, for the reader to refuse."""
    found = {path for pattern in PATTERNS for path in model_dir.glob(pattern)}
    return sorted(path for path in found if path.exists() and not path.is_dir())
