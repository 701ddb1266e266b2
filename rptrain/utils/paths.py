"""Paths that begin with a home directory."""

import os
from pathlib import Path

from rptrain.utils.errors import UserError


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with the home directory in place of "~" or "~user". Raises UserError as `expanded_text`."""
    return Path(expanded_text(os.fspath(path)))


def expanded_text(path: str) -> str:
    """As `expanded`, and otherwise unchanged. Raises UserError if there is no such user, or no home directory."""
    found = os.path.expanduser(path)
    if not found.startswith("~"):
        return found
    home = path.partition("/")[0]
    problem = f'there is no user "{home[1:]}"' if home[1:] else "the home directory is unknown"
    raise UserError(f"{path}: {problem}: write the full path, or ./{path} if its name begins with ~")
