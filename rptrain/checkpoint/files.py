"""Directories that are whole or absent: written aside, synced, renamed; with a manifest of hashes."""

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

from rptrain.errors import UserError
from rptrain.parallel import in_parallel
from rptrain.reading import OpenFile

FORMAT = 1
MANIFEST, STATE = "complete.json", "trainer_state.json"
KIND = "checkpoint"  # what a manifest says that it is of
# suffixes of what is being written, of what makes room for it, and of what was found damaged
PARTIAL, REPLACED, DAMAGED = ".partial", ".replaced", ".damaged"
CHECKPOINT = re.compile(r"checkpoint-(\d+)(?:\.replaced)?")
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
        file.parent.mkdir(parents=True, exist_ok=True)
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
def written_aside(target: Path, facts: Mapping[str, Any], needed: int) -> Iterator[Aside]:
    """Gives a directory to write into, which takes `target`'s place when the block ends without an error.

    `facts` go into the manifest; `needed` bytes must be free. DiskFull, or OSError of the disk; after either,
    `target` is as it was.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    free = shutil.disk_usage(target.parent).free
    if free < needed + SLACK:
        raise DiskFull(
            f"{target} needs {_gigabytes(needed + SLACK)}, and {_gigabytes(free)} are free on its disk: "
            "make room, or write elsewhere"
        )
    partial.mkdir()
    try:
        aside = Aside(partial)
        yield aside
        aside.seal(facts)
        replaced = target.with_name(target.name + REPLACED)
        if target.exists():  # what a kill between the two renames leaves is `replaced`, whole
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
        partial.rename(target)
        sync_folder(target.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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
    """Renames a damaged directory, so that it is taken for a whole one nowhere; the new name."""
    aside = directory.with_name(directory.name + DAMAGED)
    shutil.rmtree(aside, ignore_errors=True)
    directory.rename(aside)
    sync_folder(aside.parent)
    return aside


def remove(directory: Path) -> None:
    """Deletes a directory; a deletion cut short does not leave it looking whole."""
    partial = directory.with_name(directory.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    directory.rename(partial)
    sync_folder(directory.parent)
    shutil.rmtree(partial)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
        int(match[1]): path
        for path in sorted(checkpoints_dir.glob("checkpoint-*"), reverse=True)
        if (match := CHECKPOINT.fullmatch(path.name)) and (path / MANIFEST).is_file()
    }
    return [found[step] for step in sorted(found)]
