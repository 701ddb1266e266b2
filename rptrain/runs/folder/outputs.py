"""Output files of commands at paths that the user names: checks of what they may replace, and writing them."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from glob import glob
from itertools import combinations
from os.path import exists, isdir, isfile, lexists, realpath, samefile
from pathlib import Path
from tempfile import TemporaryFile

from rptrain.checkpoint.atomic_dir import complete_checkpoints
from rptrain.checkpoint.metadata import CHECKPOINTS, EVENTS, RUN_CONFIG
from rptrain.config.schema import Config
from rptrain.data.folders import walk
from rptrain.runs.folder.run_dir import RunDir
from rptrain.utils.errors import UserError
from rptrain.utils.replacing import replace_file

BEGINNING = 1024  # bytes at the start of a file in which the mark is searched


@dataclass(frozen=True)
class Output:
    """A file to write. An existing file is replaced only if it begins with the mark of the same command, or if `force`
    is set.
    """

    option: str  # such as "--svg", for messages
    path: Path
    mark: re.Pattern[bytes]
    force: bool

    @property
    def file(self) -> Path:
        """The path with links resolved, so that links to the file stay."""
        return Path(realpath(self.path))

    @property
    def is_own(self) -> bool:
        """Whether the file does not exist yet or has the mark. UserError if it cannot be read."""
        if not isfile(self.file):
            return not lexists(self.file)
        try:
            with self.file.open("rb") as file:
                return self.mark.match(file.read(BEGINNING)) is not None
        except OSError as error:
            raise UserError(f"{self.option}: {self.path} cannot be read: {error.strerror}: name another file") from None

    def check_mark(self) -> None:
        """UserError if the file must not be replaced."""
        if not (self.force or self.is_own):
            raise UserError(
                f"{self.option}: {self.path} exists, and this command did not write it: name another file, or add "
                "--force to replace it"
            )

    def write(self, text: str) -> None:
        """Replaces the whole file. UserError if it cannot be written, or if another program created it meanwhile."""
        self.check_mark()
        replace_text(self.path, text)


def check(outputs: Iterable[Output | None], config_path: Path, config: Config) -> None:
    """Checks output files before any work is done. None stands for an option that was not given.

    UserError if a file is an input of the config (even with `force`), must not be replaced, or cannot be written, or if
    two are the same file. Whether a file can be written is tested by opening it; the test leaves nothing behind.
    """
    given = [output for output in outputs if output is not None]
    for output in given:
        _check_place(output)
        _check_inputs(output, _inputs(config_path, config))
        _check_run(output)
        output.check_mark()
        _try(output)
    for first, second in combinations(given, 2):
        if _are_same(first.file, second.file):
            raise UserError(f"{first.option} and {second.option} name the same file, {first.path}: name two files")
    if given and not isfile(Path(config.model.path, "config.json")):
        for output in given:
            _check_inputs(output, _located_model(config))


def replace_text(path: Path, text: str) -> None:
    """Replaces a text file as `replace_file` does. UserError if it cannot be written."""
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None


def _check_place(output: Output) -> None:
    file = output.file
    if not isdir(file.parent):
        raise UserError(f"{output.option}: the folder {file.parent} does not exist: create it, or name another file")
    if exists(file) and not isfile(file):  # writing to a device may fail after all work is done
        raise UserError(f"{output.option}: {output.path} is not a regular file: name another file")


def _try(output: Output) -> None:
    file = output.file
    try:
        if exists(file):
            file.open("ab").close()
            TemporaryFile(dir=file.parent).close()
        else:
            file.open("xb").close()
            file.unlink()
    except OSError as error:
        reason = f"{output.path} cannot be written: {error.strerror}"
        raise UserError(f"{output.option}: {reason}: name another file") from None


def _check_inputs(output: Output, inputs: Iterable[tuple[str, str | Path]]) -> None:
    for name, source in inputs:
        if _is_part(output.file, source):
            raise UserError(f"{output.option}: {output.path} is part of the input {source} ({name}): name another file")


def _check_run(output: Output) -> None:
    """UserError for a file in a run's folder, unless it is new or marked and at the top level of the folder."""
    run = next((run for run in map(RunDir, output.file.parents) if _is_run(run)), None)
    if run is not None and not (output.is_own and output.file.parent == run.path):
        raise UserError(f"{output.option}: {output.path} is part of the run {run.path}: name another file")


def _is_run(run: RunDir) -> bool:
    if not isfile(run.path / RUN_CONFIG):
        return False
    return isfile(run.path / EVENTS) or bool(complete_checkpoints(run.path / CHECKPOINTS))


def _inputs(config_path: Path, config: Config) -> Iterator[tuple[str, str | Path]]:
    """The config, and the files, folders and patterns that it names, with their keys."""
    yield "--config", config_path
    yield "model.path", config.model.path
    for key, sets in (("train", config.data.train), ("val", config.data.val)):
        for index, source in enumerate(sets):
            yield f"data.{key}.{index}.path", source.path
    template, cache = config.data.chat_template, config.data.cache_dir
    if template is not None and isfile(template):  # the value may be the text of a template
        yield "data.chat_template", template
    if cache is not None:
        yield "data.cache_dir", cache
    if config.adapters is not None and config.adapters.adapter is not None:
        yield "lora.adapter", config.adapters.adapter


def _located_model(config: Config) -> Sequence[tuple[str, Path]]:
    """The folder of a preset or of a model in the hub's cache. A missing model is an error of the planner, not here."""
    from rptrain.models.locate import locate  # imports torch

    try:
        return [("model.path", locate(config.model.path))]
    except UserError:
        return []


def _is_part(file: Path, source: str | Path) -> bool:
    """Whether the path is the source or lies in it, or the file has a hard link there."""
    if file.is_relative_to(realpath(source)):
        return True
    return exists(file) and any(exists(other) and samefile(other, file) for other in _files(source))


def _files(source: str | Path) -> Iterable[str | Path]:
    """The file itself, the files in a folder, or the files that match a pattern."""
    if isdir(source):
        return walk(Path(source))
    return [source] if exists(source) else glob(str(source), recursive=True)


def _are_same(first: Path, second: Path) -> bool:
    return first == second or (exists(first) and exists(second) and samefile(first, second))
