"""The files of a base model that every checkpoint and export includes: all but the weights."""

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rptrain.utils.errors import UserError
from rptrain.utils.files import check_size, open_regular
from rptrain.utils.objects import check_keys
from rptrain.utils.paths import leads_out
from rptrain.utils.text import one_line

MAX_FILE = 512 << 20  # bytes: more than a tokenizer has
CONFIG, GENERATION = "config.json", "generation_config.json"
TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
PROCESSORS = ("processor_config.json", "preprocessor_config.json")  # of models with more than a text model
# The files that are copied, by name.
COPIED = (
    CONFIG,
    GENERATION,
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
    TEMPLATE,
    "chat_template.json",
    f"{MORE_TEMPLATES}/*.jinja",
)
# The model does without these: they are left out if they are links that lead out of the model's folder.
LICENSES = ("LICENSE*", "NOTICE*")
# The JSON files that transformers reads, but for vocabularies, which are large.
SETTINGS = (GENERATION, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
# The JSON files that may have a chat template, under this key.
TEMPLATE_KEY, WITH_TEMPLATES = "chat_template", ("tokenizer_config.json", "chat_template.json", *PROCESSORS)
SHOWN = 3  # links that a message names


@dataclass(frozen=True)
class BaseFile:
    """The content of a file and its permissions, as bits of a mode, which copies do not exceed."""

    content: bytes
    mode: int = 0o666


def base_files(model_dir: Path, *, follow_links: bool = False) -> dict[str, BaseFile]:
    """The config, tokenizer, template and license files of a model directory, by name.

    UserError if config.json is missing, if a file is larger than MAX_FILE, or if it is a link as in `check_links`. What
    counts is the file that was opened, so links may change meanwhile.
    """
    if not (model_dir / CONFIG).is_file():
        raise UserError(f"the base model's config.json is no longer in {model_dir}")
    paths = base_paths(model_dir)
    return {path.relative_to(model_dir).as_posix(): _read(model_dir, path, follow_links) for path in paths}


def with_contents(files: Mapping[str, BaseFile], contents: Mapping[str, bytes]) -> dict[str, BaseFile]:
    """The files with other contents, by name. Files that were there keep their permissions."""
    return {**files, **{name: replace(files.get(name, BaseFile(b"")), content=contents[name]) for name in contents}}


def with_replaced(
    files: Mapping[str, BaseFile], chat_template: str | None, config: Mapping[str, Any] | None = None
) -> dict[str, BaseFile]:
    """The files with another template (Jinja text) and config; None keeps the model's own. The template takes the place
    of all that the files have, named ones too. With the config of a text model alone, settings of other parts are left
    out.
    """
    files = dict(files)
    if chat_template is not None:
        files = {name: file for name, file in files.items() if not name.startswith(f"{MORE_TEMPLATES}/")}
        changed = {name: _with_template(files[name].content, chat_template) for name in WITH_TEMPLATES if name in files}
        files = with_contents(files, {**changed, TEMPLATE: chat_template.encode()})
    if config is not None:
        if "text_config" not in config:
            files = {name: file for name, file in files.items() if name not in PROCESSORS}
        files = with_contents(files, {CONFIG: json.dumps(config, indent=2).encode()})
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


def check_links(model_dir: Path) -> None:
    """UserError if files to copy are links that lead out of the model's folder, or to a hidden file in it, such as
    .git/config. Whoever wrote the folder would choose a file of this user, which everyone who gets the export can read.

    config.json may be such a link: it is copied only once it was read as that of a model.
    """
    links = [path for path in base_paths(model_dir) if _is_foreign(model_dir, path, path)]
    if links:
        shown = [f"{path.relative_to(model_dir)} -> {os.path.realpath(path)}" for path in links[:SHOWN]]
        more = f" and {len(links) - SHOWN} more" if len(links) > SHOWN else ""
        raise UserError(
            f"{model_dir}: links lead out of this folder or to hidden files, which checkpoints and exports would copy: "
            f"{one_line(', '.join(shown))}{more}; put the files there instead, or delete the links; "
            "model.follow_links=true follows links that you made"
        )


def base_paths(model_dir: Path) -> list[Path]:
    """The paths of these files, sorted. Pipes, devices and sockets are among them, for the reader to refuse."""
    licenses = {path for path in _found(model_dir, LICENSES) if not _leads_out(model_dir, path)}
    return sorted(_found(model_dir, COPIED) | licenses)


def left_out(model_dir: Path) -> list[Path]:
    """The license files that are not copied, because they are links that lead out of the model's folder."""
    return sorted(path for path in _found(model_dir, LICENSES) if _leads_out(model_dir, path))


def _found(model_dir: Path, patterns: Iterable[str]) -> set[Path]:
    return {path for pattern in patterns for path in model_dir.glob(pattern) if _is_there(path)}


def _is_there(path: Path) -> bool:
    """Whether this is something other than a folder or a broken link. It may be out of reach, for the reader to say."""
    try:
        return path.exists() and not path.is_dir()
    except PermissionError:
        return True


def _read(model_dir: Path, path: Path, follow_links: bool) -> BaseFile:
    with open_regular(path) as file:
        opened = Path(os.readlink(f"/proc/self/fd/{file.fileno()}"))
        if not follow_links and _is_foreign(model_dir, path, opened):
            raise UserError(f"{path} leads to {opened}, outside of its folder: put the file there instead of a link")
        check_size(file, path, MAX_FILE)
        return BaseFile(file.read(MAX_FILE), os.fstat(file.fileno()).st_mode & 0o666)


def _is_foreign(model_dir: Path, path: Path, target: Path) -> bool:
    """Whether a file to copy, which leads to `target`, is refused as in `check_links`."""
    return path.relative_to(model_dir) != Path(CONFIG) and _leads_out(model_dir, target)


def _leads_out(model_dir: Path, path: Path) -> bool:
    """Whether a path leads out of the model's folder and of its entry in Hugging Face's cache, or to a hidden file."""
    place, target = Path(os.path.realpath(model_dir)), Path(os.path.realpath(path))
    hidden = target.is_relative_to(place) and any(part.startswith(".") for part in target.relative_to(place).parts)
    return hidden or leads_out(model_dir, path)


def _with_template(content: bytes, chat_template: str) -> bytes:
    """A JSON file with this template if it has another one. What is not a JSON object has none, and stays."""
    with suppress(ValueError, RecursionError):
        found = json.loads(content)
        if isinstance(found, dict) and found.get(TEMPLATE_KEY, chat_template) != chat_template:
            return json.dumps(found | {TEMPLATE_KEY: chat_template}, indent=2).encode()
    return content
