import errno
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest

from rptrain.checkpoint.atomic_dir import (
    MANIFEST,
    MARK,
    REPLACED,
    DiskFull,
    check_hash,
    check_name,
    discard,
    read_into,
    read_manifest,
    remove,
    set_aside,
    written_aside,
)
from rptrain.utils.errors import UserError
from rptrain.utils.replacing import PARTIAL

from ..refusals import Refusals


def write(target, content=b"content"):
    with written_aside(target, {"kind": "test"}, 10) as aside:
        aside.write("folder/file", [content[:3], memoryview(content)[3:]])
        (aside.path / "other").write_bytes(b"written by someone else")


def leave(folder, *names):
    folder.mkdir()
    for name in names:
        (folder / name).write_text(name)


def leave_file(path, content):
    path.write_text(content)


def leave_link(path, name):
    """To a folder that looks like one of ours."""
    if not (elsewhere := path.parent.parent / "elsewhere").exists():
        leave(elsewhere, name, MARK)
    path.symlink_to(elsewhere)


def leave_manifest(folder, name):
    """Of another kind of directory."""
    leave(folder, name)
    (folder / MANIFEST).write_text(json.dumps({"format": 1, "kind": "other", "files": {}}))


def contents(folder):
    """Files and folders by name, those that links lead to among them."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")
    } | {path.name: path.readlink() for path in folder.rglob("*") if path.is_symlink()}


def killed_after(left, call):
    def counted(*arguments, **named):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return call(*arguments, **named)

    return counted


def test_a_directory_is_written_whole(tmp_path):
    target = tmp_path / "target"
    write(target)
    assert (target / "folder/file").read_bytes() == b"content"
    assert [path.name for path in target.parent.iterdir()] == ["target"]
    manifest = read_manifest(target)
    assert manifest["kind"] == "test"
    assert {name: entry["size"] for name, entry in manifest["files"].items()} == {
        "folder/file": 7,
        "other": 23,
    }
    for name, entry in manifest["files"].items():
        check_hash(target / name, entry)


def test_an_error_leaves_what_was_there(tmp_path):
    target = tmp_path / "target"
    write(target, b"before")
    with pytest.raises(OSError, match="broken"), written_aside(target, {}, 0) as aside:
        aside.write("folder/file", [b"after"])
        raise OSError("broken")
    assert (target / "folder/file").read_bytes() == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_nothing_is_in_place_before_the_manifest_is(tmp_path):
    target = tmp_path / "target"
    with written_aside(target, {}, 0) as aside:
        aside.write("file", [b"content"])
        assert aside.path.parent == tmp_path / f".target{PARTIAL}"
        assert not target.exists()
        assert not (aside.path / MANIFEST).exists()
    assert (target / MANIFEST).is_file() and not (target / MARK).exists()


def test_a_directory_is_replaced_and_leftovers_go(tmp_path):
    target = tmp_path / "target"
    write(target, b"before")
    leave(tmp_path / f".target{PARTIAL}", MARK, "new")
    shutil.copytree(target, tmp_path / f".target{REPLACED}")
    write(target, b"after")
    assert (target / "folder/file").read_bytes() == b"after"
    assert not (target / "new").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    (tmp_path / f".target{PARTIAL}").mkdir()  # killed ahead of its mark
    write(target)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


@pytest.mark.parametrize("suffix", [PARTIAL, REPLACED])
@pytest.mark.parametrize("make", [leave, leave_file, leave_link, leave_manifest])
def test_what_rptrain_did_not_make_is_not_deleted(tmp_path, suffix, make):
    """Neither what has a usual name, nor what has ours."""
    target = tmp_path / "folder" / "target"
    target.parent.mkdir()
    write(target, b"before")
    for name in ("target.partial", "target.replaced", "target.damaged", f".target{suffix}"):
        make(target.with_name(name), "mine")
    before = contents(tmp_path)
    with pytest.raises(UserError, match=f"target{suffix} is in the way .*: move or delete it"):
        write(target, b"after")
    if suffix == PARTIAL:
        with pytest.raises(UserError, match="is in the way"):
            remove(target)
    assert contents(tmp_path) == before
    target.with_name(f".target{suffix}").rename(tmp_path / "moved")
    write(target, b"after")
    remove(target)
    assert sorted(path.name for path in target.parent.iterdir()) == [
        *("target.damaged", "target.partial", "target.replaced")
    ]


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path, monkeypatch):
    target = tmp_path / "target"
    write(target, b"before")
    rename = Path.rename

    def killed(self, to):
        if to == target:
            raise KeyboardInterrupt
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        write(target, b"after")
    assert (tmp_path / f".target{REPLACED}" / "folder/file").read_bytes() == b"before"
    read_manifest(tmp_path / f".target{REPLACED}")
    monkeypatch.undo()
    write(target, b"after")
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


@pytest.mark.parametrize("done", [False, True], ids=["before-the-second", "behind-the-first"])
def test_an_interrupt_between_the_two_renames_brings_back_what_was_there(tmp_path, monkeypatch, done):
    target, rename = tmp_path / "target", Path.rename
    write(target, b"before")

    def interrupted(path: Path, to: Path) -> Path:
        if not done and path.parent == tmp_path / f".target{PARTIAL}":
            raise KeyboardInterrupt
        rename(path, to)
        if done and path == target:
            raise KeyboardInterrupt
        return to

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(target, b"after")
    assert (target / "folder/file").read_bytes() == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_full_disk_is_found_out_before_writing(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(total=0, free=0))
    write(tmp_path / "no size")
    remove(tmp_path / "no size")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=5_000_000_000))
    message = r"needs 8\.44 GiB, and 4\.66 GiB is free"
    with pytest.raises(DiskFull, match=message), written_aside(tmp_path / "target", {}, 9_000_000_000):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda d: (d / MANIFEST).unlink(), "not complete: it has no complete.json"),
        (lambda d: (d / MANIFEST).write_text('{"format": 1'), "complete.json is damaged"),
        (lambda d: (d / MANIFEST).write_text("[]"), "complete.json is damaged"),
        (lambda d: (d / "folder/file").unlink(), "damaged: folder/file is missing"),
        (lambda d: (d / "folder/file").write_bytes(b"cont"), "file is damaged: 7 bytes expected, 4 there"),
        (lambda d: (d / MANIFEST).write_text(json.dumps({"format": 2, "files": {}})), "has format 2"),
    ],
)
def test_what_is_damaged_is_named(tmp_path, break_it, message):
    target = tmp_path / "target"
    write(target)
    break_it(target)
    with pytest.raises(UserError, match=message):
        read_manifest(target)


def test_reading_compares_hashes(tmp_path):
    target = tmp_path / "target"
    write(target)
    file, entry = target / "folder/file", read_manifest(target)["files"]["folder/file"]
    first, second = bytearray(3), bytearray(4)
    read_into(file, entry, [memoryview(first), memoryview(second)])
    assert bytes(first + second) == b"content"
    file.write_bytes(b"conTent")
    with pytest.raises(UserError, match="file is damaged"):
        read_into(file, entry, [memoryview(first), memoryview(second)])
    with pytest.raises(UserError, match="file is damaged"):
        check_hash(file, entry)
    file.write_bytes(b"cont")
    with pytest.raises(UserError, match="file ends after 4 bytes"):
        read_into(file, entry, [memoryview(first), memoryview(second)])


def test_a_deletion_cut_short_does_not_look_whole(tmp_path, monkeypatch):
    target = tmp_path / "target"
    write(target)
    monkeypatch.setattr(shutil, "rmtree", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        remove(target)
    assert not target.exists() and list(tmp_path.iterdir()) == [tmp_path / f".target{PARTIAL}"]
    monkeypatch.undo()
    assert discard(tmp_path / f".target{PARTIAL}") and list(tmp_path.iterdir()) == []


def test_a_deletion_cut_short_anywhere_is_finished_by_the_next(tmp_path, monkeypatch):
    """The mark is there until all else is gone."""
    target = tmp_path / "target"
    for calls in range(12):
        write(target)
        with monkeypatch.context() as patch:
            left = [calls]
            for name in ("unlink", "rmdir"):
                patch.setattr(os, name, killed_after(left, getattr(os, name)))
            with suppress(KeyboardInterrupt):
                remove(target)
        assert left[0] < 0 or calls > 5
        write(target)
        assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_damaged_directory_takes_the_place_of_no_other(tmp_path):
    for name, aside in (
        ("checkpoint-7", "checkpoint-7.damaged"),
        (f".checkpoint-7{REPLACED}", "checkpoint-7.damaged-2"),
        ("checkpoint-7.replaced", "checkpoint-7.damaged-3"),
    ):
        leave(tmp_path / name, name)
        assert set_aside(tmp_path / name) == tmp_path / aside and (tmp_path / aside / name).exists()
    assert len(list(tmp_path.iterdir())) == 3


def test_names_up_to_the_longest(tmp_path):
    longest = 255 - len(f".{REPLACED}")
    target = tmp_path / ("é" * (longest // 2) + "x" * (longest % 2))
    check_name(target)
    write(target, b"before")
    write(target, b"after")
    assert [path.name for path in tmp_path.iterdir()] == [target.name]
    with pytest.raises(UserError, match=f"xx is too long: choose one of at most {longest} bytes"):
        check_name(target.with_name(target.name + "xx"))


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP], ids=["EINVAL", "ENOTSUP"])
def test_a_file_system_that_syncs_no_folders(tmp_path, monkeypatch, code):
    Refusals(monkeypatch).syncing_folders(code)
    write(tmp_path / "target")
    write(tmp_path / "checkpoint-1")
    set_aside(tmp_path / "checkpoint-1")
    remove(tmp_path / "target")
    assert os.listdir(tmp_path) == ["checkpoint-1.damaged"]


def test_another_error_of_a_folder_is_one_and_leaves_nothing(tmp_path, monkeypatch):
    Refusals(monkeypatch).syncing_folders(errno.EIO)
    with pytest.raises(OSError, match="Input/output error") as error:
        write(tmp_path / "target")
    assert str(error.value.filename).startswith(str(tmp_path)) and not os.listdir(tmp_path)


def test_what_is_written_into_a_deleted_folder_does_not_make_it_again(tmp_path):
    target = tmp_path / "run" / "target"
    target.parent.mkdir()
    with pytest.raises(FileNotFoundError), written_aside(target, {}, 0) as aside:
        shutil.rmtree(target.parent)
        aside.write("folder/file", [b"content"])
    with pytest.raises(FileNotFoundError), written_aside(target, {}, 0):
        pass
    assert list(tmp_path.iterdir()) == []
