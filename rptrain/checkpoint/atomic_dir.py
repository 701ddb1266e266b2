"""Directories that are whole or absent: written aside, synced, renamed; with a manifest of hashes."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import file_digest, sha256
from itertools import count
from pathlib import Path
from typing import Any

from rptrain.utils.errors import UserError
from rptrain.utils.file_ranges import OpenFile
from rptrain.utils.parallel import in_parallel

FORMAT = 1
MANIFEST, STATE = "complete.json", "trainer_state.json"
KIND = "checkpoint"  # what a manifest says that it is of
# Suffixes of hidden siblings: of the folder that rptrain writes in, and of what makes room for the result.
PARTIAL, REPLACED = ".rptrain-partial", ".rptrain-replaced"
MARK = "made-by-rptrain"  # a file in each PARTIAL folder: no other is deleted
DAMAGED = ".damaged"  # suffix of what was found damaged
NAME_MAX = 255  # bytes of a name, in most file systems
# By its name, or by the one that it has while it is being replaced; ".replaced" is that of older versions.
CHECKPOINT = re.compile(r"checkpoint-(\d+)(?:\.replaced)?|\.checkpoint-(\d+)\.rptrain-replaced")
PIECE = 1 << 24  # bytes hashed and written at a time
THREADS = 4  # files that are written at a time: one core hashes slower than a disk writes
HASHED = 1 << 20  # bytes read and hashed at a time: they stay in a core's cache
SLACK = 64 << 20  # bytes for headers, JSON and the file system's own records


class DiskFull(OSError):
    """There is no room for what is to be written."""


class Damaged(UserError):
    """A directory is not what was written: something in it is missing or differs."""


class Aside:
    """A directory under construction at `path`; knows the size and the hash of what it wrote."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[str, dict[str, Any]] = {}

    def write(self, name: str, buffers: Iterable[bytes | memoryview]) -> None:
        """Writes a file of these bytes and syncs it; `name` may hold folders. Threads may write at once."""
        file = self.path / name
        for folder in reversed(file.relative_to(self.path).parents[:-1]):  # if `path` was deleted, it stays so
            (self.path / folder).mkdir(exist_ok=True)
        digest, size = sha256(), 0
        with file.open("wb") as stream:
            for buffer in buffers:
                for start in range(0, len(buffer), PIECE):
                    piece = buffer[start : start + PIECE]
                    digest.update(piece)
                    size += stream.write(piece)
            stream.flush()
            os.fsync(stream.fileno())
        self._entries[name] = {"size": size, "sha256": digest.hexdigest()}

    def write_json(self, name: str, value: Any) -> None:
        self.write(name, [(json.dumps(value, indent=2) + "\n").encode()])

    def seal(self, facts: Mapping[str, Any]) -> None:
        """Hashes files that others wrote here, writes the manifest and syncs every folder."""
        names = sorted(str(file.relative_to(self.path)) for file in self.path.rglob("*") if file.is_file())

        def hash_file(name: str) -> None:
            file = self.path / name
            self._entries[name] = {"size": file.stat().st_size, "sha256": _hash(file)}

        if others := [name for name in names if name not in self._entries]:
            in_parallel(hash_file, others, THREADS)
        files = {name: self._entries[name] for name in names}
        self.write_json(MANIFEST, {"format": FORMAT, **facts, "files": files})
        for folder in (*(entry for entry in self.path.rglob("*") if entry.is_dir()), self.path):
            sync_folder(folder)


@contextmanager
def written_aside(
    target: Path,
    facts: Mapping[str, Any],
    needed: int,
    check: Callable[[Path], object] | None = None,
    *,
    force: bool = False,
) -> Iterator[Aside]:
    """Gives a directory to write into, which takes `target`'s place when the block ends without an error.

    The folder that holds `target` must exist. `facts` go into the manifest; `needed` bytes must be free. `check` raises
    UserError for a path that is not to be replaced, and is asked right before that; without it, a whole directory of
    the same kind is replaced. `force` replaces whatever `target` is. UserError if a name that this needs is taken by
    something that rptrain did not make, DiskFull, or OSError of the disk; after any of them, `target` is as it was.
    """
    check = check or partial(_check_kind, facts.get("kind"))
    folder, replaced = _stage(target), beside(target, REPLACED)
    try:
        free = shutil.disk_usage(target.parent).free
        if free < needed + SLACK:
            raise DiskFull(
                f"{target} needs {_gigabytes(needed + SLACK)}, and {_gigabytes(free)} are free on its disk: "
                "make room, or write elsewhere"
            )
        _check_replaced(replaced, check)
        aside = Aside(folder / "new")
        aside.path.mkdir()
        yield aside
        aside.seal(facts)
        if displaces := os.path.lexists(target):
            if not force:
                check(target)
            _check_replaced(replaced, check)
            if os.path.lexists(replaced):
                replaced.rename(folder / "older")
        try:
            if displaces:  # what a kill between the two renames leaves is `replaced`, whole
                target.rename(replaced)
            aside.path.rename(target)
        except BaseException:  # an interrupt too, which may come once a rename is done
            if displaces and not os.path.lexists(target):
                replaced.rename(target)
            raise
        sync_folder(target.parent)
        with suppress(OSError):  # the next one to take this place deletes it then, or says that it is in the way
            replaced.rename(folder / "old")
    finally:
        with suppress(OSError):
            _delete(folder)


def read_manifest(directory: Path) -> dict[str, Any]:
    """What complete.json says, once every file was found to be there in its size; Damaged otherwise."""
    file = directory / MANIFEST
    if not file.is_file():
        raise Damaged(f"{directory} is not complete: it has no {MANIFEST}")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        version = manifest["format"]
        sizes = {name: entry["size"] for name, entry in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{file} is damaged: {error}") from error
    if version != FORMAT:
        raise UserError(f"{file} has format {version}; this version reads format {FORMAT}")
    if outside := [name for name in sizes if Path(name).is_absolute() or ".." in Path(name).parts]:
        raise Damaged(f"{file} is damaged: {outside[0]!r} is outside of its directory")
    for name, size in sizes.items():
        actual = (directory / name).stat().st_size if (directory / name).is_file() else None
        if actual is None:
            raise Damaged(f"{directory} is damaged: {name} is missing")
        if actual != size:
            raise Damaged(f"{directory / name} is damaged: {size} bytes expected, {actual} there")
    return manifest


def read_into(file: Path, entry: Mapping[str, Any], buffers: Iterable[memoryview]) -> None:
    """Fills the buffers from the whole file, in turn; Damaged if it ends before or its hash is not the manifest's."""
    digest, done = sha256(), 0
    with OpenFile(file) as stream:
        for buffer in buffers:
            for start in range(0, len(buffer), HASHED):
                piece = buffer[start : start + HASHED]
                stream.read(done, piece)
                digest.update(piece)
                done += len(piece)
    _compare(file, entry, digest.hexdigest())


def check_hash(file: Path, entry: Mapping[str, Any]) -> None:
    """Damaged if the file's hash is not the manifest's."""
    _compare(file, entry, _hash(file))


def set_aside(directory: Path) -> Path:
    """Renames a damaged checkpoint, so that it is taken for a whole one nowhere; the new name."""
    match = CHECKPOINT.fullmatch(directory.name)
    assert match is not None
    name = f"checkpoint-{match[1] or match[2]}{DAMAGED}"
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    aside = next(path for path in map(directory.with_name, names) if not os.path.lexists(path))
    directory.rename(aside)
    sync_folder(aside.parent)
    return aside


def remove(directory: Path) -> None:
    """Deletes a directory; a deletion cut short does not leave it looking whole."""
    folder = _stage(directory)
    directory.rename(folder / "old")
    sync_folder(directory.parent)
    _delete(folder)


def discard(folder: Path) -> bool:
    """Deletes what was left of a PARTIAL folder; False, and nothing is deleted, where rptrain did not make it."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    if not (folder / MARK).is_file() and any(folder.iterdir()):
        return False
    _delete(folder)
    return True


def is_of_kind(directory: Path, kind: str | None) -> bool:
    """Whether a whole directory, as `written_aside` writes it, is there, with this kind in its manifest."""
    try:
        return read_manifest(directory).get("kind") == kind
    except UserError:
        return False


def beside(target: Path, suffix: str) -> Path:
    """A hidden sibling, with a name that nobody else uses."""
    return target.parent / f".{target.name}{suffix}"


def check_name(target: Path) -> None:
    """UserError if the name is too long to write a directory of that name aside."""
    longest = NAME_MAX - len(f".{REPLACED}")
    if len(os.fsencode(target.name)) > longest:
        raise UserError(f"the name {target.name} is too long: choose one of at most {longest} bytes")


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _stage(target: Path) -> Path:
    """Makes the folder in which `target` is written or deleted. What a killed process left in its place is deleted."""
    folder = beside(target, PARTIAL)
    if os.path.lexists(folder) and not discard(folder):
        raise UserError(f"{folder} is in the way and was not written by rptrain: move or delete it")
    folder.mkdir()
    (folder / MARK).touch()
    sync_folder(folder)
    return folder


def _check_kind(kind: str | None, path: Path) -> None:
    if not is_of_kind(path, kind):
        raise UserError(f"{path} is in the way and was not written by rptrain: move or delete it")


def _check_replaced(replaced: Path, check: Callable[[Path], object]) -> None:
    """UserError if what an earlier process left of what it replaced is not to be deleted."""
    if replaced.is_symlink():
        raise UserError(f"{replaced} is in the way and was not written by rptrain: move or delete it")
    if replaced.exists():
        try:
            check(replaced)
        except UserError as error:
            raise UserError(
                f"{replaced} is in the way: move or delete it. rptrain did not write it, or a process that was killed "
                f"left it there ({error})"
            ) from error


def _delete(folder: Path) -> None:
    """Deletes a PARTIAL folder. Its mark goes last, so that a deletion that is cut short can be finished later."""
    for entry in list(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != MARK:
            entry.unlink()
    (folder / MARK).unlink(missing_ok=True)
    folder.rmdir()


def _compare(file: Path, entry: Mapping[str, Any], digest: str) -> None:
    if digest != entry.get("sha256"):
        raise Damaged(f"{file} is damaged: its content is not what was saved (sha256 differs)")


def _hash(file: Path) -> str:
    with file.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


def complete_checkpoints(checkpoints_dir: Path) -> list[Path]:
    """Complete checkpoints by step; a replaced one counts where what was to replace it is missing."""
    found = {
        int(match[1] or match[2]): path  # the shortest name comes last: the checkpoint's own
        for path in sorted(checkpoints_dir.glob("*checkpoint-*"), key=lambda path: len(path.name), reverse=True)
        if (match := CHECKPOINT.fullmatch(path.name)) and (path / MANIFEST).is_file()
    }
    return [found[step] for step in sorted(found)]
