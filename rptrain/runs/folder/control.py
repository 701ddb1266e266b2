"""Commands to a running trainer: files in the run's folder `control`. Both ends are here."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rptrain.utils.errors import UserError, describe
from rptrain.utils.paths import inside
from rptrain.utils.signals import PROCESS

FOLDER = "control"
PAUSE, SAVE, STOP = "PAUSE", "SAVE", "STOP"
POLL = 0.2  # seconds between two checks for commands while training is paused


class StopRequested(Exception):
    """A command or a signal stopped the run, and its state was saved."""


@dataclass(frozen=True)
class Commands:
    """What a run is asked to do after a step. `stops`: by the STOP command or by a signal."""

    stops: bool
    pauses: bool
    saves: bool

    def __bool__(self) -> bool:
        return self.stops or self.pauses or self.saves


class Control:
    """Reads commands from a run's `control` folder, such as `touch control/SAVE`. PAUSE holds while its file exists.

    Commands left from an earlier process are removed, and `tell` is called with a message about each of them. A
    command that cannot be removed, such as a folder with files in it, is reported and then ignored. Without a folder,
    only signals are commands.
    """

    def __init__(self, folder: Path | None, tell: Callable[[str], None]) -> None:
        self._folder = folder
        self._taken: set[str] = set()
        self._stuck: set[str] = set()
        self._tell = tell
        if folder is None:
            return
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            tell(f"the run does not accept commands: {folder} cannot be created: {error.strerror}")
        for name in (PAUSE, SAVE, STOP):
            if self._there(name) and self._remove(name):
                tell(f"{folder / name} was left from before, and is removed")

    def read(self) -> Commands:
        """The commands at this moment."""
        return Commands(self.stops, self.pauses, self.saves)

    @property
    def stops(self) -> bool:
        """Whether the STOP command or a signal asked the run to stop."""
        return PROCESS.received > 0 or self._there(STOP)

    @property
    def pauses(self) -> bool:
        return self._there(PAUSE) and not self.stops

    @property
    def saves(self) -> bool:
        """Whether a save was requested that `take` has not accepted yet."""
        return SAVE not in self._taken and self._there(SAVE)

    def take(self) -> Callable[[], None]:
        """Accepts the request for a save. Call the returned function when the save is done."""
        self._taken.add(SAVE)
        return self._saved

    def stopped(self) -> None:
        """Removes the STOP command after it was carried out."""
        self._remove(STOP)

    def _saved(self) -> None:
        self._remove(SAVE)
        self._taken.discard(SAVE)

    def _there(self, name: str) -> bool:
        there = self._folder is not None and os.path.lexists(self._folder / name)
        if not there:
            self._stuck.discard(name)
        return there and name not in self._stuck

    def _remove(self, name: str) -> bool:
        """Removes a command and returns whether it is gone."""
        if self._folder is None:
            return True
        path = self._folder / name
        try:
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            self._stuck.add(name)
            self._tell(f"{path} cannot be removed ({error.strerror}): it is ignored while it is there")
            return False
        return True


def ask(run: Path, command: str) -> None:
    """Sends a command to a run. UserError if its file cannot be created, or if a link leads out of the run's folder."""
    try:
        inside(run, FOLDER).mkdir(exist_ok=True)
        inside(run, Path(FOLDER, command)).touch()
    except OSError as error:
        raise UserError(f"the command cannot be sent to the trainer: {describe(error)}") from None


def withdraw(run: Path, command: str) -> None:
    """Withdraws a command if it was sent. UserError as in `ask`."""
    try:
        inside(run, Path(FOLDER, command)).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{command.lower()} cannot be withdrawn: {describe(error)}") from None


def is_asked(run: Path, command: str) -> bool:
    return os.path.exists(run / FOLDER / command)
