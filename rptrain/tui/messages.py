"""What screens ask of the application."""

from dataclasses import dataclass
from pathlib import Path

from textual.message import Message

from rptrain.tui.services.launch import Launched


@dataclass
class OpenRun(Message):
    """Show a run; `launched` where it was begun from here and may not have a folder yet."""

    path: Path
    launched: Launched | None = None


@dataclass
class BeginWith(Message):
    """A new run with a past one's settings."""

    path: Path
