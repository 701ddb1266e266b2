"""Compare files with their manifest entries, unless that was done before and they have not changed since."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rptrain.checkpoint.atomic_dir import WHOLE, Damaged, check_hash, read_into
from rptrain.utils.file_digests import keep_digests, kept_digests
from rptrain.utils.file_ranges import OpenFile
from rptrain.utils.file_state import FileState, states_of


def check_unchanged(file: Path, entry: Mapping[str, Any]) -> FileState:
    """As `check_hash`, but a file that was hashed before and has not changed since is not read again. Returns the state
    of the file that was checked.
    """
    (state,) = states_of((file,))
    if WHOLE not in entry or kept_digests(file, state).get(WHOLE) != entry[WHOLE]:
        check_hash(file, entry)
        check_state(file, state)
        keep_digests(file, state, {WHOLE: entry[WHOLE]})
    return state


def read_start(file: Path, entry: Mapping[str, Any], key: str, buffers: Iterable[memoryview]) -> None:
    """As `read_into`, for the start of a file, whose hash is under `key` in its manifest entry. If it was read before,
    and the file has not changed since, it is not hashed again.
    """
    (state,) = states_of((file,))
    known = kept_digests(file, state).get(key) == entry[key]
    if known:
        fill(file, buffers)
    else:
        read_into(file, {WHOLE: entry[key]}, buffers)
    check_state(file, state)
    if not known:
        keep_digests(file, state, {key: entry[key]})


def fill(file: Path, buffers: Iterable[memoryview]) -> None:
    """Fills the buffers in order from a file, without a check."""
    done = 0
    with OpenFile(file) as stream:
        for buffer in buffers:
            stream.read(done, buffer)
            done += len(buffer)


def check_state(file: Path, state: FileState) -> None:
    """Damaged if a file was changed since it had this state."""
    if FileState.of(file) != state:
        raise Damaged(f"{file} was changed while it was read")
