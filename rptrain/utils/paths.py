"""Paths that begin with a home directory, that must not lead out of a folder, or where something will be written."""

import errno
import os
import re
from pathlib import Path

from rptrain.utils.errors import UserError

RUNS = Path("runs")  # the folder of runs, by default
REPOSITORY = re.compile(r"(models|datasets|spaces)--")  # the start of a repository's name in Hugging Face's cache


def expanded(path: str | os.PathLike[str], source: str = "") -> Path:
    """The path with the home directory in place of "~" or "~user". Raises UserError as `expanded_text`."""
    return Path(expanded_text(os.fspath(path), source))


def expanded_text(path: str, source: str = "") -> str:
    """As `expanded`, and otherwise unchanged. Raises UserError if the user or the home directory is unknown.

    `source`: the environment variable that holds the path, for the message.
    """
    found = os.path.expanduser(path)
    if not found.startswith("~"):
        return found
    named = f"{source}: {path}" if source else path
    home = path.partition("/")[0]
    if home == "~":
        raise UserError(f"{named}: the home directory is unknown: set HOME, or write the full path")
    raise UserError(
        f'{named}: the user "{home[1:]}" does not exist: write the full path, or ./{path} if its name begins with ~'
    )


def from_here(path: Path) -> Path:
    """The path relative to the current directory if it is inside, otherwise the absolute path."""
    place, here = path.absolute(), Path.cwd()
    return place.relative_to(here) if place.is_relative_to(here) else place


def from_environment(variable: str, default: str) -> Path:
    """The expanded path in an environment variable, or the default if it is unset or empty. UserError as above."""
    return expanded(os.environ.get(variable) or default, variable)


def inside(folder: str | os.PathLike[str], name: str | os.PathLike[str]) -> Path:
    """The path of a file or a folder in a folder, both of which may be missing.

    UserError if it is a link that leads out of the folder, or is reached by one. The folder may itself be a link.
    """
    path = Path(folder, name)
    if not leads_inside(folder, path):
        raise UserError(
            f"{path} leads to {os.path.realpath(path)}, outside of {os.fspath(folder)}: put the file or folder there "
            "instead of a link"
        )
    return path


def leads_inside(folder: str | os.PathLike[str], path: str | os.PathLike[str]) -> bool:
    """Whether a path, with all its links followed, is in the folder or is the folder."""
    place = os.path.realpath(folder)
    try:
        return os.path.commonpath((place, os.path.realpath(path))) == place
    except ValueError:  # a name that no file can have, for example with a null character
        return True


def leads_out(folder: str | os.PathLike[str], path: str | os.PathLike[str]) -> bool:
    """Whether a path in a folder of a model or of data leads out of it, not counting Hugging Face's cache: in a
    snapshot there, links lead to the repository's folder `blobs`, which is not a link.
    """
    place, blobs = Path(os.path.realpath(folder)), list[Path]()
    for snapshots in (place, *place.parents):
        if snapshots.name == "snapshots" and REPOSITORY.match(snapshots.parent.name):
            blobs.append(snapshots.with_name("blobs"))
    allowed = (place, *(folder for folder in blobs if not folder.is_symlink()))
    return not any(leads_inside(folder, path) for folder in allowed)


def writable_place(folder: Path) -> Path:
    """The folder, or if it is missing the nearest one above it, in which it can be created; nothing is written.

    OSError if nothing can be written there, as far as it shows. Its `strerror` names the path that is the cause.
    """
    place = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not place.is_dir():
        missing = place.is_symlink() and not place.exists()
        raise OSError(errno.ENOTDIR, f"{place} is {'a link to a missing path' if missing else 'not a folder'}")
    system = os.statvfs(place)
    if system.f_flag & os.ST_RDONLY:
        raise OSError(errno.EROFS, f"{place} is on a read-only file system")
    if not (system.f_blocks or place.stat().st_mode & 0o222):  # not even root creates files in /proc and /sys
        raise OSError(errno.EPERM, f"{place} is a folder of the operating system")
    if not os.access(place, os.W_OK | os.X_OK):
        raise OSError(errno.EACCES, f"{place} may not be written")
    return place
