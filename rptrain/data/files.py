"""Rows of data files, one at a time: JSON, CSV, Parquet, Arrow and plain text; and which files a folder's split has."""

import csv
import json
import re
import sys
from collections.abc import Callable, Iterator
from os.path import isdir, isfile
from pathlib import Path
from typing import Any

from rptrain.errors import UserError

Rows = Iterator[tuple[int, Any]]  # line or number, from 1, and the row; a row that cannot be read is its ValueError

ROWS_AT_ONCE = 1024  # rows of a Parquet or Arrow file that are in memory together, at most
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json")
SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")  # by which files of a folder are named


def files_of(path: str | Path, split: str = "train") -> list[Path]:
    """The files of a split, in the order of their names: a file itself, or those of a folder.

    A folder is what `datasets.save_to_disk` leaves, or holds data files, also in `data/` or in a folder named for the
    split; their names begin with the split, or with none, and are all of "train" then. UserError: there are none.
    """
    path = Path(path)
    if isfile(path):
        if split != "train":
            raise UserError(f"{path}: a file has no split {split!r}; it is taken whole")
        return [path]
    if not isdir(path):
        raise UserError(f"{path}: no such data file or folder")
    if (path / "config.json").is_file():
        raise UserError(f"{path}: this folder holds a model (config.json), no data")
    if (path / "dataset_dict.json").is_file():
        splits = _described(path / "dataset_dict.json", "splits")
        if split not in splits:
            raise UserError(f"{path}: there is no split {split!r}; it has {', '.join(map(str, splits))}")
        path = path / split
    if (path / "state.json").is_file():
        parts = _described(path / "state.json", "_data_files")
        return [path / Path(part["filename"]).name for part in parts]
    folders = [folder for folder in (path, path / "data", path / split) if isdir(folder)]
    files = sorted(file for folder in folders for file in folder.iterdir())
    found = [file for file in files if file.suffix.lower() in READERS and file.name not in DESCRIPTIONS]
    chosen = [file for file in found if file.parent == path / split or _split_of(file) == split]
    if not chosen and split == "train" and not any(map(_split_of, found)):
        chosen = found
    if not chosen:
        names = f": {', '.join(file.name for file in found[:5])}" if found else ""
        raise UserError(f"{path}: no data files of the split {split!r} are in this folder{names}")
    return chosen


def rows_of(path: Path) -> Rows:
    """All rows, by the file's ending; of an unknown one as JSON. UserError: the file as a whole cannot be read."""
    try:
        yield from READERS.get(path.suffix.lower(), _json_rows)(path)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text: {error}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def _described(file: Path, key: str) -> list[Any]:
    """The list under `key` of what `datasets` wrote about a folder."""
    try:
        return list(json.loads(file.read_text(encoding="utf-8"))[key])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is not what `datasets` writes: {error!r}") from error


def _split_of(file: Path) -> str | None:
    match = re.match(r"[a-z]+(?![a-z])", file.name.lower())
    return match[0] if match and match[0] in SPLITS else None


def _text_document(path: Path) -> Rows:
    yield 1, {"text": path.read_text(encoding="utf-8-sig")}


def _json_rows(path: Path) -> Rows:
    with path.open("rb") as file:
        start = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()
        file.seek(0)
        if start.startswith(b"["):
            try:
                yield from enumerate(json.load(file), 1)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}: not a JSON list: {error}") from error
            return
        for line, data in enumerate(file, 1):
            if not data.strip():
                continue
            try:
                yield line, json.loads(data)
            except ValueError as error:
                yield line, error
            except RecursionError:
                yield line, ValueError("nested too deeply")


def _csv_rows(path: Path) -> Rows:
    csv.field_size_limit(sys.maxsize)  # the default refuses texts of 128 KiB
    with path.open(encoding="utf-8-sig", newline="", errors="surrogateescape") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = next(reader, [])
            if twice := sorted({name for name in header if header.count(name) > 1}):
                raise UserError(f"{path}: there is more than one column named {', '.join(twice)}: rename all but one")
            for fields in reader:
                if len(fields) == len(header):
                    yield reader.line_num, dict(zip(header, fields, strict=True))
                elif fields:
                    yield reader.line_num, ValueError(f"{len(fields)} fields, but {len(header)} columns")
        except csv.Error as error:
            raise UserError(f"{path}:{reader.line_num}: not CSV: {error}") from error


def _parquet_rows(path: Path) -> Rows:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            yield from _batch_rows(file.iter_batches(ROWS_AT_ONCE))
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:  # the last two: dates out of Python's range
        raise UserError(f"{path}: not a Parquet file that can be read: {error}") from error


def _arrow_rows(path: Path) -> Rows:
    """Of a stream, which `datasets` writes, or of a file."""
    import pyarrow
    from pyarrow import ipc

    try:
        with pyarrow.memory_map(str(path)) as source:
            if source.read(6) == b"ARROW1":
                file = ipc.open_file(source)
                batches = (file.get_batch(index) for index in range(file.num_record_batches))
            else:
                source.seek(0)
                batches = iter(ipc.open_stream(source))
            pieces = (
                batch.slice(start, ROWS_AT_ONCE) for batch in batches for start in range(0, len(batch), ROWS_AT_ONCE)
            )
            yield from _batch_rows(pieces)
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        raise UserError(f"{path}: not an Arrow file that can be read: {error}") from error


def _batch_rows(batches: Iterator[Any]) -> Rows:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield number, row


READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": _json_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".parquet": _parquet_rows,
    ".arrow": _arrow_rows,
    ".txt": _text_document,
}
