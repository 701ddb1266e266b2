"""Download a data set: the files that its card lists, or all that are read. No code of a repository is run."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rptrain.data.folders import NO_DATA, WORDS, choose
from rptrain.data.read import READERS
from rptrain.hub import snapshot
from rptrain.hub.model import CARD, tell_size
from rptrain.hub.repository import RemoteFile, Repository, find
from rptrain.utils.errors import UserError
from rptrain.utils.suggest import nearest
from rptrain.utils.text import one_line, quoted

CONVERTED = "refs/convert/parquet"  # the branch in which the hub keeps a copy of many data sets as Parquet
HELD_OUT = {*WORDS["validation"], *WORDS["test"]}  # words in the names of splits that are not trained on
_SEPARATOR = re.compile(r"[^a-z]+")
_SHOWN = 10  # names that a message lists
_WILD = re.compile(r"(\*\*/|\*\*|\*|\?|\[[^]/]+\])")


@dataclass(frozen=True)
class Split:
    """A split of a data set: its name, and a file, a pattern or, with other splits in it, a folder with its files."""

    name: str
    path: str
    shared: bool = False  # the folder has other splits, too

    @property
    def table(self) -> str:
        """The table of a config for this split, in TOML."""
        kind = "val" if HELD_OUT.intersection(_SEPARATOR.split(self.name)) else "train"
        lines = [f"[[data.{kind}]] # {one_line(self.name)}", f"path = {json.dumps(self.path, ensure_ascii=False)}"]
        return "\n".join([*lines, *([f"split = {json.dumps(self.name)}"] if self.shared else [])])


def download(
    name: str, revision: str | None, config: str | None, tell: Callable[[str], object] = lambda said: None
) -> list[Split]:
    """Downloads a data set into the hub's cache, and continues an earlier download.

    `config` is one of those that its card lists, or a folder of it. UserError if it is needed or unknown, if there are
    no files that are read, and as `snapshot.fetch`.
    """
    repository = find(name, "data set", revision)
    data = [file for file in repository.files.values() if _is_data(file)]
    patterns = _with_files(_patterns(repository, config), data)
    wanted = [pattern for some in patterns.values() for pattern in some]
    files = [file for file in data if any(_matches(file.name, pattern) for pattern in wanted)]
    if not files:
        raise UserError(_without_files(repository, config))
    files += [repository.files[CARD]] if CARD in repository.files else []
    tell_size(repository, files, tell)
    snapshot.fetch(repository, files)
    place = snapshot.link(repository, files)
    return [found for split, some in patterns.items() for one in some for found in _found(split, place / one)]


def _with_files(patterns: Mapping[str, Sequence[str]], files: Sequence[RemoteFile]) -> dict[str, list[str]]:
    """The patterns of which there are files. Others may lead out of the repository, and are not for a config."""
    return {
        split: [one for one in some if any(_matches(file.name, one) for file in files)]
        for split, some in patterns.items()
    }


def _found(split: str, place: Path) -> Iterator[Split]:
    """The split of a file or a pattern, or those of a folder, by the names in it."""
    others = _has(place, "validation") if place.is_dir() else False
    if not others or _has(place, split):
        yield Split(split, str(place))
    if others:
        yield Split("validation", str(place), shared=True)


def _has(folder: Path, split: str) -> bool:
    try:
        return bool(choose(folder, split).files)
    except UserError:
        return False


def _patterns(repository: Repository, config: str | None) -> dict[str, list[str]]:
    """The patterns of each split's files; a pattern "" is the whole repository."""
    listed = repository.card.get("configs")
    entries = [entry for entry in listed if isinstance(entry, Mapping)] if isinstance(listed, list) else []
    configs = {str(entry.get("config_name", "default")): entry for entry in entries}
    if config is None and len(configs) > 1:
        chosen = next((name for name, entry in configs.items() if entry.get("default") or name == "default"), None)
        if chosen is None:
            raise UserError(f"{repository.name} has several configurations: choose one with --config: {_some(configs)}")
        config = chosen
    if configs:
        config = next(iter(configs)) if config is None else config
        if config not in configs:
            near = nearest(config, configs)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(
                f"{repository.name} has no configuration {quoted(repr(config))}, only {_some(configs)}{hint}"
            )
        return _of_entry(configs[config])
    return {"train": ["" if config is None else config]}


def _of_entry(entry: Mapping[str, Any]) -> dict[str, list[str]]:
    """The patterns of a configuration, as its `data_files` and `data_dir` name them."""
    folder = str(entry.get("data_dir") or "").strip("/")
    found = dict[str, list[str]]()
    for split, path in _splits(entry.get("data_files")):
        found.setdefault(split, []).append("/".join(filter(None, [folder, path.removeprefix("./")])))
    return found or {"train": [folder]}


def _splits(data_files: object) -> Iterator[tuple[str, str]]:
    if isinstance(data_files, str):
        yield "train", data_files
    elif isinstance(data_files, Mapping):
        for split, paths in data_files.items():
            yield from ((str(split), path) for _, path in _splits(paths))
    elif isinstance(data_files, Sequence):
        for entry in data_files:
            if isinstance(entry, Mapping):
                yield from ((str(entry.get("split", "train")), path) for _, path in _splits(entry.get("path")))
            else:
                yield "train", str(entry)


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern is that of a file, or names a folder with it."""
    return not pattern or name.startswith(f"{pattern}/") or _is_match(pattern, name)


def _is_match(pattern: str, name: str) -> bool:
    """Whether a pattern, with the meaning of Python's `glob`, is for a name. The card of a stranger has the pattern, so
    the time must not grow with its stars as that of a regular expression does.
    """
    ends = {0}
    for part in _WILD.split(pattern):
        ends = {end for start in ends for end in _ends(part, name, start)}
    return len(name) in ends


def _ends(part: str, name: str, start: int) -> Iterator[int]:
    """Where a part of a pattern may end in a name if it begins at `start`."""
    match part:
        case "**/":
            yield from (start, *(end for end in range(start + 1, len(name) + 1) if name[end - 1] == "/"))
        case "**":
            yield from range(start, len(name) + 1)
        case "*":
            yield from range(start, (name + "/").index("/", start) + 1)
        case "?":
            yield from [start + 1] * (name[start : start + 1] not in ("", "/"))
        case _ if part[:1] == "[" and part[-1] == "]":
            yield from [start + 1] * fnmatchcase(name[start : start + 1], part)
        case _:
            yield from [start + len(part)] * name.startswith(part, start)


def _is_data(file: RemoteFile) -> bool:
    path = Path(file.name)
    return path.suffix.lower() in READERS and path.stem.lower() not in NO_DATA and not path.name.startswith(".")


def _without_files(repository: Repository, config: str | None) -> str:
    where = f" in {config}" if config else ""
    said = f"{repository.name} has no files{where} that rptrain reads ({', '.join(READERS)})"
    if repository.revision == CONVERTED:
        return f"{said}: download another data set, or convert it to one of these types"
    script = (
        ", only a loading script, which is not run" if any(name.endswith(".py") for name in repository.files) else ""
    )
    return f"{said}{script}: try --revision {CONVERTED}, where the hub keeps a copy of many data sets as Parquet"


def _some(names: Mapping[str, object]) -> str:
    shown = list(names)[:_SHOWN]
    return ", ".join(shown) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
