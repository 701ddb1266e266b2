"""Folders to train in."""

from pathlib import Path

import pytest

from .. import run_tools as tools


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a `model`."""
    tools.write_model(tmp_path / "model")
    return tmp_path
