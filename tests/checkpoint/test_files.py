import json
import shutil
from pathlib import Path

import pytest

from rptrain.checkpoint.files import (
    MANIFEST,
    PARTIAL,
    REPLACED,
    DiskFull,
    check_hash,
    read_into,
    read_manifest,
    remove,
    written_aside,
)
from rptrain.errors import UserError


def write(target, content=b"content"):
    with written_aside(target, {"kind": "test"}, 10) as aside:
        aside.write("folder/file", [content[:3], memoryview(content)[3:]])
        (aside.path / "other").write_bytes(b"written by someone else")


def test_a_directory_is_written_whole(tmp_path):
    target = tmp_path / "new" / "target"
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
        assert aside.path == tmp_path / f"target{PARTIAL}"
        assert not target.exists()
        assert not (aside.path / MANIFEST).exists()
    assert (target / MANIFEST).is_file()


def test_a_directory_is_replaced_and_leftovers_go(tmp_path):
    target = tmp_path / "target"
    write(target, b"before")
    (tmp_path / f"target{PARTIAL}").mkdir()
    (tmp_path / f"target{PARTIAL}" / "leftover").touch()
    write(target, b"after")
    assert (target / "folder/file").read_bytes() == b"after"
    assert not (target / "leftover").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path, monkeypatch):
    target = tmp_path / "target"
    write(target, b"before")
    rename = Path.rename

    def killed(self, to):
        if self.name.endswith(PARTIAL):
            raise KeyboardInterrupt
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        write(target, b"after")
    assert (tmp_path / f"target{REPLACED}" / "folder/file").read_bytes() == b"before"
    read_manifest(tmp_path / f"target{REPLACED}")


def test_a_full_disk_is_found_out_before_writing(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=5_000_000_000))
    message = r"needs 9\.07 GB, and 5\.00 GB are free"
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
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
    remove(target)
    assert not target.exists()
