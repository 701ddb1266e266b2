"""Accumulation of gradient rows by token on the CPU, in native code (embedding_grads.c) or with torch."""

import ctypes
from concurrent.futures import Executor
from functools import partial

import torch
from torch import Tensor

from rptrain.utils import native
from rptrain.utils.native import finish, suffix

LINE = 64  # bytes of a cache line
ROWS = 64  # rows per part if no row occurs twice
FALLBACK_TOKENS = 256  # temporaries stay in the caches


class _Job(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("next", "part", "count", "columns", "stride")),
        *((name, ctypes.c_void_p) for name in ("index", "source", "gradient", "sums", "table")),
    )


def _library() -> ctypes.CDLL | None:
    return native.library("rptrain.engine.optim._embedding_grads")


def row_stride(columns: int, dtype: torch.dtype) -> int:
    """Elements from one row of sums to the next: whole cache lines, so that threads that split columns share none."""
    line = LINE // dtype.itemsize
    return -(-columns // line) * line


def columns_each(columns: int, dtype: torch.dtype, threads: int) -> int:
    """The number of gradient columns that a thread sums: whole cache lines."""
    line = LINE // dtype.itemsize
    return -(-columns // (threads * line)) * line


class CpuRows:
    """Adds rows at given indices, on the threads of a pool.

    Sums are [R, S] with S = `row_stride`, rows of D columns and padding, in float64 for float64 and in float32
    otherwise. Results depend neither on `threads` nor on whether native code (`native`) runs. When a call returns or
    raises, it has ended on all threads.
    """

    def __init__(self, pool: Executor, threads: int, *, force_fallback: bool = False) -> None:
        self._pool, self._threads = pool, threads
        self._library = None if force_fallback else _library()

    @property
    def native(self) -> bool:
        return self._library is not None

    def zero(self, sums: Tensor) -> None:
        """Sets contiguous sums to zero."""
        finish(self._pool, [part.zero_ for part in sums.view(-1).chunk(self._threads)])

    def add(self, sums: Tensor, places: Tensor, gradient: Tensor) -> None:
        """Adds row t of `gradient` [T, D] to row places[t] of `sums`, for each t in order; `places` is int64 [T]."""
        columns = gradient.shape[1]
        width = columns_each(columns, gradient.dtype, self._threads)
        if self._library:
            tensors = {"index": places, "gradient": gradient, "sums": sums}
            sizes = {"count": len(places), "columns": columns, "stride": sums.shape[1]}
            self._run(f"rows_add_{suffix(gradient.dtype)}", tensors, sizes, columns, width)
        else:
            parts = zip(sums[:, :columns].split(width, 1), gradient.split(width, 1), strict=True)
            finish(self._pool, [partial(_add, part, places, rows) for part, rows in parts])

    def merge(self, sums: Tensor, to: Tensor, source: Tensor) -> None:
        """Adds row source[i] of `sums` to its row to[i]; both are int64 [R], and no row is among them twice."""
        if self._library:
            tensors = {"index": to, "source": source, "sums": sums}
            sizes = {"count": len(to), "columns": sums.shape[1], "stride": sums.shape[1]}
            self._run(f"rows_merge_{suffix(sums.dtype)}", tensors, sizes, len(to), ROWS)
        else:
            parts = zip(to.split(ROWS), source.split(ROWS), strict=True)
            finish(self._pool, [partial(_merge, sums, *part) for part in parts])

    def apply(self, sums: Tensor, source: Tensor, rows: Tensor, table: Tensor) -> None:
        """Adds row source[i] of `sums` to row rows[i] of `table` [V, D], rounded once.

        Both are int64 [R]; `rows` has no duplicates.
        """
        columns = table.shape[1]
        if self._library:
            tensors = {"index": rows, "source": source, "sums": sums, "table": table}
            sizes = {"count": len(rows), "columns": columns, "stride": sums.shape[1]}
            self._run(f"rows_apply_{suffix(table.dtype)}", tensors, sizes, len(rows), ROWS)
        else:
            parts = zip(source.split(ROWS), rows.split(ROWS), strict=True)
            finish(self._pool, [partial(_apply, sums[:, :columns], part, at, table) for part, at in parts])

    def gather(self, sums: Tensor, rows: Tensor, out: Tensor) -> None:
        """Copies rows [R] of `sums` to `out` [R, S]; `rows` is int64 [R]."""
        parts = zip(rows.chunk(self._threads), out.chunk(self._threads), strict=True)
        finish(self._pool, [partial(torch.index_select, sums, 0, part, out=to) for part, to in parts])

    def clear(self, table: Tensor, rows: Tensor) -> None:
        """Sets rows [R] of `table` [V, D] to zero; `rows` is int64 [R]."""
        if self._library:
            sizes = {"count": len(rows), "stride": table.shape[1] * table.itemsize}
            self._run("rows_clear", {"index": rows, "table": table}, sizes, len(rows), ROWS)
        else:
            finish(self._pool, [partial(table.index_fill_, 0, part, 0) for part in rows.split(ROWS)])

    def _run(self, name: str, tensors: dict[str, Tensor], sizes: dict[str, int], total: int, part: int) -> None:
        """Splits `total` columns or rows into parts of `part`, which the threads process."""
        assert all(tensor.is_cpu and tensor.is_contiguous() for tensor in tensors.values())
        assert all(tensors[name].dtype == torch.int64 for name in ("index", "source") if name in tensors)
        job = _Job(part=part, **sizes, **{name: tensor.data_ptr() for name, tensor in tensors.items()})
        call = partial(getattr(self._library, name), ctypes.byref(job))
        finish(self._pool, [call] * min(self._threads, -(-total // part)))


def _add(sums: Tensor, places: Tensor, gradient: Tensor) -> None:
    for part, rows in zip(places.split(FALLBACK_TOKENS), gradient.split(FALLBACK_TOKENS), strict=True):
        sums.index_add_(0, part, rows.to(sums.dtype))


def _merge(sums: Tensor, to: Tensor, source: Tensor) -> None:
    sums[to] = sums[to] + sums[source]


def _apply(sums: Tensor, source: Tensor, rows: Tensor, table: Tensor) -> None:
    table[rows] = (table[rows].to(sums.dtype) + sums[source]).to(table.dtype)
