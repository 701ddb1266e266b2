"""The state that screens share: the folder of runs, the helper process, preferences and the draft."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rptrain.runs.folder.listing import GLANCE
from rptrain.runs.view.run_view import RunView
from rptrain.tui.services.draft import Draft
from rptrain.tui.services.helper import Helper
from rptrain.tui.services.launch import Launched, resume, start
from rptrain.tui.services.preferences import Preferences
from rptrain.tui.turns import Readings
from rptrain.utils.errors import UserError


class Conversation(Protocol):
    """A model that is loaded in a process of its own; see rptrain/tui/chat/session.py."""

    async def unload(self, why: str) -> None: ...

    async def close(self) -> None: ...


@dataclass
class Context:
    draft: Draft
    runs_folder: Path
    helper: Helper
    preferences: Preferences
    preferences_path: Path
    environment: Mapping[str, str] = field(default_factory=dict)  # differences of the trainer's environment
    chat: Conversation | None = None  # its model stays loaded while another screen is shown
    unsaved: bool = False  # the draft has edits that are not in its file
    welcome: bool = False  # neither a run nor a config exists yet
    launched: dict[Path, Launched] = field(default_factory=dict)  # processes started here, by folder
    opened: set[Path] = field(default_factory=set)  # runs that were shown
    readings: Readings = field(default_factory=Readings)

    async def start(self, config: Path, output_dir: str, run_name: str) -> Launched:
        """Starts a new run. Raises UserError if it cannot be started."""
        launched = start(config, output_dir, run_name, self.environment)
        await self._started(launched)
        return launched

    async def resume(self, run: Path) -> Launched:
        """Resumes a run. Raises UserError if it cannot be resumed, or is already starting."""
        if run in self.launched and self.launched[run].running:
            raise UserError(f"the trainer of {run.name} is already starting")
        launched = resume(run, self.environment)
        await self._started(launched)
        return launched

    async def _started(self, launched: Launched) -> None:
        """Unloads a model that answers: the trainer needs its memory, and plans only after it has imported torch."""
        self.launched[launched.path] = launched
        if self.chat is not None:
            await self.chat.unload("A training was started, which needs the memory of this model.")

    def training(self) -> str:
        """The name of a run that a process started here trains or is about to train. Empty if there is none."""
        return next((run.path.name for run in self.launched.values() if run.running), "")

    def starting(self) -> str:
        """The name of a run whose trainer was started here and has not taken all its memory yet. Empty if there is
        none. Reads records of runs, and may be called in a thread.
        """
        return next((run.path.name for run in [*self.launched.values()] if run.running and not _has_loaded(run)), "")

    def take_ended(self) -> list[Launched]:
        """The processes started here that have ended since the last call. Moves logs of processes into their runs."""
        ended = []
        for launched in self.launched.values():
            running = launched.running  # before the log is moved, so that no log of an ended process stays behind
            launched.move_log()
            if not running and not launched.noticed:
                launched.noticed = True
                ended.append(launched)
        return ended


def _has_loaded(launched: Launched) -> bool:
    """Whether a trainer has loaded its model."""
    recent = RunView(launched.path, large=GLANCE).recent
    return any(snapshot.time > launched.began and snapshot.phase != "loading" for snapshot in recent)
