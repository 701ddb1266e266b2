"""The files of a base model that every checkpoint and export includes: all but the weights."""

from pathlib import Path

from rptrain.utils.errors import UserError

BASE = "base"  # the folder in a checkpoint
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

    `chat_template` is Jinja text that replaces the model's own template. UserError if config.json is missing.
    """
    if not (model_dir / "config.json").is_file():
        raise UserError(f"the base model's config.json is no longer in {model_dir}")
    paths = sorted({path for pattern in PATTERNS for path in model_dir.glob(pattern) if path.is_file()})
    files = {path.relative_to(model_dir).as_posix(): path.read_bytes() for path in paths}
    return files if chat_template is None else files | {TEMPLATE: chat_template.encode()}
