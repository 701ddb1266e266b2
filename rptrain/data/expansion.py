"""How much Parquet and Arrow files are decoded to, before their rows are read.

Compression, dictionaries and lists of views may repeat a value without end, and what a file says about its sizes may be
wrong. So values are counted as they are stored, by their lengths and how often each of them occurs.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rptrain.utils.errors import UserError
from rptrain.utils.units import format_bytes

RATIO = 500  # limit of the decoded size over the size on disk; a prompt of 2 KB in rows of 20 bytes gives about 100
ALWAYS = 256 << 20  # decoded bytes that are accepted, however small the file is
FEW = 16  # stored bytes per value of a column that refers to a dictionary
NUMBER = 8  # bytes of a value without a length


class Expansion:
    """Counts what a file is decoded to. `add` raises UserError if it is more than RATIO and ALWAYS permit."""

    def __init__(self, path: Path):
        self._path, self._size = path, path.stat().st_size
        self._decoded = 0

    def add(self, decoded: int) -> None:
        self._decoded += decoded
        if self._decoded > max(ALWAYS, RATIO * self._size):
            raise UserError(
                f"{self._path}: the {format_bytes(self._size)} of this file are decoded to at least "
                f"{format_bytes(self._decoded)}, more than {RATIO} times as much: leave repeated rows out, or write "
                "the rows as JSON Lines (.jsonl)"
            )


def check_parquet(path: Path, rows_at_once: int) -> Iterator[None]:
    """Yields now and then, because decoding may take long. Raises UserError as Expansion does, and errors of Arrow.

    Metadata counts a text once which a dictionary repeats. So text is decoded here, except for columns that store at
    most FEW bytes per value: most of these refer to dictionaries, and are read as such.
    """
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path, pre_buffer=False) as file:
        groups = [file.metadata.row_group(index) for index in range(file.num_row_groups)]
        columns = [file.schema.column(index) for index in range(file.metadata.num_columns)]
    others, texts, repeated = 0, dict[str, int](), list[str]()
    for index, column in enumerate(columns):
        chunks = [group.column(index) for group in groups]
        values = sum(chunk.num_values for chunk in chunks)
        stored = sum(chunk.total_uncompressed_size for chunk in chunks)
        if column.physical_type != "BYTE_ARRAY":
            others += max(stored, values * (column.length or NUMBER))
            continue
        texts[column.path] = stored
        if stored <= FEW * values:
            repeated.append(column.path)
    Expansion(path).add(others + sum(texts.values()))  # at least
    if not texts:
        return
    expansion = Expansion(path)
    expansion.add(others)
    with ParquetFile(path, pre_buffer=False, read_dictionary=repeated) as file:
        for group in range(len(groups)):  # Arrow cannot join the dictionaries of several groups in nested columns
            for batch in file.iter_batches(rows_at_once, [group], list(texts), use_threads=False):
                expansion.add(sum(map(decoded_bytes, batch.columns)))
                yield


def check_arrow(path: Path, batches: Iterable[Any]) -> Iterator[None]:
    """Yields after each of the batches, which are validated. Raises UserError as Expansion does."""
    expansion = Expansion(path)
    for batch in batches:
        expansion.add(sum(map(decoded_bytes, batch.columns)))
        yield


def decoded_bytes(array: Any) -> int:
    """The bytes of all values, also of those that are stored once and referred to several times; at least about."""
    from pyarrow import BaseExtensionType, types

    kind = array.type
    if isinstance(kind, BaseExtensionType):
        return decoded_bytes(array.storage)
    if types.is_dictionary(kind):
        if not _is_text(kind.value_type):  # at most
            return len(array) * decoded_bytes(array.dictionary)
        return _sum(_lengths(array.dictionary).take(array.indices)) + 8 * len(array)
    if types.is_run_end_encoded(kind):
        return len(array) * decoded_bytes(array.values)
    if types.is_string_view(kind) or types.is_binary_view(kind):
        return sum(text.as_buffer().size for text in array if text.is_valid) + 16 * len(array)
    if _is_text(kind):
        return _sum(_lengths(array)) + 8 * len(array)
    if types.is_struct(kind):
        return len(array) + sum(map(decoded_bytes, array.flatten()))
    if types.is_map(kind):
        start, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
        return sum(decoded_bytes(part.slice(start, end - start)) for part in (array.keys, array.items))
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        places = zip(array.offsets.to_pylist(), array.sizes.to_pylist(), strict=True)
        return sum(8 + decoded_bytes(array.values.slice(start, size)) for start, size in places)
    if types.is_nested(kind) and not types.is_union(kind):  # lists
        return 8 * len(array) + decoded_bytes(array.flatten())
    return array.nbytes


def _lengths(texts: Any) -> Any:
    from pyarrow.compute import call_function

    return call_function("binary_length", [texts])


def _sum(numbers: Any) -> int:
    from pyarrow.compute import call_function

    return call_function("sum", [numbers]).as_py() or 0


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    texts = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    return any(is_text(kind) for is_text in texts)
