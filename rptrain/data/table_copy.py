"""Copies of Parquet and Arrow files without some of their rows: in the same format, with the same columns and types."""

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from rptrain.data.read import kind_of
from rptrain.data.tables import open_arrow
from rptrain.utils.errors import UserError
from rptrain.utils.phases import Phase

if TYPE_CHECKING:
    from pyarrow import DataType, RecordBatch

ROWS, NBYTES = 1 << 16, 1 << 26  # rows and bytes of a row group, at most
AT_ONCE = 1024  # rows that are decoded at once

Write = Callable[["RecordBatch"], None]


def copy_rows(
    path: Path, to: BinaryIO, without: Set[int], left_out: Callable[[int, dict[str, Any]], None], copying: Phase
) -> int:
    """Writes the rows of a file that was read before, but for those of some numbers, from 1, for which it calls
    `left_out` with number and row; `copying` counts them. Returns the number of rows written.

    Raises UserError if a row cannot be decoded or written.
    """
    import pyarrow

    copied = number = 0
    try:
        with (_parquet if kind_of(path) == ".parquet" else _arrow)(path, to) as (batches, write):
            for batch in batches:
                start = 0
                for place in range(len(batch) + 1):
                    if place < len(batch) and number + place + 1 not in without:
                        continue
                    if place > start:
                        write(batch.slice(start, place - start))
                        copied += place - start
                    if place < len(batch):
                        left_out(number + place + 1, _row(batch.slice(place, 1)))
                    start = place + 1
                number += len(batch)
                copying.done = number
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: its rows cannot be copied: {error}") from error
    return copied


@contextmanager
def _parquet(path: Path, to: BinaryIO) -> Iterator[tuple[Iterator["RecordBatch"], Write]]:
    """The batches of a Parquet file, and what writes one. Row groups are made of many."""
    import pyarrow
    from pyarrow.parquet import ParquetFile, ParquetWriter

    with ParquetFile(path, pre_buffer=False) as file, ParquetWriter(to, file.schema_arrow) as writer:
        waiting: list[RecordBatch] = []

        def flush() -> None:
            if waiting:
                writer.write_table(pyarrow.Table.from_batches(waiting))
                waiting.clear()

        def write(batch: "RecordBatch") -> None:
            waiting.append(batch)
            if sum(map(len, waiting)) >= ROWS or sum(each.nbytes for each in waiting) >= NBYTES:
                flush()

        yield file.iter_batches(AT_ONCE, use_threads=False), write
        flush()


@contextmanager
def _arrow(path: Path, to: BinaryIO) -> Iterator[tuple[Iterator["RecordBatch"], Write]]:
    """The batches of an Arrow stream or an Arrow file, and what writes one to a file of the same kind."""
    from pyarrow import ipc

    with open_arrow(path) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        reader = ipc.open_file(source) if is_file else ipc.open_stream(source)
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else iter(reader)
        with (ipc.new_file if is_file else ipc.new_stream)(to, reader.schema) as writer:
            yield batches, writer.write_batch


def _row(batch: "RecordBatch") -> dict[str, Any]:
    """The only row of a batch. Text that is not UTF-8 is bytes, and a time that Python does not have is a number."""
    import pyarrow

    row = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            (row[name],) = column.to_pylist()
        except UnicodeDecodeError:
            (row[name],) = column.cast(_with_bytes(column.type)).to_pylist()
        except (OverflowError, ValueError):
            (row[name],) = column.view(pyarrow.int64() if column.type.bit_width == 64 else pyarrow.int32()).to_pylist()
    return row


def _with_bytes(kind: "DataType") -> "DataType":
    """A type with bytes in the place of text, also within lists and structs."""
    import pyarrow
    from pyarrow import types

    if types.is_struct(kind):
        return pyarrow.struct([field.with_type(_with_bytes(field.type)) for field in kind])
    if types.is_list(kind):
        return pyarrow.list_(kind.value_field.with_type(_with_bytes(kind.value_type)))
    if types.is_large_list(kind):
        return pyarrow.large_list(kind.value_field.with_type(_with_bytes(kind.value_type)))
    if types.is_string(kind):
        return pyarrow.binary()
    return pyarrow.large_binary() if types.is_large_string(kind) else kind
