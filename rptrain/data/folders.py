"""Selection of the files of a split: a file, the matches of a pattern, or files of a folder by words in their names."""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from glob import glob
from os.path import isdir
from pathlib import Path
from typing import Any

from rptrain.data.read import READERS
from rptrain.utils.errors import UserError
from rptrain.utils.files import read_small_text
from rptrain.utils.paths import leads_out

# The splits of `datasets` with the words for each, and the pattern of names of shards in `data/`.
WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
SHARD = re.compile(r"data/(\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*$")
NO_DATA = ("readme", "license", "dataset_info", "dataset_infos")  # names without suffixes
PATTERN = re.compile(r"[*?[]")
MAX_FILES = 100_000  # limit of files in a folder
SHOWN = 5  # files named in a message
OUTSIDE = "a link that leads out of the data folder: set data.follow_links=true to follow it"


@dataclass(frozen=True)
class Chosen:
    """The files of a split in the order of their names, and why the other files of the folder were ignored."""

    files: list[Path]
    others: dict[Path, str] = field(default_factory=dict)
    lost: bool = False  # some of the others belong to no split or cannot be read


def choose(path: str | Path, split: str = "train", *, follow_links: bool = False) -> Chosen:
    """Chooses a file, the files that a pattern matches, or the files of a split in a folder.

    A folder was written by `datasets.save_to_disk`, or contains data files, also in subfolders. The rule is that of
    `datasets` (documentation, "Structure your repository"), but case-insensitive: `data/NAME-00000-of-00001.*` belong
    to the split NAME; otherwise a word in a folder's name decides, otherwise a word in a file's name. If no name has
    such a word, all files belong to "train". Raises UserError if there are no files, or if a name has two such words.

    Links in a folder that lead out of it are ignored, unless `follow_links` is set; see `leads_out`.
    """
    path = Path(path)
    if isdir(path):
        chosen = _of_folder(path, split, follow_links)
    elif os.path.lexists(path):
        chosen = Chosen([path])
    elif PATTERN.search(str(path)):
        chosen = Chosen(sorted(Path(name) for name in glob(str(path), recursive=True) if not isdir(name)))
    else:
        raise UserError(f"{path}: no such data file or folder")
    if not chosen.files:
        raise UserError(f"{path}: no file matches this pattern, and state.json names none")
    if split != "train" and not isdir(path):
        raise UserError(f"{path}: a file has no split {split!r}: it is used as a whole")
    for file in chosen.files:
        if file.exists() and not file.is_file():
            raise UserError(
                f"{file}: pipes, sockets and devices cannot be read as data: save the data to a regular file first"
            )
    return chosen


def named(files: dict[Path, str], folder: str | Path) -> str:
    """The first of the ignored files, with the reasons."""
    more = [f"and {len(files) - SHOWN} more"] if len(files) > SHOWN else []
    shown = [f"{file.relative_to(folder)} ({why})" for file, why in list(files.items())[:SHOWN]]
    return ", ".join(shown + more)


def _of_folder(path: Path, split: str, follow_links: bool) -> Chosen:
    folder = path
    if (path / "config.json").is_file():
        raise UserError(f"{path}: this folder holds a model (config.json), not data")
    if (path / "dataset_dict.json").is_file():
        splits = _described(path / "dataset_dict.json", "splits")
        if split not in splits:
            raise UserError(f"{path}: there is no split {split!r}; it has {', '.join(map(str, splits))}")
        if Path(split).name != split:  # it would leave the folder
            raise UserError(f"{path}: {split!r} is not the name of a split")
        path = path / split
        _check_links(folder, path, follow_links)
    if (path / "state.json").is_file():
        parts = _described(path / "state.json", "_data_files")
        try:
            chosen = [path / Path(part["filename"]).name for part in parts]
        except (TypeError, KeyError) as error:
            raise UserError(
                f"{path / 'state.json'} is not what `datasets` writes: `_data_files` has something without a `filename`"
            ) from error
        for file in chosen:
            _check_links(folder, file, follow_links)
        return Chosen(chosen)
    links: dict[Path, str] = {}
    files = sorted(
        file for file in walk(path, None if follow_links else links, folder) if file.stem.lower() not in NO_DATA
    )
    read = [file for file in files if file.suffix.lower() in READERS]
    splits = _splits_of([file.relative_to(path).as_posix() for file in read], split)
    found = dict(zip(read, splits, strict=True))
    others = links | {file: _why_not(found.get(file)) for file in files if split not in found.get(file, ())}
    chosen = [file for file in read if split in found[file]]
    if not chosen:
        names = f": {named(others, path)}" if others else ""
        raise UserError(f"{path}: no data files of the split {split!r} are in this folder{names}")
    for file in chosen:
        if len(several := sorted(found[file] & WORDS.keys())) > 1 and split in WORDS:
            raise UserError(
                f"{file}: its name matches the splits {' and '.join(several)}: name each set's files by a path or a "
                f'pattern instead of the folder, as in path = "{path}/*part*.jsonl"'
            )
    return Chosen(chosen, others, any(not found.get(file) for file in others))


def _check_links(folder: Path, path: Path, follow_links: bool) -> None:
    if not follow_links and leads_out(folder, path):
        raise UserError(f"{path}: {OUTSIDE}, or copy the files into the folder")


def _why_not(splits: set[str] | None) -> str:
    if splits is None:
        return "unsupported file type"
    return " and ".join(sorted(splits)) or "belongs to no split"


def _splits_of(names: list[str], split: str) -> list[set[str]]:
    """The splits of files, by their names within the folder; a split with another name has only its name as a word."""
    if shards := {name: match[1] for name in names if (match := SHARD.match(name))}:
        return [{shards[name]} if name in shards else set() for name in names]
    words = {split: (split,), **WORDS}
    patterns = {
        name: re.compile(rf"(^|[-._ 0-9/])({'|'.join(map(re.escape, some))})([-._ 0-9/]|$)", re.IGNORECASE)
        for name, some in words.items()
    }
    for part in (os.path.dirname, os.path.basename):
        found = [{name for name, pattern in patterns.items() if pattern.search(part(file))} for file in names]
        if any(found):
            return found
    return [{"train"} for _ in names]


def walk(folder: Path, ignored: dict[Path, str] | None = None, root: Path | None = None) -> Iterator[Path]:
    """All files except hidden ones. Links are followed, but a folder is visited only once.

    If `ignored` is given, links that lead out of `root` (default: the folder) are added to it, with the reason.
    """
    seen: set[tuple[int, int]] = set()
    waiting, count = [folder], 0
    while waiting:
        here = waiting.pop()
        try:
            status, entries = here.stat(), sorted(here.iterdir())
        except OSError as error:
            raise UserError(f"{here} cannot be read: {error.strerror or error}") from error
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        for entry in entries:
            if entry.name.startswith((".", "__")):
                continue
            if ignored is not None and entry.is_symlink() and leads_out(root or folder, entry):
                ignored[entry] = OUTSIDE
                continue
            if isdir(entry):
                waiting.append(entry)
                continue
            count += 1
            if count > MAX_FILES:
                raise UserError(
                    f"{folder} holds more than {MAX_FILES:,} files: join them into fewer, or name a folder in it"
                )
            yield entry


def _described(file: Path, key: str) -> list[Any]:
    """The list under `key` in the metadata that `datasets` wrote about a folder."""
    text = read_small_text(file)
    try:
        return list(json.loads(text)[key])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{file} is not what `datasets` writes: JSON with a list `{key}`") from error
