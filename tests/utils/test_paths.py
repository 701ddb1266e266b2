"""Paths that begin with a home directory."""

from pathlib import Path

import pytest

from rptrain.utils.errors import UserError
from rptrain.utils.paths import expanded, expanded_text, from_environment


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
