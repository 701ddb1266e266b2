"""Rows of Parquet and Arrow files, decoded in a child process with limits: a kilobyte can be decoded to gigabytes.

Compression, dictionaries and lists of views may repeat a value without end, and what a file says about its sizes may be
wrong. So the limit of memory holds for whatever Arrow does, and sizes are known before values become Python objects.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rptrain.data.expansion import check_arrow, check_parquet, decoded_bytes
from rptrain.data.structs import convert_rows
from rptrain.utils.errors import UserError
from rptrain.utils.files import open_regular
from rptrain.utils.limited import Limited, call, stream
from rptrain.utils.text import not_utf8
from rptrain.utils.units import format_bytes

if TYPE_CHECKING:
    from pyarrow import NativeFile

Row = dict[str, Any] | ValueError  # the error of a row with text that is not UTF-8

ROWS_AT_ONCE = 1024  # maximum number of rows in memory
FEWER = (ROWS_AT_ONCE, 32, 1)  # rows of a Parquet file that are decoded at once, while more take too much memory
BYTES_AT_ONCE = 1 << 24  # of the rows in memory, if they are several
MOST = 256 << 20  # bytes of a row
SECONDS, MEMORY = 10.0, 3 << 29  # for the rows in memory, and for a page of Parquet: 1,024 rows in many files


def parquet_rows(path: Path) -> Iterator[Row]:
    """Raises UserError, and OSError if the file cannot be read."""
    return _decoded(path, _read_parquet, MEMORY)


def arrow_rows(path: Path) -> Iterator[Row]:
    """Rows of an Arrow stream, which `datasets` writes, or of an Arrow file. Raises as `parquet_rows`."""
    return _decoded(path, _read_arrow, MEMORY + path.stat().st_size)  # it is mapped into memory


def rows_in(path: Path) -> int | None:
    """The number of rows that a Parquet or Arrow file says it has; None if that takes too long to find out.

    Raises UserError if the file cannot be read, and OSError.
    """
    open_regular(path).close()
    try:
        return call(_count_rows, path, seconds=SECONDS, memory=MEMORY + path.stat().st_size)
    except Limited:
        return None


def _count_rows(path: Path) -> int:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        if path.suffix.lower() == ".parquet":
            with ParquetFile(path, pre_buffer=False) as file:
                return file.metadata.num_rows
        with open_arrow(path) as source:
            return sum(len(batch) for batch in _opened(source))
    except pyarrow.ArrowMemoryError:
        raise
    except (pyarrow.ArrowException, ValueError) as error:
        raise _unreadable(error, path, "a table") from error


def open_arrow(path: Path) -> "NativeFile":
    """Opens an Arrow file: mapped, if its file system can do that. OSError if it cannot be read."""
    import pyarrow

    try:
        return pyarrow.memory_map(os.fspath(path))
    except OSError:  # without an error number
        return pyarrow.OSFile(os.fspath(path))


def check_columns(path: Path, names: list[str]) -> None:
    if twice := sorted(name for name, count in Counter(names).items() if count > 1):
        raise UserError(
            f"{path}: there is more than one column named {', '.join(map(repr, twice))}: rename all but one"
        )


def _decoded(path: Path, read: Any, memory: int) -> Iterator[Row]:
    open_regular(path).close()  # the child process would wait for a pipe without an end
    number = 0
    try:
        for rows in stream(read, path, seconds=SECONDS, memory=memory):
            number += len(rows)
            yield from rows
    except Limited as error:
        raise UserError(
            f"{path}: decoding the rows after row {number:,} {error}: write the file with shorter rows, in smaller row "
            "groups or batches"
        ) from None


def _read_parquet(path: Path) -> Iterator[list[Row]]:
    """Lists of rows; empty ones while sizes are counted, as the limit of time is for an item."""
    import pyarrow
    from pyarrow.parquet import ParquetFile

    counted, done = False, 0
    for count in FEWER:
        try:
            if not counted:
                for _ in check_parquet(path, count):
                    yield []
                counted = True
            with ParquetFile(path, pre_buffer=False) as file:
                check_columns(path, file.schema_arrow.names)
                skipped = 0
                for batch in file.iter_batches(count, use_threads=False):
                    rest = batch.slice(max(0, done - skipped))
                    skipped += len(batch)
                    for rows in _lists(path, rest, done):
                        done += len(rows)
                        yield rows
            return
        except pyarrow.ArrowMemoryError:
            continue
        except (pyarrow.ArrowException, ValueError, OverflowError) as error:  # the last two: dates Python does not have
            raise _unreadable(error, path, "a Parquet") from error
    raise MemoryError


def _read_arrow(path: Path) -> Iterator[list[Row]]:
    """Lists of rows, as `_read_parquet`."""
    import pyarrow

    done = 0
    try:
        with open_arrow(path) as source:
            for _ in check_arrow(path, _batches(path, source)):
                yield []
            for batch in _batches(path, source):
                for rows in _lists(path, batch, done):
                    done += len(rows)
                    yield rows
    except pyarrow.ArrowMemoryError:
        raise
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        raise _unreadable(error, path, "an Arrow") from error


def _opened(source: Any) -> Iterable[Any]:
    from pyarrow import ipc

    options = ipc.IpcReadOptions(use_threads=False)
    source.seek(0)
    if source.read(6) == b"ARROW1":
        file = ipc.open_file(source, options=options)
        return (file.get_batch(index) for index in range(file.num_record_batches))
    source.seek(0)
    return ipc.open_stream(source, options=options)


def _batches(path: Path, source: Any) -> Iterator[Any]:
    for batch in _opened(source):
        batch.validate(full=True)  # all offsets are within the data; those of Parquet always are
        check_columns(path, batch.schema.names)
        yield batch


def _unreadable(error: Exception, path: Path, kind: str) -> Exception:
    return error if isinstance(error, UserError) else UserError(f"{path}: not {kind} file that can be read: {error}")


def _lists(path: Path, batch: Any, done: int) -> Iterator[list[Row]]:
    """Rows without columns of times and dates, which no format uses and Python cannot always represent.

    `done`: the rows of the file before the batch.
    """
    from pyarrow.types import is_temporal

    batch = batch.select([field.name for field in batch.schema if not is_temporal(field.type)])
    for start in range(0, len(batch), ROWS_AT_ONCE):
        waiting = [batch.slice(start, ROWS_AT_ONCE)]
        while waiting:
            some = waiting.pop()
            size = sum(map(decoded_bytes, some.columns))
            if size > BYTES_AT_ONCE and len(some) > 1:
                waiting += [some.slice(len(some) // 2), some.slice(0, len(some) // 2)]
            elif size > MOST:
                raise UserError(
                    f"{path}: row {done + 1:,} is decoded to {format_bytes(size)}, more than {format_bytes(MOST)}: "
                    "split it into several rows"
                )
            else:
                yield _decoded_rows(some)
                done += len(some)


def _decoded_rows(batch: Any) -> list[Row]:
    """The rows of a batch; null fields of structs are left out."""
    try:
        return [*convert_rows(batch.to_pylist(), batch.schema)]
    except UnicodeDecodeError as error:
        if len(batch) == 1:
            return [ValueError(f"{not_utf8(error.object[error.start])}: write the text as UTF-8")]
        half = len(batch) // 2
        return _decoded_rows(batch.slice(0, half)) + _decoded_rows(batch.slice(half))
