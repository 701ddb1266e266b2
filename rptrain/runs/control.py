"""What a person tells a run that is under way: by signals, and by files in its folder `control`; both ends of it."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from rptrain.utils.errors import UserError

FOLDER = "control"
PAUSE, SAVE, STOP = "PAUSE", "SAVE", "STOP"
INTERRUPTED = 130  # the exit code
LOOK = 0.2  # seconds between two looks while training is paused


class StopRequested(Exception):
    """The run was told to stop, and its state was saved."""


class Control:
    """Reads a run's `control` folder, where `touch control/SAVE` is a command; PAUSE holds while the file is there.

    Commands that were there before are removed, and `tell` is called with a line about each. One that cannot be
    removed, such as a folder with files in it, is told and does not count from then on.
    """

    def __init__(self, folder: Path, tell: Callable[[str], None]) -> None:
        self._folder = folder
        self._signals = 0
        self._taken: set[str] = set()
        self._stuck: set[str] = set()
        self._tell = tell
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            tell(f"the run does not accept commands: {folder} cannot be created: {error.strerror}")
        for name in (PAUSE, SAVE, STOP):
            if self._there(name) and self._remove(name):
                tell(f"{folder / name} was left from before, and is removed")

    @property
    def interrupted(self) -> bool:
        """Whether a signal asked for the end of the run."""
        return self._signals > 0

    @property
    def stops(self) -> bool:
        return self.interrupted or self._there(STOP)

    @property
    def pauses(self) -> bool:
        return self._there(PAUSE) and not self.stops

    @property
    def saves(self) -> bool:
        """Whether a save is asked for that was not taken up yet."""
        return SAVE not in self._taken and self._there(SAVE)

    def take(self) -> Callable[[], None]:
        """Takes up the request for a save; what is returned is called once that is done."""
        self._taken.add(SAVE)
        return self._saved

    def stopped(self) -> None:
        """STOP was obeyed."""
        self._remove(STOP)

    @contextmanager
    def signals(self) -> Iterator[None]:
        """The first Ctrl-C or SIGTERM saves after the step under way and ends the run, a second one ends it at once,
        and a third one the process, whatever its threads do.
        """

        def stop(number: int, frame: FrameType | None) -> None:
            self._signals += 1
            if self._signals > 2:
                os._exit(INTERRUPTED)
            if self._signals > 1:
                raise KeyboardInterrupt
            with suppress(OSError):  # not through the progress display, in whose midst this may be called
                os.write(2, b"\nsaving after this step; once more to stop at once\n")

        kinds = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(kind, stop) for kind in kinds]
        try:
            yield
        finally:
            for kind, handler in zip(kinds, before, strict=True):
                signal.signal(kind, handler)

    def _saved(self) -> None:
        self._remove(SAVE)
        self._taken.discard(SAVE)

    def _there(self, name: str) -> bool:
        there = os.path.lexists(self._folder / name)
        if not there:
            self._stuck.discard(name)
        return there and name not in self._stuck

    def _remove(self, name: str) -> bool:
        """Whether it is gone."""
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
    """Puts the command there. UserError where that cannot be."""
    try:
        (run / FOLDER).mkdir(exist_ok=True)
        (run / FOLDER / command).touch()
    except OSError as error:
        raise UserError(f"the command cannot be sent to the trainer: {error}") from None


def withdraw(run: Path, command: str) -> None:
    """Takes a command back; nothing where it was not given. UserError where that cannot be."""
    try:
        (run / FOLDER / command).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{command.lower()} cannot be withdrawn: {error}") from None


def is_asked(run: Path, command: str) -> bool:
    return os.path.exists(run / FOLDER / command)
