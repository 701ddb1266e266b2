"""Copies of data files without their bad rows, which are written to another file with their reasons."""

import sys
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from rptrain.config.columns import NAMES, fault_of
from rptrain.config.schema import Config
from rptrain.data import formats
from rptrain.data.folders import choose
from rptrain.data.formats import Example, Tally
from rptrain.data.progress import Watch
from rptrain.data.read import BOM, is_list, kind_of, rows_of
from rptrain.data.row_format import RowFormat
from rptrain.data.row_text import as_text, json_text, texts_of
from rptrain.data.table_copy import copy_rows
from rptrain.data.tokens import Document
from rptrain.utils.errors import UserError
from rptrain.utils.file_state import FileState, states_of
from rptrain.utils.files import change_mode, open_regular
from rptrain.utils.liveness import progressed
from rptrain.utils.phases import Phase, phase
from rptrain.utils.replacing import replacing

BAD = ".bad.jsonl"  # ends the name of the file of bad rows, in place of the suffix
TABLES = (".parquet", ".arrow")


@dataclass(frozen=True)
class Cleaned:
    """What was written. `bad_path` is None if no row is bad."""

    path: str
    bad_path: str | None
    rows: int  # of the source
    good: int
    bad: int
    first: tuple[str, ...]  # the first bad rows as "line: reason"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def clean(
    source: Path, to: Path, format: str | None = None, config: Config | None = None, *, force: bool = False
) -> Cleaned:
    """Copies the good rows of a data file as they are to a file of the same type, and the bad ones beside it, as JSON
    lines with `line`, `reason` and `row`; no row is in both or in none.

    `format`: a name, see `RowFormat`; None: that of the file's data set in the config, or "auto". The columns are those
    of the data set. With a config, rows that its chat template or tokenizer refuses are bad, too. Both files are
    complete or unchanged.

    Raises UserError as `formats.read`, and if no row is good, if a file is in the way and not to be replaced (`force`),
    or if the source changes meanwhile.
    """
    _check_paths(source, to, force)
    bad_path = to.with_suffix(BAD)
    try:
        (state,) = states_of([source])
    except OSError as error:
        raise UserError(f"{source} cannot be read: {error.strerror or error}") from error
    tally = _checked(source, _format_of(source, format, config), config)
    if tally.bad == tally.total:
        raise UserError(f"{source}: {tally.report()}\nNothing was written: set the format or the chat template.")
    reasons = {int(line): reason for line, _, reason in (text.partition(": ") for text in tally.first)}
    with ExitStack() as files:
        good, bad = (files.enter_context(_new(path, source)) for path in (to, bad_path))
        with phase(f"copying {source.name}", tally.total, "row") as copying:
            copied = _copy(source, good, bad, reasons, copying)
        if copied + len(reasons) != tally.total or FileState.of(source) != state:
            raise _changed(source)
    if not reasons:
        bad_path.unlink()
    first = tuple(tally.first[: formats.SHOWN])
    return Cleaned(str(to), str(bad_path) if reasons else None, tally.total, copied, tally.bad, first)


def _changed(source: Path) -> UserError:
    return UserError(f"{source} was changed while it was read: start again when no program writes it")


def _check_paths(source: Path, to: Path, force: bool) -> None:
    kind = kind_of(source)
    if source.is_dir():
        raise UserError(f"{source} is a folder: clean its files one by one")
    if kind == ".txt":
        raise UserError(f"{source}: a text file is one document, which has no rows to leave out")
    if to.is_dir():
        raise UserError(f"{to} is a folder: name the file to write in it")
    if kind_of(to) != kind:
        raise UserError(f"{to}: rows are copied as they are, so its name must end with {source.suffix or kind}")
    for path in (to, to.with_suffix(BAD)):
        if path.exists() and source.exists() and path.samefile(source):
            raise UserError(f"{path} is the file to clean itself: name another file")
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is not a regular file: name another file")
        if path.exists() and not force:
            raise UserError(f"{path} exists: name another file, or add --force to replace it")


def _format_of(source: Path, format: str | None, config: Config | None) -> RowFormat:
    """How the data set that a file belongs to is read, if that is in the config; with another format, if one is given.

    Raises UserError if that format does not have the names of the data set's columns.
    """
    found = _in_config(source, config)
    if format is None:
        return found
    if format in NAMES and (fault := fault_of(format, dict(found.columns))):
        raise UserError(f"{source}: {fault}: use the format of the config")
    return replace(found, name=format)


def _in_config(source: Path, config: Config | None) -> RowFormat:
    if config is None:
        return RowFormat()
    for given in (*config.data.train, *config.data.val):
        with suppress(UserError, OSError):  # of a set that is built in, or cannot be read
            files = choose(given.path, given.split, follow_links=config.data.follow_links).files
            if any(file.samefile(source) for file in files):
                return RowFormat.of(given, config.data)
    return RowFormat()


def _checked(source: Path, format: RowFormat, config: Config | None) -> Tally:
    """The counts of all rows, with the reasons of all bad ones."""
    tally = Tally(shown=sys.maxsize)
    with phase("reading data", unit="") as reading:
        watch = Watch([source], lambda progress: progress.show(reading))
        watch.begin(0, tally)
        examples = watch.examples(formats.read(source, format, tally))
        for _ in watch.documents(examples if config is None else _documents(examples, config, tally)):
            progressed()
    return tally


def _documents(examples: Iterator[Example], config: Config, tally: Tally) -> Iterator[Document]:
    """Renders and tokenizes examples as training does."""
    from rptrain.data.datasets import find_tokenizer
    from rptrain.data.excerpt import Settings  # imports torch
    from rptrain.data.loader import load_tokenizer
    from rptrain.models.locate import locate

    model_dir = locate(config.model.path)
    tokenizer = find_tokenizer(config, model_dir) or load_tokenizer(model_dir)
    return Settings.of(config.data, tokenizer).tokenizing().documents(examples, tally)


@contextmanager
def _new(path: Path, source: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` at the end of the block, for the same users as the source."""
    with replacing(path) as file:
        change_mode(file.fileno(), source.stat().st_mode & 0o666 | 0o200)
        yield file


def _copy(source: Path, good: BinaryIO, bad: BinaryIO, reasons: Mapping[int, str], copying: Phase) -> int:
    """Writes all rows of a file, to `bad` those that have a reason. Returns the number of the others. `copying` counts
    the rows.
    """

    def left_out(number: int, row: object) -> None:
        bad.write(f'{{"line": {number}, "reason": {json_text(reasons[number])}, "row": {json_text(row)}}}\n'.encode())

    if kind_of(source) in TABLES:
        return copy_rows(source, good, reasons.keys(), left_out, copying)
    return _copy_texts(source, good, reasons.keys(), left_out, copying)


def _copy_texts(
    source: Path, good: BinaryIO, without: Set[int], left_out: Callable[[int, object], None], copying: Phase
) -> int:
    with open_regular(source) as file:
        marked = file.read(len(BOM)) == BOM
        file.seek(0)
        listed = kind_of(source) == ".jsonl" and is_list(file)
    copied, texts = 0, texts_of(source)
    if kind_of(source) == ".csv":
        good.write((BOM if marked else b"") + next(texts)[1])
    for number, row in rows_of(source):
        text = next((text for place, text in texts if place == number), None)
        if text is None:
            raise _changed(source)
        copying.done = number
        if number in without:
            left_out(number, as_text(text).rstrip("\r\n") if isinstance(row, ValueError) else row)
            continue
        good.write((b",\n" if copied else b"[\n") + text if listed else text)
        copied += 1
    good.write(b"\n]\n" if listed else b"")
    return copied
