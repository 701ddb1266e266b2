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
class BeginWith(Message):
    """Start a new run with the settings of an earlier one."""

    path: Path


@dataclass
class OpenChat(Message):
    """Talk to a run's model."""

    path: Path
