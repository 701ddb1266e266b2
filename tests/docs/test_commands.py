"""Commands in the documents: the command line takes their options, and the config the keys that they set."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from typer.main import get_command

from rptrain.cli import argv
from rptrain.cli.commands import app
from rptrain.cli.root import UsageError
from rptrain.config.errors import ConfigError
from rptrain.config.resolve import resolve

from .reading import DOCUMENTS, ROOT, Command, blocks, commands, spans

PROGRAM = get_command(app)
OWN = next(block.text for block in blocks(ROOT / "README.md") if block.language == "toml")  # my.toml
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def programs() -> Iterator[Command]:
    """The arguments of every `rptrain` command in a shell block."""
    for command in commands():
        words = command.words
        for start in (("rptrain",), ("-m", "rptrain")):
            places = [i for i in range(len(words)) if words[i : i + len(start)] == start]
            if places and (len(start) == 2 or places == [0]):
                yield Command(command.place, words[places[0] + len(start) :])
        if words[:3] == ("python", "-m", "benchmarks.compare"):  # which runs `rptrain bench` on each of its arguments
            yield from (
                Command(command.place, ("bench", *shlex.split(word))) for word in words if word.startswith("--config ")
            )


def inline() -> Iterator[Command]:
    for document in DOCUMENTS:
        for place, text in spans(document):
            if text == "rptrain" or text.startswith("rptrain "):
                words = [re.sub("^[A-Z]$", "1", word) for word in shlex.split(text)[1:] if word not in ("…", "...")]
                yield Command(f"{place}: {text}", tuple(words))


def config_of(path: str) -> tuple[Path, str | None]:
    """The file of the repository that a command names, or a name and the text of the README's config."""
    file = ROOT / path
    return (file, None) if file.is_file() else (Path("my.toml"), OWN)


def fault(command: Command, *, whole: bool) -> str | None:
    """What the command line would refuse. `whole`: nothing is left out of the command."""
    words = argv.arguments(list(command.words))
    if not words or words[0] in argv._GLOBAL_OPTIONS:
        return None
    parent, name, arguments = PROGRAM, words[0], words[1:]
    while hasattr(parent, "commands") and name in parent.commands and hasattr(parent.commands[name], "commands"):
        if not arguments:
            return None
        parent, name, arguments = parent.commands[name], arguments[0], arguments[1:]
    if name not in parent.commands:
        return f"no command {name}"
    try:
        params = parent.commands[name].make_context(name, arguments).params
    except UsageError as error:
        left_out = error.__class__.__name__ == "MissingParameter" or "requires an argument" in error.format_message()
        return None if left_out and not whole else error.format_message()
    if (config := params.get("config")) is not None:
        path, text = config_of(str(config))
        try:
            resolve(path, params.get("overrides") or (), text)
        except ConfigError as error:
            return str(error)
    return None


def test_every_command_is_accepted():
    found = {command.place: fault(command, whole=True) for command in programs()}
    assert len(found) > 50
    assert [f"{place}: {text}" for place, text in found.items() if text] == []


def test_every_command_in_a_sentence_is_accepted():
    found = {command.place: fault(command, whole=False) for command in inline()}
    assert len(found) > 50
    assert [f"{place}: {text}" for place, text in found.items() if text] == []


def test_every_benchmark_has_its_options():
    for command in commands():
        if len(words := command.words) > 2 and words[:2] == ("python", "-m") and words[2].startswith("benchmarks."):
            spec = find_spec(words[2])
            assert spec is not None and spec.origin, f"{command.place}: there is no {words[2]}"
            folder = Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)
            files = folder.glob("*.py") if folder.is_dir() else [folder]
            source = "".join(file.read_text() for file in files)
            for option in (word for word in words[3:] if re.fullmatch("--[a-z-]+", word)):
                assert f'"{option}"' in source, f"{command.place}: {words[2]} has no {option}"


def test_every_pytest_command_names_markers_and_files_that_exist():
    markers = {line.partition(":")[0] for line in PYPROJECT["tool"]["pytest"]["ini_options"]["markers"]}
    for command in commands():
        words = command.words
        if "pytest" not in words:
            continue
        arguments = words[words.index("pytest") + 1 :]
        for option, value in pairwise(arguments):
            if option == "-m":
                named = set(re.findall(r"\w+", value)) - {"and", "or", "not"}
                assert named <= markers, command.place
        for word in arguments:
            assert not word.startswith("tests/") or (ROOT / word).exists(), f"{command.place}: {word} does not exist"
