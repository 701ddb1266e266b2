"""The trial of a file system: what saves need is tried, and nothing is left."""

import errno
import os

import pytest

from rptrain.checkpoint.trial import remedy, try_saving

from ..refusals import Refusals


@pytest.mark.parametrize(
    ("code", "synced"),
    [(None, True), (errno.EINVAL, False), (errno.ENOTSUP, False)],
    ids=["synced", "EINVAL", "ENOTSUP"],
)
def test_a_file_system_on_which_runs_save(tmp_path, monkeypatch, code, synced):
    if code is not None:
        Refusals(monkeypatch).syncing_folders(code)
    assert try_saving(tmp_path) is synced and not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("refused", "code"),
    [
        ("syncing_folders", errno.EIO),
        ("syncing_files", errno.EINVAL),
        ("renaming_folders", errno.ENOSYS),
        ("renaming_folders", errno.EMFILE),
        ("replacing_files", errno.EPERM),
    ],
    ids=["folders", "files", "no_renames", "renames_of_few_files", "no_replacing"],
)
def test_a_file_system_on_which_runs_cannot_save(tmp_path, monkeypatch, refused, code):
    getattr(Refusals(monkeypatch), refused)(code)
    with pytest.raises(OSError, match=os.strerror(code)) as error:
        try_saving(tmp_path)
    assert error.value.errno == code and not os.listdir(tmp_path)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT], ids=["full", "quota"])
def test_a_full_file_system_refuses_nothing(tmp_path, monkeypatch, code):
    Refusals(monkeypatch).replacing_files(code)
    with pytest.raises(OSError) as error:
        try_saving(tmp_path)
    assert error.value.strerror == os.strerror(code) and remedy(error.value).startswith("free disk space, or set ")
