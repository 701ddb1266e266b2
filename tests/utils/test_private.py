"""Which files and folders of caches are this user's own."""

import os
import stat

import pytest

from rptrain.utils.private import Untrusted, check_own, close_own_folder, make_own_folder, own_folder, read_own


@pytest.mark.parametrize(
    ("uid", "mode", "problem"),
    [
        (1000, 0o600, None),
        (1000, 0o755, None),
        (0, 0o644, None),  # root can write everywhere
        (1001, 0o600, "belongs to another user (uid 1001)"),
        (65534, 0o444, "belongs to another user"),
        (1000, 0o620, "may be written by other users (mode 620)"),
        (1000, 0o1777, "may be written by other users (mode 1777)"),
        (0, 0o666, "may be written by other users"),
    ],
)
def test_whose_a_file_is(monkeypatch, uid, mode, problem):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    status = os.stat_result((stat.S_IFREG | mode, 1, 1, 1, uid, uid, 9, 0, 0, 0))
    if problem is None:
        check_own("file", status)
    else:
        with pytest.raises(Untrusted) as error:
            check_own("file", status)
        assert problem in str(error.value)


def test_what_counts_is_the_file_that_was_opened(tmp_path):
    """Not the link to it: another user's link to a file of this user gives nothing away that is not checked."""
    (tmp_path / "file").write_bytes(b"own")
    (tmp_path / "link").symlink_to("file")
    assert read_own(tmp_path / "link") == b"own"
    (tmp_path / "file").chmod(0o602)
    with pytest.raises(Untrusted, match=r"link may be written"):
        read_own(tmp_path / "link")


def test_new_folders_are_closed(tmp_path):
    (tmp_path / "old").mkdir(0o755)
    for _ in range(2):
        make_own_folder(tmp_path / "old/a/b")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("old", "old/a", "old/a/b")]
    assert modes == [0o755, 0o700, 0o700]
    (tmp_path / "file").touch()
    for place in ("file", "file/a"):
        with pytest.raises(OSError):
            make_own_folder(tmp_path / place)


def test_folders_that_others_may_write_to_are_closed(tmp_path):
    folder = tmp_path / "a/b"
    close_own_folder(folder)
    (folder / "x.json").touch()
    (folder / "x.txt").touch()
    close_own_folder(folder, "*.json")
    assert (folder / "x.json").exists(), "nobody else could write there"
    for mode in (0o770, 0o707):
        folder.chmod(mode)
        with pytest.raises(Untrusted, match=r"may be written by other users"), own_folder(folder):
            pass
        close_own_folder(folder, "*.json")
        with own_folder(folder) as place:
            assert os.listdir(place) == ["x.txt"]
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (tmp_path / "link").symlink_to(folder)
    for refused in (own_folder(tmp_path / "link"), own_folder(tmp_path / "none")):
        with pytest.raises(OSError), refused:
            pass


@pytest.mark.parametrize("uid", [0, 1001])
def test_another_users_folder_stays_as_it_is(tmp_path, monkeypatch, uid):
    """Root's, too: it has no entries of this user's."""
    tmp_path.chmod(0o775)
    status = os.stat_result((stat.S_IFDIR | 0o755, 1, 1, 1, uid, uid, 9, 0, 0, 0))
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 1000)
        patch.setattr(os, "fstat", lambda descriptor: status)
        close_own_folder(tmp_path)
        with pytest.raises(Untrusted, match=f"belongs to another user .uid {uid}."), own_folder(tmp_path):
            pass
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o775
