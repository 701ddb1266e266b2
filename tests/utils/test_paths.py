"""Paths that begin with a home directory, that must not lead out of a folder, or where something will be written."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from rptrain.utils.errors import UserError
from rptrain.utils.paths import expanded, expanded_text, from_environment, inside, writable_place


def test_the_home_directory_replaces_the_tilde(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert expanded("~/x") == expanded(Path("~/x")) == Path("/home/me/x")
    assert [expanded_text(path) for path in ("~", "a/~b", "./~b/", "")] == ["/home/me", "a/~b", "./~b/", ""]


def test_a_home_that_is_unknown(monkeypatch):
    with pytest.raises(
        UserError, match=r'^~nosuchuser/x: the user "nosuchuser" does not exist: write the full path, or ./~no'
    ):
        expanded("~nosuchuser/x")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(UserError, match=r"^~/x: the home directory is unknown: set HOME"):
        expanded("~/x")


def test_a_path_of_an_environment_variable(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert from_environment("XDG_CACHE_HOME", "~/.cache") == Path("/home/me/.cache")
    monkeypatch.setenv("XDG_CACHE_HOME", "~/x")
    assert from_environment("XDG_CACHE_HOME", "~/.cache") == Path("/home/me/x")
    monkeypatch.setenv("XDG_CACHE_HOME", "~nosuchuser/x")
    with pytest.raises(UserError, match=r'^XDG_CACHE_HOME: ~nosuchuser/x: the user "nosuchuser" does not exist'):
        from_environment("XDG_CACHE_HOME", "~/.cache")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(
        UserError, match=r"^XDG_CACHE_HOME: ~/.cache: the home directory is unknown: set HOME, or write"
    ):
        from_environment("XDG_CACHE_HOME", "~/.cache")


def test_paths_inside_a_folder(tmp_path):
    folder, outside = tmp_path / "folder", tmp_path / "folder-2"
    for path in (folder / "a", outside):
        path.mkdir(parents=True)
    (tmp_path / "entry").symlink_to(folder)
    (folder / "near").symlink_to("a")
    (folder / "loop").symlink_to("loop")
    (folder / "out").symlink_to("../folder-2")
    (folder / "a/gone").symlink_to(tmp_path / "missing")
    for base in (folder, tmp_path / "entry"):
        for name in ("a", "near/x", "missing/x", "loop", "", "a/../near", "x\0"):
            assert inside(base, name) == base / name
        for name, target in (("out", outside), ("out/x", outside / "x"), ("near/gone", tmp_path / "missing")):
            with pytest.raises(UserError) as error:
                inside(base, name)
            assert str(error.value).startswith(f"{base / name} leads to {target}, outside of {base}: put the file")


def test_a_relative_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert inside("runs", "x") == Path("runs/x") and inside(".", "x") == Path("x")
    Path("x").symlink_to("/dev/null")
    with pytest.raises(UserError, match=r"x leads to /dev/null, outside of \.: "):
        inside(".", "x")


def test_where_a_folder_would_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "gone").symlink_to("nowhere/else")
    (tmp_path / "near").symlink_to(".")
    before = sorted(tmp_path.iterdir())
    assert writable_place(tmp_path / "a/b") == writable_place(tmp_path) == tmp_path
    assert writable_place(tmp_path / "near/a") == tmp_path / "near"
    monkeypatch.chdir(tmp_path)
    assert writable_place(Path("a/b")) == tmp_path and writable_place(Path("near")) == Path("near")

    def refused(folder: Path) -> str:
        with pytest.raises(OSError) as raised:
            writable_place(folder)
        return str(raised.value.strerror)

    assert refused(tmp_path / "file/a") == f"{tmp_path}/file is not a folder"
    assert refused(tmp_path / "gone") == f"{tmp_path}/gone is a link to a missing path"
    assert refused(Path("/proc/a")) == "/proc is a folder of the operating system"
    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY, f_blocks=1))
        assert refused(tmp_path / "a") == f"{tmp_path} is on a read-only file system"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert refused(tmp_path / "a") == f"{tmp_path} may not be written"
    assert sorted(tmp_path.iterdir()) == before, "nothing is written"
