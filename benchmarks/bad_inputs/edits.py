"""Edits of a case's files. Each function returns the edit: a function of the working folder."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from benchmarks.bad_inputs.case import Edit

PICKLE = b"\x80\x04cos\nsystem\n\x8c\x0ctouch hacked\x85R."  # runs a command when it is loaded
SPARSE = 12 << 30  # bytes of a file without content, more than most machines' memory leaves


def text(name: str, content: str | bytes) -> Edit:
    """Replaces or creates a file."""
    data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass")

    def edit(folder: Path) -> None:
        if os.path.lexists(folder / name):
            deleted(name)(folder)
        _parent(folder, name).write_bytes(data)

    return edit


def made(name: str, content: Callable[[], str | bytes]) -> Edit:
    """Like `text`, for content that is large: it is made only when the case runs."""
    return lambda folder: text(name, content())(folder)


def appended(name: str, content: str) -> Edit:
    def edit(folder: Path) -> None:
        with (folder / name).open("a", encoding="utf-8", errors="surrogatepass") as file:
            file.write(content)

    return edit


def dumped(name: str, value: Any) -> Edit:
    return text(name, json.dumps(value))


def values(name: str, changes: Mapping[str, Any], removed: tuple[str, ...] = ()) -> Edit:
    """Sets keys of the JSON object in a file, and removes others."""

    def change(content: Any) -> None:
        content.update(changes)
        for key in removed:
            content.pop(key, None)

    return changed(name, change)


def changed(name: str, change: Callable[[Any], object]) -> Edit:
    """Changes the JSON value in a file in place."""

    def edit(folder: Path) -> None:
        file = folder / name
        content = json.loads(file.read_text(encoding="utf-8"))
        change(content)
        file.write_text(json.dumps(content), encoding="utf-8")

    return edit


def replaced(name: str, old: str | bytes, new: str | bytes) -> Edit:
    """Replaces part of a file, which must be there."""
    before, after = (part.encode() if isinstance(part, str) else part for part in (old, new))

    def edit(folder: Path) -> None:
        data = (folder / name).read_bytes()
        assert before in data, f"{name} does not contain {before!r}"
        (folder / name).write_bytes(data.replace(before, after))

    return edit


def cut(name: str, size: int) -> Edit:
    """Keeps the first `size` bytes; negative: leaves out the last ones."""

    def edit(folder: Path) -> None:
        file = folder / name
        file.write_bytes(file.read_bytes()[:size])

    return edit


def deleted(*names: str) -> Edit:
    def edit(folder: Path) -> None:
        for name in names:
            path = folder / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    return edit


def moved(old: str, new: str) -> Edit:
    return lambda folder: (folder / old).rename(_parent(folder, new))


def copied(old: str, new: str) -> Edit:
    def edit(folder: Path) -> None:
        copy = shutil.copytree if (folder / old).is_dir() else shutil.copyfile
        copy(folder / old, _parent(folder, new))

    return edit


def directory(name: str) -> Edit:
    """An empty folder in place of whatever has the name."""

    def edit(folder: Path) -> None:
        if os.path.lexists(folder / name):
            deleted(name)(folder)
        (folder / name).mkdir(parents=True)

    return edit


def fifo(name: str) -> Edit:
    """A named pipe that nobody writes to."""

    def edit(folder: Path) -> None:
        if os.path.lexists(folder / name):
            deleted(name)(folder)
        os.mkfifo(_parent(folder, name))

    return edit


def link(name: str, target: str) -> Edit:
    """A symbolic link with this text; `target` is relative to the link's own folder."""

    def edit(folder: Path) -> None:
        if os.path.lexists(folder / name):
            deleted(name)(folder)
        _parent(folder, name).symlink_to(target)

    return edit


def rights(name: str, mode: int) -> Edit:
    return lambda folder: (folder / name).chmod(mode)


def sparse(name: str, nbytes: int = SPARSE) -> Edit:
    """A file that consists of a hole."""

    def edit(folder: Path) -> None:
        if os.path.lexists(folder / name):
            deleted(name)(folder)
        with _parent(folder, name).open("wb") as file:
            file.truncate(nbytes)

    return edit


def tensors(name: str, change: Callable[[dict[str, Any], bytes], tuple[Any, bytes] | None]) -> Edit:
    """Changes the header of a safetensors file, in place or by returning another header and the tensors' bytes."""

    def edit(folder: Path) -> None:
        file = folder / name
        header, data = split_tensors(file.read_bytes())
        header, data = change(header, data) or (header, data)
        file.write_bytes(joined_tensors(header, data))

    return edit


def split_tensors(data: bytes) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def joined_tensors(header: Any, data: bytes) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


def rehashed(checkpoint: str) -> Edit:
    """Writes the sizes and hashes of a checkpoint's files as they now are into its manifest."""

    def edit(folder: Path) -> None:
        path = folder / checkpoint
        manifest = json.loads((path / "complete.json").read_text())
        for name in list(manifest["files"]):
            if not (path / name).is_file():
                del manifest["files"][name]
                continue
            data = (path / name).read_bytes()
            manifest["files"][name] = {"size": len(data), "sha256": sha256(data).hexdigest()}
        (path / "complete.json").write_text(json.dumps(manifest))

    return edit


def _parent(folder: Path, name: str) -> Path:
    """The path of a name, whose folder is created."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
