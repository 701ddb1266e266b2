"""A cache of a plan's checks of data, because a tokenizer and its templates take a second to load.

Each entry is a file in a folder of the default token cache, under a name that depends on everything that was checked,
files by their state (see `FileState`). When training has tokenized more data, entries from before are not used, because
a plan then counts all samples.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from json import dumps
from pathlib import Path

from pydantic import TypeAdapter

from rptrain.config.schema import Config
from rptrain.data.amount import Amount
from rptrain.data.cache import code_hash, default_folder
from rptrain.data.folders import choose
from rptrain.data.loader import is_file_set
from rptrain.data.template import load_template
from rptrain.models.base_files import base_paths
from rptrain.utils.file_state import states_of
from rptrain.utils.private import close_own_folder, own_folder, read_own
from rptrain.utils.replacing import replace_file

FOLDER = "plans"
KEPT = 100  # entries; the oldest are deleted
PACKAGES = ("jinja2", "rptrain", "tokenizers", "transformers")  # whose versions decide what is found


@dataclass(frozen=True)
class DataChecks:
    """Warnings about the data of a run that may start, and their amount; None if it is unknown."""

    warnings: tuple[str, ...]
    amount: Amount | None


_CHECKED = TypeAdapter(DataChecks)


def path_of(config: Config, model_dir: Path, vocab_size: int, padding_row: int | None, code: Sequence[str]) -> Path:
    """The file of the checks of a config's data, which may not exist. `padding_row`: as in data/padding.py. `code`: the
    source files of checks that are not in this package.

    UserError or OSError if a file that the data or the tokenizer needs does not exist.
    """
    data = config.data
    tokens = Path(data.cache_dir) if data.cache_dir else default_folder()
    files = base_paths(model_dir)
    for source in (*data.train, *data.val):
        if is_file_set(source):
            files += choose(source.path, source.split, follow_links=data.follow_links).files
    template = data.chat_template and load_template(None, data.chat_template)
    settings = data.model_dump(mode="json", exclude={"chat_template"})
    train = config.train.seed, config.train.global_batch_size
    found = (
        settings,
        template,
        *train,
        config.eval.questions > 0,
        config.log.sample_prompts,
        vocab_size,
        padding_row,
        [str(file.absolute()) for file in files],
        states_of(files),
    )
    versions = code_hash(*map(Path, code)), *map(version, PACKAGES), _pyarrow()
    tokenized = sorted(path.name for path in tokens.glob("*.safetensors"))
    name = sha256(dumps([found, versions, tokenized]).encode(errors="surrogatepass")).hexdigest()
    return default_folder() / FOLDER / f"{name}.json"  # wherever data.cache_dir is: a plan makes no folder there


def load(path: Path) -> DataChecks | None:
    """The checks of an earlier plan; None if there are none, if the file is damaged, or if others may write to it or to
    its folder, where they could give it another name.
    """
    try:
        with own_folder(path.parent):
            return _CHECKED.validate_json(read_own(path))
    except (OSError, ValueError):
        return None


def store(path: Path, checks: DataChecks) -> None:
    """Stores checks for later plans; they make them again if the disk is full or does not allow it.

    The same holds for warnings with names of files that are not UTF-8, which JSON cannot hold (a ValueError).
    """
    with suppress(OSError, ValueError):
        content = _CHECKED.dump_json(checks)
        close_own_folder(path.parent, "*.json")
        replace_file(path, content, 0o600)
        for old in sorted(path.parent.glob("*.json"), key=os.path.getmtime)[:-KEPT]:
            old.unlink()


def _pyarrow() -> str | None:
    """The version of the package that reads Parquet and Arrow files, if it is installed."""
    with suppress(PackageNotFoundError):
        return version("pyarrow")
    return None
