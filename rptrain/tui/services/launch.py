"""Starting trainers and exports, which outlive the interface: processes in a session of their own, with a log file."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import BinaryIO

import tomlkit

from rptrain.checkpoint.atomic_dir import beside
from rptrain.runs.folder.ending import memory_kills
from rptrain.runs.folder.event_log import EventLog
from rptrain.runs.records.tail import end_of
from rptrain.utils.errors import UserError
from rptrain.utils.locks import lock
from rptrain.utils.paths import expanded, inside
from rptrain.utils.phase_display import PERIOD_KEY

RPTRAIN = (sys.executable, "-P", "-m", "rptrain")  # -P: without the current directory on the path
COMMAND = (*RPTRAIN, "train")
EXPORT = (*RPTRAIN, "export")
LOG = "trainer.log"  # in a run's folder: the output of the trainer and its libraries
OUTPUT = ".rptrain-log"  # suffix of the hidden file beside the folder, until the folder exists
PERIOD = {PERIOD_KEY: "1"}  # seconds between a starting trainer's lines about its phases, which Run shows as a bar
NEW_RUN = "save.resume=never"  # what a started run does not take from its config
_NUMBERED = re.compile(r"(.+)-([2-9]|[1-9]\d{1,2})")  # the name of a run, as `free_name` makes them
SAID = 4000  # bytes from the end of a process's output


@dataclass
class Launched:
    """A started process. Its run's folder may not exist yet: it is created once config and data were checked."""

    process: "subprocess.Popen[bytes]"
    path: Path  # the run, or the target of an export
    log: Path
    before: int = 0  # bytes of the log from earlier processes
    began: float = field(default_factory=time.time)  # Unix seconds
    fresh: bool = False  # a new run, not one that is resumed
    noticed: bool = False  # that it has ended
    kills: int = field(default_factory=memory_kills)  # when it was started

    @property
    def running(self) -> bool:
        """Whether the process is still running; an ended one is reaped."""
        return self.process.poll() is None

    def move_log(self) -> bool:
        """Moves the log into the run's folder, where the trainer keeps writing. Returns whether the folder exists."""
        if not os.path.isfile(self.path / "config.toml"):
            return False
        moved = self.path / LOG
        if self.log != moved:
            try:
                self.log = self.log.rename(moved)
            except OSError:  # it stays beside the folder, where it is found too
                return True
        return True

    def said(self) -> str:
        """The end of its output."""
        return end_of(self.log, SAID, self.before).strip()


def log_of(run: Path) -> Path:
    """The output of a run's trainers: in its folder, or beside it if it was not moved."""
    moved, outside = run / LOG, beside(run, OUTPUT)
    return outside if not os.path.exists(moved) and os.path.exists(outside) else moved


def free_name(output_dir: str, run_name: str) -> str:
    """The name that a new run gets: its own, or the next one with a number that no folder has, as support-2 after
    support. Raises UserError if the folder of runs is not valid.
    """
    return next(_free_names(expanded(output_dir), run_name))


def free_file(path: Path, run_name: str) -> Path:
    """The file for a new config: the path itself, or if it exists, one beside it that is named after the run."""
    beside = (path.with_name(f"{name}.toml") for name in chain([run_name], (f"{run_name}-{n}" for n in count(2))))
    return next(file for file in chain([path], beside) if not os.path.lexists(file))


def _free_names(parent: Path, run_name: str) -> Iterator[str]:
    """A name, if no folder has it, and then the free ones with a number. A number in the name itself is counted up only
    if a run has the name without it: support-2 after support, but not lora-16.
    """
    if not os.path.exists(parent / run_name):
        yield run_name
    numbered = _NUMBERED.fullmatch(run_name)
    if numbered and os.path.exists(parent / numbered[1]):
        base, first = numbered[1], int(numbered[2]) + 1
    else:
        base, first = run_name, 2
    yield from (name for number in count(first) if not os.path.exists(parent / (name := f"{base}-{number}")))


def start(config: Path, output_dir: str, run_name: str, environment: Mapping[str, str]) -> Launched:
    """Starts a new run of a config, in a folder with a free name. Raises UserError if that is not possible.

    The log of a failed start is kept until the next start with that name.
    """
    parent = expanded(output_dir)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        opened = ((name, _open(beside(parent / name, OUTPUT))) for name in _free_names(parent, run_name))
        name, output = next((name, output) for name, output in opened if output)  # others are being started
        output.truncate(0)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot create a run in {parent}: {getattr(error, 'strerror', None) or error}") from None
    overrides = [NEW_RUN, f"log.run_name={_text(name)}"]
    path = parent / name
    process = _begin([*COMMAND, "--config", str(config), *overrides], output, {**environment, **PERIOD})
    return Launched(process, path, beside(path, OUTPUT), fresh=True)


def resume(run: Path, environment: Mapping[str, str]) -> Launched:
    """Resumes a run from its last checkpoint. Raises UserError if that is not possible, or if a process trains it."""
    log, events = run / LOG, run / "events.jsonl"
    try:
        if events.is_file():
            EventLog(events).close()  # raises UserError if another process trains it
        output = inside(run, LOG).open("ab")
    except OSError as error:
        raise UserError(f"{run} cannot be resumed: {error.strerror}") from None
    before = output.tell()
    command = [*COMMAND, "--config", str(run / "config.toml"), f"save.resume={_text(str(run))}"]
    return Launched(_begin(command, output, {**environment, **PERIOD}), run, log, before)


def export(source: Path, to: Path, options: Sequence[str], environment: Mapping[str, str]) -> Launched:
    """Exports a run's result, or a checkpoint, with these options of `rptrain export`. Its progress is in
    the log, as records. Raises UserError if it cannot be started.
    """
    log = beside(to, OUTPUT)
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        output = _open(log)
    except OSError as error:
        raise UserError(f"{log} cannot be written: {error.strerror}") from None
    if output is None:
        raise UserError(f"an export to {to} is running")
    output.truncate(0)
    command = [*EXPORT, str(source), "--to", str(to), "--json", *options]
    return Launched(_begin(command, output, environment), to, log)


def _open(log: Path) -> BinaryIO | None:
    """Opens a file for appending and locks it if its file system has locks; None if another process has locked it."""
    output = log.open("ab")
    try:
        lock(output.fileno())  # the started process reports a file system without locks
    except BlockingIOError:
        output.close()
        return None
    return output


def _begin(command: Sequence[str], output: BinaryIO, environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    with output:
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **environment},
            )
        except OSError as error:
            raise UserError(f"{command[0]} cannot be started: {error.strerror}") from None


def _text(value: str) -> str:
    """A text in TOML; JSON escapes some characters in a way that TOML does not accept."""
    return tomlkit.item(value).as_string()
