"""What the screens share: the folder of runs, the helper, preferences, the draft."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rptrain.tui.services.draft import Draft
from rptrain.tui.services.helper import Helper
from rptrain.tui.services.launch import Launched, resume, start
from rptrain.tui.services.preferences import Preferences
from rptrain.utils.errors import UserError


@dataclass
class Context:
    draft: Draft
    runs_folder: Path
    helper: Helper
    preferences: Preferences
    preferences_path: Path
    environment: Mapping[str, str] = field(default_factory=dict)  # what the trainer's differs in
    launched: dict[Path, Launched] = field(default_factory=dict)  # by folder: those begun here

    def start(self, config: Path, output_dir: str, run_name: str) -> Launched:
        """Begins a new run. UserError where it cannot be begun."""
        launched = start(config, output_dir, run_name, self.environment)
        self.launched[launched.path] = launched
        return launched

    def resume(self, run: Path) -> Launched:
        """Goes on with a run. UserError where it cannot be begun, or was a moment ago."""
        if run in self.launched and self.launched[run].goes_on:
            raise UserError(f"the trainer of {run.name} is already starting")
        launched = self.launched[run] = resume(run, self.environment)
        return launched

    def look_after(self) -> None:
        """Of what was begun here: logs are moved into their runs, and what has ended is let go."""
        for launched in self.launched.values():
            launched.settle()
            launched.process.poll()
