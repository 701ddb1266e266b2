"""Rows of data files, one at a time: JSON, CSV and plain text; Parquet and Arrow in `tables.py`."""

import codecs
import csv
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import IO, Any, AnyStr

from rptrain.data import json_list, tables
from rptrain.utils.errors import UserError
from rptrain.utils.files import check_holes, open_regular, regular
from rptrain.utils.objects import unique_keys, whole_number
from rptrain.utils.text import not_utf8
from rptrain.utils.units import format_bytes

Rows = Iterator[tuple[int, Any]]  # line or number, from 1, and the row, or the ValueError of an unreadable row

MOST = 256 << 20  # bytes of a line, or characters
WHOLE = 2 << 30  # bytes of a text file, which is read whole
COUNTED = json_list.PIECE  # bytes of a JSON list whose rows are counted to estimate those of the whole
BOM = codecs.BOM_UTF8
TOO_DEEP = "lists or objects are nested too deeply: a row is an object with text or messages"
# The beginnings of files that are not text.
BEGINNINGS = {
    b"\x1f\x8b": "compressed (gzip): unpack it",
    b"\x28\xb5\x2f\xfd": "compressed (zstd): unpack it",
    b"\xfd7zXZ": "compressed (xz): unpack it",
    b"\xff\xfe": "UTF-16: write it as UTF-8",
    b"\xfe\xff": "UTF-16: write it as UTF-8",
    b"PAR1": "Parquet: name it .parquet",
}


def rows_of(path: Path, characters: int | None = None) -> Rows:
    """All rows of a file, by its suffix; JSON if that is unknown. Raises UserError if the file cannot be read.

    `characters`: how much of a text file is read; None: all.
    """
    read = _reader(path)
    try:
        if read not in (_parquet_rows, _arrow_rows):
            _check_beginning(path)
        yield from _beginning(path, characters) if read is _text_document and characters else read(path)
    except UnicodeDecodeError as error:
        raise _not_utf8(path) from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def _not_utf8(path: Path) -> UserError:
    """The error for a file that is not UTF-8, with the line of the first byte that is not."""
    decoder, line = codecs.getincrementaldecoder("utf-8")(), 1
    with open_regular(path) as file:
        try:
            while piece := file.read(COUNTED):
                decoder.decode(piece)
                line += piece.count(b"\n")
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            line += error.object.count(b"\n", 0, error.start)
            return UserError(f"{path}:{line}: {_of_byte(error.object[error.start])}")
    return UserError(f"{path} was changed while it was read: start again when no program writes it")


def _of_byte(byte: int) -> str:
    return f"{not_utf8(byte)}: save the file as UTF-8, for example with `iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW`"


def _check_beginning(path: Path) -> None:
    with open_regular(path) as file:
        check_holes(file, path)
        start = file.read(8)
    for beginning, what in BEGINNINGS.items():
        if start.startswith(beginning):
            raise UserError(f"{path}: this file is {what}")


def _text_document(path: Path) -> Rows:
    _check_whole(path)
    with open(path, encoding="utf-8-sig", opener=regular) as file:
        yield 1, {"text": file.read()}


def _beginning(path: Path, characters: int) -> Rows:
    with open(path, encoding="utf-8-sig", opener=regular) as file:
        yield 1, {"text": file.read(characters)}


def share_of(path: Path, line: int, characters: int) -> float | None:
    """The fraction of a file that its rows up to a line are; of a text file, that these characters are.

    It is estimated as in `Position`. None if it is unknown.
    """
    if _reader(path) is not _text_document:
        return Position(path).share(line)
    with open(path, encoding="utf-8-sig", opener=regular) as text:
        return min(1.0, len(text.read(characters).encode()) / max(path.stat().st_size, 1))


class Position:
    """Finds which fraction of a file its first rows are, again and again while they are read.

    It is computed from bytes, or from rows where a file counts them. Of a JSON list, the number of rows is estimated.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._line, self._offset = 0, 0  # of a file of lines: where the last one ends
        self._has_lines = False
        self._rows: float | None = None  # the number of all, if it is known
        read = _reader(path)
        if read in (_parquet_rows, _arrow_rows):
            self._rows = tables.rows_in(path)
        elif read is _text_document:
            self._rows = 1.0
        else:
            with open_regular(path) as file:
                self._has_lines = read is not _json_rows or not is_list(file)
                if not self._has_lines:
                    start = file.read(COUNTED)
                    self._rows = _complete_values(start) * os.fstat(file.fileno()).st_size / len(start)

    def share(self, line: int) -> float | None:
        """The fraction of the file that its rows up to a line are, which must not be before that of the last call.

        None if it is unknown. Raises UserError if the file cannot be read, and OSError.
        """
        if not self._has_lines:
            return min(1.0, line / self._rows) if self._rows else None
        with open_regular(self._path) as file:
            file.seek(self._offset)
            for _ in range(line - self._line):
                file.readline()
            self._line, self._offset = line, file.tell()
            return min(1.0, self._offset / max(os.fstat(file.fileno()).st_size, 1))


def _complete_values(beginning: bytes) -> int:
    """The number of complete values at the beginning of a JSON list, which may be cut off."""
    count = 0
    with suppress(ValueError, RecursionError):
        for _ in json_list.values(BytesIO(beginning)):
            count += 1
    return count


def _check_whole(path: Path) -> None:
    if (size := path.stat().st_size) > WHOLE:
        whole = f"at most {format_bytes(WHOLE)} are read whole: split it into several files"
        raise UserError(f"{path} has {format_bytes(size)}, and {whole}")


def lines_of(path: Path, file: IO[AnyStr]) -> Iterator[AnyStr]:
    """The lines of an open file. Raises UserError for a line of more than MOST."""
    line = 0
    while data := file.readline(MOST + 1):
        line += 1
        if len(data) > MOST:
            raise UserError(
                f"{path}:{line}: this line has more than {format_bytes(MOST)}: write a row on each line, and split "
                "rows that are so long"
            )
        yield data


def is_list(file: IO[bytes]) -> bool:
    """Whether an open JSON file holds a list, instead of lines of objects. Its position must be 0, and stays."""
    start = file.read(4096).removeprefix(BOM).lstrip()
    file.seek(0)
    return start.startswith(b"[")


def _json_rows(path: Path) -> Rows:
    """Rows of a JSON list, or of lines of objects."""
    with open_regular(path) as file:
        if is_list(file):
            try:
                yield from json_list.values(file)
            except UnicodeDecodeError:
                raise
            except ValueError as error:
                raise UserError(f"{path}: not a JSON list: {error}") from error
            except RecursionError as error:
                raise UserError(f"{path}: {TOO_DEEP}") from error
            return
        for line, data in enumerate(lines_of(path, file), 1):
            if not data.strip():
                continue
            try:
                yield line, _json_value(data)
            except json.JSONDecodeError as error:
                several = "an object over several lines: write each on one line, or all as one JSON list"
                wrong = f"not valid JSON: {error.msg} in column {error.colno:,}"
                yield line, ValueError(several if data.strip() == b"{" else wrong)
            except UnicodeDecodeError as error:
                yield line, ValueError(_of_byte(error.object[error.start]))
            except ValueError as error:  # a duplicate key, or a number of too many digits
                yield line, error
            except RecursionError:
                yield line, ValueError(TOO_DEEP)


def _json_value(line: bytes) -> Any:
    """The value on a line. The line's text is freed at the end: a row may be long."""
    text = line.rstrip().decode("utf-8-sig", "surrogatepass")
    return json.loads(text, object_pairs_hook=unique_keys, parse_int=whole_number)


def _csv_rows(path: Path) -> Rows:
    csv.field_size_limit(MOST)  # the default refuses texts of 128 KiB
    with open(path, encoding="utf-8-sig", newline="", errors="surrogateescape", opener=regular) as file:
        reader = csv.reader(lines_of(path, file), strict=True)
        try:
            header = next(reader, [])
            tables.check_columns(path, header)
            for fields in reader:
                if (byte := _first_undecoded("".join(fields))) is not None:
                    yield reader.line_num, ValueError(_of_byte(byte))
                elif len(fields) == len(header):
                    yield reader.line_num, dict(zip(header, fields, strict=True))
                elif fields:
                    yield reader.line_num, ValueError(f"{len(fields)} fields, but {len(header)} columns")
        except csv.Error as error:
            raise UserError(f"{path}:{reader.line_num}: not CSV: {error}") from error


def _first_undecoded(text: str) -> int | None:
    """The first byte of a text that stands in it as a lone surrogate, because it is not UTF-8; None without one."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return ord(text[error.start]) - 0xDC00
    return None


def _parquet_rows(path: Path) -> Rows:
    return enumerate(tables.parquet_rows(path), 1)


def _arrow_rows(path: Path) -> Rows:
    return enumerate(tables.arrow_rows(path), 1)


READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": _json_rows,
    ".ndjson": _json_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".parquet": _parquet_rows,
    ".arrow": _arrow_rows,
    ".txt": _text_document,
}


def kind_of(path: Path) -> str:
    """The first suffix in READERS whose files are read as this one: ".jsonl" for all JSON and for unknown suffixes."""
    read = _reader(path)
    return next(suffix for suffix, reader in READERS.items() if reader is read)


def _reader(path: Path) -> Callable[[Path], Rows]:
    return READERS.get(path.suffix.lower(), _json_rows)
