"""Reading of files that may be something else: a pipe without a writer, a device, or more than fits in memory."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import ENXIO
from hashlib import sha256
from io import BufferedReader, BytesIO, TextIOWrapper
from pathlib import Path

from rptrain.utils import phases
from rptrain.utils.errors import UserError
from rptrain.utils.liveness import progressed
from rptrain.utils.units import format_bytes

PIECE = 1 << 20  # bytes hashed at a time
SMALL = 64 << 20  # bytes: more than configs, templates and manifests have


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Opens a file to read bytes. Raises UserError if it is not a regular file, and otherwise OSError as `open`."""
    return open(path, "rb", opener=regular)


def regular(path: str, flags: int) -> int:
    """An opener for `open`. Raises UserError, without waiting, for a pipe, a device or a socket."""
    irregular = f"{path} is not a regular file but a pipe, a device or a socket: put a file there"
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == ENXIO:  # a socket, or a device that is not there
            raise UserError(irregular) from None
        raise
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):  # for which `open` raises IsADirectoryError
        return descriptor
    os.close(descriptor)
    raise UserError(irregular)


def read_small(path: str | os.PathLike[str], limit: int = SMALL) -> bytes:
    """The content of a file. Raises UserError if it is larger than `limit` or not a regular file; else OSError."""
    with open_regular(path) as file:
        check_size(file, path, limit)
        return file.read(limit)


def read_small_text(path: str | os.PathLike[str], encoding: str = "utf-8", limit: int = SMALL) -> str:
    """The text of a file, with line ends as `Path.read_text` reads them.

    Raises as `read_small`, and UnicodeDecodeError.
    """
    return TextIOWrapper(BytesIO(read_small(path, limit)), encoding).read()


def file_sha256(file: BufferedReader) -> str:
    """The SHA-256 of an open file from its position on, in hexadecimal."""
    digest = sha256()
    while piece := file.read(PIECE):
        digest.update(piece)
        progressed()
        phases.read(len(piece))
    return digest.hexdigest()


def check_holes(file: BufferedReader, path: str | os.PathLike[str]) -> None:
    """UserError if an open file has holes, which read as zeros: no text has them. Its position must be 0, and stays.

    Nothing is found on file systems that do not tell where holes are.
    """
    hole = size = os.fstat(file.fileno()).st_size
    with suppress(OSError):
        hole = os.lseek(file.fileno(), 0, os.SEEK_HOLE) if size else 0
    if hole < size:
        raise UserError(
            f"{Path(path)} is incomplete: nothing was written at byte {hole:,} of its {format_bytes(size)}; "
            "copy or write it again"
        )
    file.seek(0)


def check_size(file: BufferedReader, path: str | os.PathLike[str], limit: int = SMALL) -> None:
    """UserError if an open file is larger than `limit`."""
    if (size := os.fstat(file.fileno()).st_size) > limit:
        raise UserError(
            f"{Path(path)} is too large: {format_bytes(size)}, and at most {format_bytes(limit)} can be read; "
            "put the right file there"
        )


def change_mode(file: Path | int, mode: int) -> None:
    """Gives a file of this user, or an open one, other permissions; nothing on file systems without permissions."""
    with suppress(OSError):
        os.chmod(file, mode)


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Give the errors of the system in the block this path: those of writes, unlike those of `open`, have none."""
    try:
        yield
    except OSError as error:
        error.filename = os.fspath(path)
        raise
