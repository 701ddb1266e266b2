"""Which digests of files are kept, and whose are trusted."""

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rptrain.utils import file_digests
from rptrain.utils.errors import UserError
from rptrain.utils.file_digests import keep_digests, kept_digests
from rptrain.utils.file_state import FileState


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the entries; files count as old at once."""
    monkeypatch.setattr(file_digests, "folder", lambda: tmp_path / "cache" / "digests")
    monkeypatch.setattr(file_digests, "RECENT", 0.0)
    return tmp_path / "cache" / "digests"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(b"content")
    return path


def kept(file: Path) -> dict[str, str]:
    return kept_digests(file, FileState.of(file))


def keep(file: Path, **digests: str) -> None:
    keep_digests(file, FileState.of(file), digests)


def test_digests_add_up_and_only_the_user_can_write_them(place: Path, file: Path) -> None:
    assert kept(file) == {}
    keep(file, whole="a")
    keep(file, start="b")
    assert kept(file) == {"whole": "a", "start": "b"}
    (entry,) = place.iterdir()
    assert (place.stat().st_mode & 0o777, entry.stat().st_mode & 0o777) == (0o700, 0o600)


def write_again(file: Path) -> None:
    """The same size, and the same time of modification."""
    before = file.stat()
    file.write_bytes(b"CONTENT")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_by_a_copy(file: Path) -> None:
    before, other = file.stat(), file.with_name("other")
    other.write_bytes(b"CONTENT")
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(file)


def copy_elsewhere(file: Path) -> None:
    """A hard link has the state of the file, under another path."""
    os.link(file, file.with_name("other"))
    file.unlink()
    file.symlink_to("other")


@pytest.mark.parametrize("change", [write_again, replace_by_a_copy, copy_elsewhere])
def test_a_changed_file_has_none(place: Path, file: Path, change: Callable[[Path], None]) -> None:
    keep(file, whole="a")
    time.sleep(0.02)
    change(file)
    assert kept(file) == {}


def test_a_file_that_was_just_changed_has_none(place: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second change might not change its times, where they are counted in seconds."""
    monkeypatch.setattr(file_digests, "RECENT", 3600.0)
    keep(file, whole="a")
    assert kept(file) == {}


def open_the_folder(place: Path) -> None:
    place.chmod(0o770)


def open_the_entry(place: Path) -> None:
    next(place.iterdir()).chmod(0o622)


def link_the_folder(place: Path) -> None:
    place.rename(place.with_name("elsewhere"))
    place.symlink_to("elsewhere")


def link_the_entry(place: Path) -> None:
    entry = next(place.iterdir())
    entry.rename(place.with_name("elsewhere"))
    entry.symlink_to(place.with_name("elsewhere"))


def replace_by_a_pipe(place: Path) -> None:
    entry = next(place.iterdir())
    entry.unlink()
    os.mkfifo(entry, 0o600)


def cut_short(place: Path) -> None:
    entry = next(place.iterdir())
    entry.write_bytes(entry.read_bytes()[:-3])


def write_a_list(place: Path) -> None:
    next(place.iterdir()).write_text(json.dumps(["a"]))


def write_numbers(place: Path) -> None:
    next(place.iterdir()).write_text(json.dumps({"whole": 1}))


UNTRUSTED = (open_the_folder, open_the_entry, link_the_folder, link_the_entry)
DAMAGED = (replace_by_a_pipe, cut_short, write_a_list, write_numbers)


@pytest.mark.parametrize("change", [*UNTRUSTED, *DAMAGED])
def test_what_others_can_write_or_is_damaged_counts_as_missing(
    place: Path, file: Path, change: Callable[[Path], None]
) -> None:
    keep(file, whole="a")
    change(place)
    assert kept(file) == {}
    keep(file, whole="a")  # and does not fail
    assert kept(file) == ({} if change is link_the_folder else {"whole": "a"})


def test_a_folder_that_others_may_write_to_is_closed_and_emptied(place: Path, file: Path, tmp_path: Path) -> None:
    """Its entries may have been renamed."""
    keep(file, whole="a")
    (before,) = place.iterdir()
    place.chmod(0o770)
    other = tmp_path / "other"
    other.write_bytes(b"content")
    keep(other, whole="b")
    assert place.stat().st_mode & 0o777 == 0o700 and not before.exists()
    assert kept(file) == {} and kept(other) == {"whole": "b"}


def test_the_folder_above_is_closed_to_others_too(place: Path, file: Path) -> None:
    keep(file, whole="a")
    assert place.parent.stat().st_mode & 0o777 == 0o700


def test_another_users_folder_is_not_trusted(place: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(file, whole="a")
    monkeypatch.setattr(os, "geteuid", lambda: place.stat().st_uid + 1)
    assert kept(file) == {}


def test_a_cache_that_cannot_be_written_keeps_nothing(place: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.parent.write_text("a file in the way")
    keep(file, whole="a")
    assert kept(file) == {}

    def without_home() -> Path:
        raise UserError("the home directory is unknown")

    monkeypatch.setattr(file_digests, "folder", without_home)
    keep(file, whole="a")
    assert kept(file) == {}


def test_old_entries_are_deleted(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_digests, "KEPT", 4)
    files = [tmp_path / f"weights-{number}" for number in range(6)]
    for number, file in enumerate(files):
        file.write_bytes(b"content")
        keep(file, whole=str(number))
        for entry in place.iterdir():  # the newest is the one with the latest time
            os.utime(entry, ns=(0, entry.stat().st_mtime_ns - 10**9))
    assert len([*place.iterdir()]) <= 4
    assert kept(files[-1]) == {"whole": "5"} and kept(files[0]) == {}


def test_many_at_once(place: Path, file: Path) -> None:
    """Each of them finds a whole entry."""
    keep(file, whole="a")
    with ThreadPoolExecutor(16) as pool:
        found = [*pool.map(lambda number: keep(file, whole="a") or kept(file), range(64))]
    assert found == [{"whole": "a"}] * 64
    assert len([*place.iterdir()]) == 1
