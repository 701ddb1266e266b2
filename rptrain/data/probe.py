"""Trial of a tokenizer.json in a child process with limits, before it is loaded.

A few bytes in this file may take any time or memory: an id of 2 billion takes 8 GiB when the tokenizer is written as
text, and a normalizer may put 20 MB before every text. The trial imports no more than `tokenizers`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rptrain.utils.errors import UserError
from rptrain.utils.limited import Limited, stream

SECONDS, MEMORY = 10.0, 3 << 29  # for loading a file; one of 3.5 MB takes 0.2 s
TEXT = "?"

_passed: set[tuple[int, ...]] = set()  # files that need no further trial in this process


class Probe:
    """A trial of the tokenizer.json in a folder, if there is one, which runs from now on.

    Each version of a file is tried once in a process.
    """

    def __init__(self, folder: Path):
        self._path = folder / "tokenizer.json"
        self._stamp = _stamp(self._path)
        tried = self._stamp is None or self._stamp in _passed
        self._running = None if tried else stream(_try, self._path, seconds=SECONDS, memory=MEMORY)

    def wait(self) -> None:
        """Raises UserError if a limit was exceeded. What else is wrong with the file is found when it is loaded."""
        if self._stamp is None or self._running is None:
            return
        try:
            next(self._running)
        except Limited as error:
            raise UserError(
                f"{self._path}: loading this tokenizer {error}: copy the model's own tokenizer.json there"
            ) from None
        next(self._running, None)  # returns the child process
        _passed.add(self._stamp)


@contextmanager
def panics(name: str) -> Iterator[None]:
    """Raises UserError in place of a panic of `tokenizers`, as of a regular expression that takes too many steps."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of Rust; its class has no public name
            raise
        raise UserError(f"{name}: the tokenizer fails: {error}; copy the model's own tokenizer.json there") from None


def _try(path: Path) -> Iterator[None]:
    """Does what a run does with every tokenizer: loads it, uses it, and writes it as text, of which it takes a hash."""
    from tokenizers import Tokenizer

    try:
        with panics(str(path)):
            tokenizer = Tokenizer.from_file(str(path))
            tokenizer.encode(TEXT)
            tokenizer.to_str()
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 (of Rust, without a class of its own)
        pass
    yield


def _stamp(path: Path) -> tuple[int, ...] | None:
    if not path.is_file():
        return None
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
