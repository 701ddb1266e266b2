"""What the shells complete."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rptrain.cli.commands import app

PROGRAM = """
import sys
from rptrain import cli
sys.argv = ["rptrain"]
try:
    cli.main()
finally:
    print([name for name in ("torch", "numpy", "transformers", "textual") if name in sys.modules])
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("my", "mine", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.toml").touch()
    (tmp_path / "runs" / "no-run").mkdir()
    (tmp_path / "elsewhere" / "far").mkdir(parents=True)
    (tmp_path / "elsewhere" / "far" / "config.toml").touch()
    (tmp_path / "elsewhere" / "b.toml").touch()
    (tmp_path / "a.toml").touch()
    return tmp_path


def completed(line: str) -> list[str]:
    """What bash offers at the end of a line."""
    words = shlex.split(line) + ([""] if line.endswith(" ") else [])
    environment = {"_RPTRAIN_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    done = CliRunner().invoke(app, [], env=environment, prog_name="rptrain")
    assert done.exit_code == 0, done.output
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("rptrain at", ["attach"]),
        ("rptrain --conf", ["--config"]),
        ("rptrain plan --comp", ["--compare"]),
        ("rptrain attach m", ["mine", "my"]),
        ("rptrain attach --runs elsewhere ", ["far"]),
        ("rptrain runs my ot", ["other"]),
        ("rptrain chat o", ["other"]),
        ("rptrain export my", ["my"]),
        ("rptrain generate my", ["my"]),
        ("rptrain chat runs/m", []),
        ("rptrain --config ", ["a.toml"]),
        ("rptrain plan --config elsewhere/", ["elsewhere/b.toml"]),
        ("rptrain train --config else", []),
        ("rptrain --config a.toml train.max_s", ["train.max_steps="]),
        ("rptrain a.toml train.max_s", ["train.max_steps="]),
        ("rptrain plan --config a.toml optim.update=", ["optim.update=async", "optim.update=sync"]),
        ("rptrain plan --config a.toml data.packing=f", ["data.packing=false"]),
        ("rptrain plan --config a.toml train.max_steps=", []),
        ("rptrain plan --config a.toml none=", []),
        ("rptrain plan --svg ru", []),
    ],
)
def test_it_completes(line, offered):
    assert completed(line) == offered


def test_names_that_a_terminal_would_interpret_are_left_out(folder):
    (folder / "runs" / "m\x1b[31m").mkdir()
    (folder / "runs" / "m\x1b[31m" / "config.toml").touch()
    assert completed("rptrain attach m") == ["mine", "my"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_a_script(shell):
    environment = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1", "_RPTRAIN_COMPLETE": f"source_{shell}"}
    done = CliRunner().invoke(app, [], env=environment, prog_name="rptrain")
    assert done.exit_code == 0 and f"complete_{shell}" in done.stdout, done.output


def test_completing_keys_loads_nothing_heavy():
    words = {"COMP_WORDS": "rptrain --config a.toml train.max_s", "COMP_CWORD": "3"}
    environment = {**os.environ, **words, "_RPTRAIN_COMPLETE": "complete_bash"}
    done = subprocess.run([sys.executable, "-P", "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["train.max_steps=", "[]"], done.stderr
