"""Push a model or an adapter to the hub, with its card."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import CommitOperationAdd
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from rptrain.checkpoint.atomic_dir import MANIFEST, STATE
from rptrain.checkpoint.export_progress import ADAPTER_CONFIG
from rptrain.gguf import kinds
from rptrain.hub import card
from rptrain.hub.errors import LOG_IN, explained_answers, explained_errors, has_token, page_of
from rptrain.hub.repository import TIMEOUT, api
from rptrain.models.base_files import CONFIG, LICENSES
from rptrain.models.locate import HUB_ID
from rptrain.utils.errors import UserError
from rptrain.utils.files import read_small_text
from rptrain.utils.paths import leads_out
from rptrain.utils.phases import phase
from rptrain.utils.text import one_line, quoted
from rptrain.utils.units import format_bytes

OWN = 'FROM "./'  # the beginning of a Modelfile for the file beside it
BASE_KEY = "base_model_name_or_path"
PATHS = {  # keys under which files may have a local path
    ADAPTER_CONFIG: BASE_KEY,
    CONFIG: "_name_or_path",
    "tokenizer_config.json": "name_or_path",
}
TOKENIZER_PATHS = ("special_tokens_map_file", "tokenizer_file")  # keys with which older tokenizers were saved


@dataclass(frozen=True)
class Push:
    """What is pushed: the repository, its card, and all other files by name: a path, or content that replaces it.

    `written`: the folder has the card, as somebody wrote it.
    """

    name: str
    card: str
    written: bool
    files: Mapping[str, Path | bytes]

    def sizes(self) -> dict[str, int]:
        """The bytes of each file, by name, with the card."""
        others = {
            name: len(file) if isinstance(file, bytes) else file.stat().st_size for name, file in self.files.items()
        }
        return {card.NAME: len(self.card.encode()), **others}


def prepare(folder: Path, name: str, run: Path | None, base: str | None, *, force: bool = False) -> Push:
    """What pushing a folder would send. No connection is made, and nothing is written.

    `run` trained it, `base` is the hub id of its base model if the run or the adapter names a local folder. A README.md
    in the folder is the card, unless `force` is set. UserError if the folder is not a model, an adapter or GGUF files,
    if it has links that lead out of it, or if an adapter's base has no name on the hub.
    """
    check_name(name)
    if base is not None and not HUB_ID.fullmatch(base):
        raise UserError(f"--base {quoted(repr(base))} is not the name of a model on the hub: write owner/name")
    files: dict[str, Path | bytes] = {**_files(folder)}
    if STATE in files:
        raise UserError(f"{folder} is a checkpoint: push its run, or what `rptrain export {folder} --to DIR` writes")
    if not any(file in files for file in (CONFIG, ADAPTER_CONFIG)) and not any(
        file.endswith(kinds.SUFFIX) for file in files
    ):
        raise UserError(f"{folder} is not an export: it has neither {CONFIG} nor {ADAPTER_CONFIG}, nor GGUF files")
    known = _base(folder, run, base)
    for file, key in PATHS.items():
        if file in files:
            files[file] = _without_path(folder / file, key, known.hub_id if known else None) or files[file]
    written = files.pop(card.NAME, None) is not None and not force
    text = _text(folder / card.NAME) if written else card.write(folder, name, run, known)
    return Push(name, text, written, files)


def send(push: Push, *, private: bool, force: bool, bars: bool, tell: Callable[[str], object]) -> str:
    """Creates the repository if there is none, and commits the files to its main branch; returns its address.

    Large files are sent first, and those that an earlier push sent are not sent again. A card that the repository has
    stays, unless `force` is set or the folder has one. UserError without a token, if the repository must be private and
    is not, or if the hub refuses the card; else as `explained_errors`.
    """
    check_token()
    client, files = api(), dict(push.files)
    with explained_errors(push.name), explained_answers(push.name):
        try:
            found = client.model_info(push.name, timeout=TIMEOUT)
        except RepositoryNotFoundError:
            found = None
            client.create_repo(push.name, private=private, exist_ok=True)
    if private and found is not None and not found.private:
        raise UserError(
            f"{push.name} exists and is public, so --private would not hide what is pushed: choose another name, or "
            f"make it private at {page_of(push.name)}/settings"
        )
    has_card = found is not None and any(file.rfilename == card.NAME for file in found.siblings or [])
    if has_card and not (push.written or force):
        tell(f"the {card.NAME} of {push.name} was not changed; --force replaces it with the new card")
    else:
        files[card.NAME] = push.card.encode()
    operations = [CommitOperationAdd(name, file) for name, file in files.items()]
    shown = not are_progress_bars_disabled()
    if not bars:
        disable_progress_bars()
    try:
        with explained_errors(push.name), phase(f"pushing {format_bytes(sum(push.sizes().values()))}", unit=""):
            client.create_commit(push.name, operations, commit_message="Push a result of rptrain")
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{push.name} was not pushed: {error}") from error
    finally:
        if shown:
            enable_progress_bars()
    return page_of(push.name)


def check_name(name: str) -> None:
    """UserError if no repository can have this name."""
    if not HUB_ID.fullmatch(name):
        raise UserError(f"{quoted(repr(name))} is not a name on the hub: write owner/name")


def check_token() -> None:
    """UserError if a token to push with is missing."""
    if not has_token():
        raise UserError(f"pushing needs a token that may write: {LOG_IN}")


def _files(folder: Path) -> dict[str, Path]:
    """The files of an export by name, sorted: all but hidden ones and the manifest. Of a folder that is neither a model
    nor an adapter, only GGUF files and what belongs to them: it may be the current directory, with data and runs.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is a file: name the folder that it is in")
    whole = any((folder / name).is_file() for name in (CONFIG, ADAPTER_CONFIG, STATE))
    found = {}
    for path in sorted(folder.rglob("*") if whole else filter(_is_of_gguf, folder.iterdir())):
        name = path.relative_to(folder).as_posix()
        if any(part.startswith(".") for part in PurePosixPath(name).parts) or name == MANIFEST or path.is_dir():
            continue
        if leads_out(folder, path):
            raise UserError(f"{path} is a link that leads out of the folder: put the file there instead")
        if not path.is_file():
            raise UserError(f"{path} is not a regular file: remove it")
        found[name] = path
    return found


def _is_of_gguf(path: Path) -> bool:
    """Whether this is a GGUF file or belongs to one. A Modelfile that names a folder of this machine does not."""
    if path.suffix == kinds.MODELFILE:
        return path.is_file() and _text(path).startswith(OWN)
    return any(fnmatchcase(path.name, pattern) for pattern in (f"*{kinds.SUFFIX}", card.NAME, *LICENSES))


def _base(folder: Path, run: Path | None, base: str | None) -> card.Base | None:
    """The base model: as given, else as the adapter or the run's config names it; None: unknown, or there is none."""
    named = None
    if (folder / ADAPTER_CONFIG).is_file():
        named = _json(folder / ADAPTER_CONFIG).get(BASE_KEY)
    elif run is not None:
        named = card.base_path(run)
    known = card.base_of(named) if isinstance(named, str) and named else None
    if base is not None:
        return card.Base(base, base, known.folder if known else None)
    if known is None and (folder / ADAPTER_CONFIG).is_file():
        raise UserError(
            f"{folder / ADAPTER_CONFIG} does not name the adapter's base model: give its name on the hub with --base "
            "owner/name"
        )
    if known is not None and known.hub_id is None and (folder / ADAPTER_CONFIG).is_file():
        raise UserError(
            f"the adapter's base model is the folder {one_line(str(named))}, where nobody else finds it: give its name "
            "on the hub with --base owner/name, or push the whole model: "
            "`rptrain export RUN --to DIR --merge && rptrain push DIR owner/name`"
        )
    return known


def _without_path(file: Path, key: str, hub_id: str | None) -> bytes | None:
    """The content of a JSON file with a hub id in place of a local path under this key, or of an adapter's missing
    base, and without paths of the tokenizer's files; None if there is nothing to replace.
    """
    content = _json(file)
    value, found = content.get(key), dict(content)
    for name in TOKENIZER_PATHS:
        if isinstance(local := content.get(name), str) and Path(local).is_absolute():
            del found[name]
    named = isinstance(value, str) and value
    if (named and (not HUB_ID.fullmatch(named) or Path(named).is_dir())) or (not named and key == BASE_KEY):
        found[key] = hub_id or ""
    return None if found == content else json.dumps(found, indent=2).encode()


def _text(file: Path) -> str:
    try:
        return read_small_text(file)
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text: save it as UTF-8") from error


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_small_text(file))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not valid JSON: {error}") from error
    return found if isinstance(found, dict) else {}
