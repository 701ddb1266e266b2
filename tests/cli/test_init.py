"""`rptrain init`: the files that it writes, and those that it leaves alone."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rptrain.cli import argv
from rptrain.cli.commands import app
from rptrain.config import recipes
from rptrain.config.resolve import resolve
from rptrain.utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str):
    return CliRunner().invoke(app, argv.arguments(list(arguments)))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_writes_the_example_and_names_the_next_command(folder):
    result = run("init")
    assert result.exit_code == 0 and "rptrain --config rptrain.toml" in result.stdout
    assert (folder / "rptrain.toml").read_bytes() == (ROOT / "rptrain.toml").read_bytes()


@pytest.mark.parametrize("name", recipes.names())
def test_each_recipe_is_a_config(name, folder):
    result = run("init", "--recipe", name)
    assert result.exit_code == 0 and f"rptrain --config {name}.toml --dry-run" in result.stdout
    assert (folder / f"{name}.toml").read_text() == recipes.text(name)
    assert resolve(f"{name}.toml").config.log.run_name == name
    assert f"{name} " in (listed := run("init", "--list").stdout) and recipes.title(name) in listed


def test_it_replaces_a_file_only_with_force(folder):
    (folder / "my.toml").write_text("mine")
    refused = run("init", "my.toml")
    assert refused.exit_code == 2 and "--force" in refused.stderr
    assert (folder / "my.toml").read_text() == "mine"
    assert run("init", "my.toml", "--force").exit_code == 0
    assert (folder / "my.toml").read_text() == recipes.example()


def test_it_does_not_write_through_a_dangling_link(folder):
    (folder / "my.toml").symlink_to("other.toml")
    assert run("init", "my.toml").exit_code == 2
    assert not (folder / "other.toml").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        pytest.param(("--recipe", "qlora-8"), "qlora-8b", id="misspelled"),
        pytest.param(("--recipe", "../recipes/qlora-8b"), "init --list", id="path"),
        pytest.param(("missing/my.toml",), "missing", id="folder-missing"),
        pytest.param(("chats.jsonl",), ".toml", id="not-a-config"),
        pytest.param(("folder.toml", "--force"), "folder.toml", id="folder"),
    ],
)
def test_what_cannot_be_written_is_refused(arguments, named, folder):
    (folder / "folder.toml").mkdir()
    result = run("init", *arguments)
    assert result.exit_code == 2 and named in result.stderr
    assert [path.name for path in folder.iterdir()] == ["folder.toml"]


def test_a_missing_config_names_the_command():
    with pytest.raises(UserError, match=r"no\.toml does not exist.*rptrain init"):
        resolve("no.toml")
