"""Messages from screens to the application."""

from dataclasses import dataclass
from pathlib import Path

from textual.message import Message

from rptrain.tui.services.launch import Launched


@dataclass
class OpenRun(Message):
    """Show a run; `launched` if it was started here and may not have a folder yet."""

    path: Path
    launched: Launched | None = None


@dataclass
class Correct(Message):
    """Return to the settings of a run that did not start, at the one to correct if it is known."""

    key: str | None


@dataclass
class RunEnded(Message):
    """A run has ended. `code`: how its process ended, as `subprocess.Popen.returncode`, if it is known."""

    path: Path
    code: int | None = None
    began: float = 0.0  # Unix time of the start of its process


@dataclass
class TakeBack(Message):
    """Remove a notice that does not apply any more."""

    notice: str


@dataclass
class BeginWith(Message):
    """Start a new run with the settings of an earlier one."""

    path: Path


@dataclass
class OpenChat(Message):
    """Talk to a run's model."""

    path: Path


@dataclass
class Browse(Message):
    """Show the data of a config: its file and its text, which may not be saved."""

    path: Path
    text: str


@dataclass
class Export(Message):
    """Ask what of a run to export, and export it."""

    path: Path
