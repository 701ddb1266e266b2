"""Paths that begin with a home directory."""

import os
from pathlib import Path

from rptrain.utils.errors import UserError


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with the home directory in place of "~" or "~user". Raises UserError as `expanded_text`."""
    return Path(expanded_text(os.fspath(path)))


def expanded_text(path: str) -> str:
    """As `expanded`, and otherwise unchanged. Raises UserError if the user or the home directory is unknown."""
    found = os.path.expanduser(path)
    if not found.startswith("~"):
        return found
    home = path.partition("/")[0]
    if home == "~":
        raise UserError(f"{path}: the home directory is unknown: set HOME, or write the full path")
    raise UserError(
        f'{path}: the user "{home[1:]}" does not exist: write the full path, or ./{path} if its name begins with ~'
    )
