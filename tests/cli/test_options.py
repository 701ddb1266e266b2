"""Options of several commands."""

from pathlib import Path

import pytest

from rptrain.cli.options import existing
from rptrain.utils.errors import UserError


def test_a_run_is_found_by_its_name_unless_there_is_such_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/my").mkdir(parents=True)
    assert existing(Path("my")) == Path("runs/my") and existing(Path("runs/my")) == Path("runs/my")
    Path("my").mkdir()
    assert existing(Path("my")) == Path("my")
    with pytest.raises(UserError, match="other does not exist"):
        existing(Path("other"))
