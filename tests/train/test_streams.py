"""Training without standard streams: a service may close them."""

import subprocess
import sys

import pytest

from .. import run_tools as tools


@pytest.mark.long
def test_closed_streams(tmp_path):
    command = [sys.executable, "-P", "-m", "rptrain", "--config", str(tmp_path / "run.toml"), "--dry-run"]
    tools.write_model(tmp_path / "model")
    tools.write_config(tmp_path)
    assert subprocess.run(["sh", "-c", '"$@" >&- 2>&- <&-', "sh", *command], check=False).returncode == 0


def test_the_interface_without_a_terminal(tmp_path):
    shown = subprocess.run(
        ["sh", "-c", '"$@" <&-', "sh", sys.executable, "-P", "-m", "rptrain"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert shown.returncode == 2 and "the interface needs a terminal" in shown.stderr
