"""Directories that are written atomically: aside, synced, then renamed; with a manifest of hashes."""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self
from uuid import uuid4

from rptrain.utils.errors import UserError
from rptrain.utils.file_ranges import OpenFile
from rptrain.utils.files import file_sha256, naming, open_regular, read_small_text
from rptrain.utils.liveness import progressed
from rptrain.utils.objects import unique_keys
from rptrain.utils.parallel import in_parallel
from rptrain.utils.paths import inside
from rptrain.utils.replacing import PARTIAL
from rptrain.utils.units import format_bytes

FORMAT = 1
MANIFEST, STATE = "complete.json", "trainer_state.json"
KIND = "checkpoint"  # `kind` in the manifest of a checkpoint
BASE = "base"  # the folder with the model's files in a checkpoint
REPLACED = ".rptrain-replaced"  # suffix of the hidden directory that the result replaces; of its own: PARTIAL
MARK = "made-by-rptrain"  # a file in each PARTIAL folder: folders without it are not deleted
DAMAGED = ".damaged"  # suffix of damaged checkpoints
NAME_MAX = 255  # bytes of a name on most file systems
# A checkpoint's name, or its name while it is being replaced. Older versions used ".replaced" for that.
CHECKPOINT = re.compile(r"checkpoint-(\d+)(?:\.replaced)?|\.checkpoint-(\d+)\.rptrain-replaced")
ASIDE = re.compile(rf"checkpoint-\d+{re.escape(DAMAGED)}(?:-\d+)?")  # a name from `set_aside`
PIECE = 1 << 24  # bytes hashed and written at a time
THREADS = 4  # files written at a time: one core hashes more slowly than a disk writes
HASHED = 1 << 20  # bytes read and hashed at a time: they fit into a core's cache
WHOLE = "sha256"  # the hash of a whole file, in a manifest entry
SLACK = 64 << 20  # bytes for headers, JSON and the file system's metadata
NO_FOLDERS = (errno.EINVAL, errno.ENOTSUP)  # of fsync, on file systems that sync no folders: CIFS, WSL2's, some FUSE


class DiskFull(OSError):
    """The disk has too little free space for the files to write."""


class Damaged(UserError):
    """A directory is not as it was written: files are missing or differ."""


class Aside:
    """A directory under construction at `path`. `entries` has the size and the hash of each file that it wrote.

    Several processes may write into one directory. Of those, the one that seals it adds the others' entries to its own.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, dict[str, Any]] = {}

    @classmethod
    def of(cls, target: Path, name: str) -> Self:
        """The directory that will replace `target`. Another process has created it, and knows its `name`.

        Names are never used again. So a process that was lost and writes on does not write into a later directory.
        """
        return cls(beside(target, PARTIAL) / name)

    def write(
        self,
        name: str,
        buffers: Iterable[bytes | memoryview],
        starts: Mapping[str, int] = MappingProxyType({}),
        mode: int = 0o666,
    ) -> None:
        """Writes a file and syncs it. `name` may contain folders. Several threads may write at the same time.

        `starts`: numbers of bytes, where a buffer ends. The hashes of the bytes before them are kept under these keys
        too, so that they can be read alone. Others get at most the permissions in `mode`, from the beginning.
        """
        file = self.path / name
        for folder in reversed(file.relative_to(self.path).parents[:-1]):  # never create a deleted `path` again
            (self.path / folder).mkdir(exist_ok=True)
        digest, size, more = sha256(), 0, dict[str, str]()
        opener = partial(os.open, mode=mode | 0o600)
        with naming(file), open(file, "wb", opener=opener) as stream:
            for buffer in buffers:
                for at in range(0, len(buffer), PIECE):
                    piece = buffer[at : at + PIECE]
                    digest.update(piece)
                    size += stream.write(piece)
                    progressed()
                more |= {key: digest.hexdigest() for key, start in starts.items() if size == start}
            stream.flush()
            os.fsync(stream.fileno())
        self.entries[name] = {"size": size, "sha256": digest.hexdigest()} | more

    def write_json(self, name: str, value: Any) -> None:
        self.write(name, [(json.dumps(value, indent=2) + "\n").encode()])

    def seal(self, facts: Mapping[str, Any]) -> None:
        """Hashes files that were not written by `write`, writes the manifest and syncs every folder.

        Damaged if a file was deleted or changed its size meanwhile.
        """
        found = {str(file.relative_to(self.path)) for file in self.path.rglob("*") if file.is_file()}
        names = sorted(found | self.entries.keys())  # a shared file system may show other processes' files later

        def hash_file(name: str) -> None:
            file = self.path / name
            self.entries[name] = {"size": file.stat().st_size, "sha256": _hash(file)}

        if others := [name for name in names if name not in self.entries]:
            in_parallel(hash_file, others, THREADS)
        files = {name: self.entries[name] for name in names}
        self.write_json(MANIFEST, {"format": FORMAT, **facts, "files": files})
        read_manifest(self.path)
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
    """Gives a directory to write into, which replaces `target` when the block ends without an error.

    The parent folder of `target` must exist. `facts` go into the manifest, and `needed` bytes must be free. `check` is
    called right before `target` is replaced and raises UserError if it must not be. Without `check`, only a complete
    directory of the same kind is replaced. `force` replaces any `target`. Raises UserError if a name that this
    needs is taken by something that rptrain did not create, DiskFull, or OSError. An error leaves `target` unchanged.
    """
    check = check or partial(_check_kind, facts.get("kind"))
    replaced = beside(target, REPLACED)
    with staged(target, needed) as folder:
        _check_replaced(replaced, check)
        aside = Aside.of(target, uuid4().hex)
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
            if displaces:  # a kill between the two renames leaves `replaced`, complete
                target.rename(replaced)
            aside.path.rename(target)
        except BaseException:  # also an interrupt, which may come after a rename
            if displaces and not os.path.lexists(target):
                replaced.rename(target)
            raise
        sync_folder(target.parent)
        with suppress(OSError):  # otherwise the next call for this target deletes it or reports it
            replaced.rename(folder / "old")


@contextmanager
def staged(target: Path, needed: int) -> Iterator[Path]:
    """A hidden folder beside a target in which it is written, and which is deleted with what is left in it.

    `needed` bytes must be free. Raises DiskFull, UserError as `check_free`, or OSError.
    """
    folder = _stage(target)
    try:
        disk = shutil.disk_usage(target.parent)
        if disk.total and disk.free < needed + SLACK:  # some FUSE file systems and ramfs have no size
            raise DiskFull(
                f"{target} needs {format_bytes(needed + SLACK)}, and {format_bytes(disk.free)} is free on its disk: "
                "make room, or write elsewhere"
            )
        yield folder
    finally:
        with suppress(OSError):
            _delete(folder)


def read_manifest(directory: Path) -> dict[str, Any]:
    """The content of complete.json. Damaged if a file is missing or has another size."""
    manifest = manifest_alone(directory)
    for name, entry in manifest["files"].items():
        size = entry["size"]
        actual = (directory / name).stat().st_size if (directory / name).is_file() else None
        if actual is None:
            raise Damaged(f"{directory} is damaged: {name} is missing")
        if actual != size:
            raise Damaged(f"{directory / name} is damaged: {size} bytes expected, {actual} there")
    return manifest


def manifest_alone(directory: Path) -> dict[str, Any]:
    """The content of complete.json, whose files are not looked at. Damaged if it cannot be read."""
    file = directory / MANIFEST
    if not file.is_file():
        raise Damaged(f"{directory} is not complete: it has no {MANIFEST}")
    try:
        manifest = json.loads(read_small_text(file), object_pairs_hook=unique_keys)
        version = manifest["format"]
        sizes = {name: entry["size"] for name, entry in manifest["files"].items()}
    except UserError as error:  # a ValueError, too; it names the file
        raise Damaged(str(error)) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{file} is damaged: {error}") from error
    if version != FORMAT:
        raise UserError(f"{file} has format {version}; this version reads format {FORMAT}")
    for name in (MANIFEST, *sizes):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise Damaged(f"{file} is damaged: {name!r} is outside of its directory")
        try:
            inside(directory, name)
        except UserError as error:
            raise Damaged(f"{directory} is damaged: {error}") from error
    return manifest


def read_into(file: Path, entry: Mapping[str, Any], buffers: Iterable[memoryview]) -> None:
    """Fills the buffers in order from a file. Damaged if the file is too short or its hash is not the manifest's."""
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
    """Damaged if the hash of a file differs from its manifest entry."""
    _compare(file, entry, _hash(file))


def set_aside(directory: Path) -> Path:
    """Renames a damaged checkpoint so that it is no longer used, and returns the new path."""
    match = CHECKPOINT.fullmatch(directory.name)
    assert match is not None
    name = f"checkpoint-{match[1] or match[2]}{DAMAGED}"
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    aside = next(path for path in map(directory.with_name, names) if not os.path.lexists(path))
    directory.rename(aside)
    sync_folder(aside.parent)
    return aside


def remove(directory: Path) -> None:
    """Deletes a directory. After an interrupted deletion it does not look complete."""
    folder = _stage(directory)
    directory.rename(folder / "old")
    sync_folder(directory.parent)
    _delete(folder)


def discard(folder: Path) -> bool:
    """Deletes a PARTIAL folder that was left behind. Returns False and deletes nothing if rptrain did not create it."""
    if not _is_own(folder):
        return False
    _delete(folder)
    return True


def is_of_kind(directory: Path, kind: str | None) -> bool:
    """Whether this is a complete directory from `written_aside` with this kind in its manifest."""
    try:
        return read_manifest(directory).get("kind") == kind
    except UserError:
        return False


def beside(target: Path, suffix: str) -> Path:
    """The path of a hidden sibling, whose name nothing else uses."""
    return target.parent / f".{target.name}{suffix}"


def check_name(target: Path) -> None:
    """UserError if the name is too long for the names of the hidden siblings."""
    longest = NAME_MAX - len(f".{REPLACED}")
    if len(os.fsencode(target.name)) > longest:
        raise UserError(f"the name {target.name} is too long: choose one of at most {longest} bytes")


def check_free(target: Path) -> None:
    """UserError if the name of the folder in which `target` will be written is taken by something of the user's."""
    folder = beside(target, PARTIAL)
    if os.path.lexists(folder) and not _is_own(folder):
        raise UserError(f"{folder} is in the way and was not written by rptrain: move or delete it")


def sync_folder(folder: Path) -> bool:
    """Syncs the entries of a folder to disk. Returns whether its file system does that."""
    with naming(folder):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in NO_FOLDERS:
                raise
            return False
        finally:
            os.close(descriptor)
    return True


def _stage(target: Path) -> Path:
    """Creates the folder in which `target` is written or deleted, and deletes what a killed process left there."""
    check_free(target)
    folder = beside(target, PARTIAL)
    discard(folder)
    folder.mkdir()
    try:
        (folder / MARK).touch()
        sync_folder(folder)
    except BaseException:
        with suppress(OSError):
            _delete(folder)
        raise
    return folder


def _is_own(folder: Path) -> bool:
    """Whether this is a PARTIAL folder that rptrain created."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    return (folder / MARK).is_file() or not any(folder.iterdir())


def _check_kind(kind: str | None, path: Path) -> None:
    if not is_of_kind(path, kind):
        raise UserError(f"{path} is in the way and was not written by rptrain: move or delete it")


def _check_replaced(replaced: Path, check: Callable[[Path], object]) -> None:
    """UserError if a REPLACED directory that an earlier process left must not be deleted."""
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
    """Deletes a PARTIAL folder. Its mark is deleted last, so that an interrupted deletion can be finished later."""
    for entry in list(folder.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != MARK:
            entry.unlink()
    (folder / MARK).unlink(missing_ok=True)
    folder.rmdir()


def _compare(file: Path, entry: Mapping[str, Any], digest: str) -> None:
    if digest != entry.get(WHOLE):
        raise Damaged(f"{file} is damaged: its content is not what was saved (sha256 differs)")


def _hash(file: Path) -> str:
    with open_regular(file) as stream:
        return file_sha256(stream)


def complete_checkpoints(checkpoints_dir: Path) -> list[Path]:
    """The complete checkpoints, ordered by step. A REPLACED one counts if its replacement is missing."""
    found = {
        int(match[1] or match[2]): path  # the checkpoint's own name is the shortest and comes last
        for path in sorted(checkpoints_dir.glob("*checkpoint-*"), key=lambda path: len(path.name), reverse=True)
        if (match := CHECKPOINT.fullmatch(path.name)) and (path / MANIFEST).is_file()
    }
    return [found[step] for step in sorted(found)]


def _step_and_name(path: Path) -> tuple[int, str]:
    step = re.search(r"checkpoint-(\d+)", path.name)
    return (int(step[1]) if step else 0, path.name)


def unusable_checkpoints(checkpoints_dir: Path) -> dict[Path, str]:
    """The checkpoints that were set aside as damaged or have no manifest, ordered by step, each with the reason."""
    complete = complete_checkpoints(checkpoints_dir)
    found = {}
    for path in sorted(checkpoints_dir.glob("*checkpoint-*"), key=_step_and_name):
        if ASIDE.fullmatch(path.name):
            found[path] = f"{path} was set aside as damaged"
        elif CHECKPOINT.fullmatch(path.name) and path not in complete and not (path / MANIFEST).is_file():
            found[path] = f"{path} is not complete: it has no {MANIFEST}"
    return found
