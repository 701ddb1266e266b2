"""What is wrong with how a command ended: its exit code, its output, its use of the machine, and files it changed."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from benchmarks.bad_inputs.case import CODES, Case
from benchmarks.bad_inputs.server import Ended
from benchmarks.bad_inputs.sound import NOT_KEPT, SECRET

SECONDS = 20.0
NBYTES = 2 << 30  # bytes of memory beyond what a process has that has imported the program
LINE = 500  # characters of a line of a message
LINES = 21  # of a refusal: 20 lines, and how many more there are
MISTAKES = 202  # of a config's mistakes: the first line, 200 mistakes, and how many more there are
READ = 1 << 20  # bytes of output that are examined
HASHED = 32 << 20  # bytes up to which a file's content is compared; of larger ones, size and time of change
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
INTERNAL = re.compile(r"\[Errno|object at 0x|\bpyo3|\bpanicked at\b")
# Output whose lines repeat what the user gave or what a model wrote
DATA = ("generate", "--json", "--dry-run", "--show-data")
PLANS = ("plan", "--dry-run")  # print a plan before the message that it does not fit

Entry = tuple[object, ...]
Snapshot = Mapping[str, Entry]


def _most(lines: Sequence[str]) -> int:
    return MISTAKES if lines[0].endswith(" mistakes in the config") else LINES


def faults(case: Case, ended: Ended, stdout: str, stderr: str) -> Iterator[str]:
    """What is wrong with the end of a command and its output, as phrases; nothing if all is well."""
    if ended.stopped == "time":
        yield f"ran over {SECONDS:g} s"
        return
    if ended.stopped == "memory" or ended.peak > NBYTES:
        yield f"took {ended.peak / 2**30:.1f} GiB"
        return
    traceback = "Traceback (most recent call last)" in stdout + stderr
    if traceback:
        yield "traceback"
    elif ended.code not in CODES[case.expected]:
        yield "accepted" if ended.code == 0 else f"exit code {ended.code}"
    if not traceback:
        yield from _messages(case, ended, stdout, stderr)
    if SECRET in stdout + stderr:
        yield "shows a file that it must not read"


def _messages(case: Case, ended: Ended, stdout: str, stderr: str) -> Iterator[str]:
    echoes = any(part in DATA for part in case.args)
    plans = any(part in PLANS for part in case.args)
    for name, output, shows in (("stdout", stdout, echoes), ("stderr", stderr, False)):
        lines = output.removesuffix("\n").split("\n")
        longest = max(map(len, lines))
        if longest > LINE and not shows:
            yield f"{name} has a line of {longest:,} characters"
        if len(lines) > _most(lines) and ended.code != 0 and not (name == "stdout" and plans):
            yield f"{name} has {len(lines)} lines"
        if found := CONTROL.search(output):
            yield f"{name} has the control character {found[0]!r}"
        if found := INTERNAL.search(output):
            yield f"{name} has {found[0]!r}"
    if ended.code != 0 and not (stdout + stderr).strip():
        yield "no message"
    if ended.code == 2 and case.names not in stdout + stderr:
        yield f"does not name {case.names}"
    if case.says not in stdout + stderr:
        yield f"does not say {case.says!r}"


def snapshot(slot: Path) -> dict[str, Entry]:
    """The kind and content of every file of a slot, by its path relative to the working folder."""
    return {
        os.path.relpath(path, slot / "work"): _entry(path)
        for top in ("work", "outside", "home")
        for path in _walk(slot / top)
    }


def changes(case: Case, before: Snapshot, after: Snapshot) -> Iterator[str]:
    """Files that a command created, changed or deleted where it must not."""
    created = [path for path in after if path not in before and not _inside(path, (*case.written, *case.changes))]
    altered = [path for path in before if after.get(path) != before[path] and not _inside(path, case.changes)]
    for verb, paths in (("created", created), ("changed", altered)):
        if paths:
            more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
            yield f"{verb} {min(paths)!r}{more}"


def copied_secrets(slot: Path, before: Snapshot) -> Iterator[str]:
    """Files that hold content from outside of the folders that a command may read."""
    for path in _walk(slot / "work"):
        name = os.path.relpath(path, slot / "work")
        if name in before or path.is_symlink() or not path.is_file() or path.stat().st_size > HASHED:
            continue
        if SECRET.encode() in path.read_bytes():
            yield f"copied a file from outside to {name!r}"
            return


def _walk(folder: Path) -> Iterator[Path]:
    """All entries below a folder; links are not followed."""
    with os.scandir(folder) as entries:
        for entry in list(entries):
            if entry.name in NOT_KEPT:
                continue
            yield Path(entry.path)
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(Path(entry.path))


def _entry(path: Path) -> Entry:
    if path.is_symlink():
        return "link", os.readlink(path)
    if path.is_dir():
        return ("folder",)
    if not path.is_file():
        return ("special",)
    status = path.stat()
    if status.st_size > HASHED:
        return "file", status.st_size, status.st_mtime_ns
    return "file", status.st_size, sha256(path.read_bytes()).hexdigest()


def _inside(path: str, places: tuple[str, ...]) -> bool:
    parts = Path(path).parts
    wanted = (Path(os.path.normpath(place)).parts for place in places)
    return any(parts[: len(place)] == place for place in wanted)
