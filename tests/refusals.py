"""File systems that refuse operations in this process, with the errors of those that people have."""

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest


class Refusals:
    """Replaces functions of the system, until the patch is undone. Each method takes an error number."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def syncing_folders(self, code: int) -> None:
        self._where(os, "fsync", code, lambda descriptor: stat.S_ISDIR(os.fstat(descriptor).st_mode))

    def syncing_files(self, code: int) -> None:
        self._where(os, "fsync", code, lambda descriptor: stat.S_ISREG(os.fstat(descriptor).st_mode))

    def locking(self, code: int = errno.ENOLCK) -> None:
        self._where(fcntl, "flock", code, lambda *_: True)

    def modes(self, code: int = errno.EPERM) -> None:
        self._where(os, "chmod", code, lambda *_: True)

    def renaming_folders(self, code: int) -> None:
        """Of those with files."""
        self._where(os, "rename", code, lambda path, _: Path(path).is_dir() and any(Path(path).iterdir()))

    def replacing_files(self, code: int) -> None:
        self._where(os, "replace", code, lambda _, path: os.path.lexists(path))

    def _where(self, owner: Any, name: str, code: int, refused: Callable[..., bool]) -> None:
        function = getattr(owner, name)

        def call(*given: Any, **named: Any) -> Any:
            if refused(*given):
                refuse(code)
            return function(*given, **named)

        self._patch.setattr(owner, name, call)


def refuse(code: int) -> NoReturn:
    raise OSError(code, os.strerror(code))
