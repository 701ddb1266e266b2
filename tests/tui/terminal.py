"""rptrain in a real terminal, which tmux provides."""

import os
import re
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

from rptrain.runs.view.run_view import RunView

PATIENCE = 240  # seconds for a run of the bundled example on a busy machine
NUMBERS = count()


class Terminal:
    """rptrain in a terminal of tmux, on a server of its own."""

    def __init__(self, folder: Path, size: tuple[int, int] = (80, 24)) -> None:
        self._folder, self._size = folder, size
        self._server = f"rptrain-test-{os.getpid()}-{next(NUMBERS)}"  # a server that is ending takes no session
        self.keys = 0  # pressed since the last `task`

    def start(self, *arguments: str) -> None:
        program = " ".join([sys.executable, "-P", "-m", "rptrain", *arguments])
        size = ("-x", str(self._size[0]), "-y", str(self._size[1]))
        self._tmux("-f", "/dev/null", "new-session", "-d", *size, "-c", str(self._folder), program)

    def close(self) -> None:
        """Ends the terminal, and a trainer that a failed test left."""
        subprocess.run(["tmux", "-L", self._server, "kill-server"], capture_output=True)  # it may have ended
        for config in self._folder.glob("runs/*/config.toml"):
            view = RunView(config.parent)
            if view.process is not None and view.process.alive:
                os.kill(view.process.pid, signal.SIGKILL)

    def press(self, *keys: str, every: float = 0.0) -> None:
        """Presses keys, one in `every` seconds on average: those that are late on a busy machine come together."""
        start, sent = time.monotonic(), 0
        while sent < len(keys):
            time.sleep(max(0.0, start + sent * every - time.monotonic()))
            due = int((time.monotonic() - start) / every) + 1 if every else len(keys)
            self._tmux("send-keys", *keys[sent:due])
            sent = min(due, len(keys))
        self.keys += len(keys)

    def type(self, text: str) -> None:
        """Types a text, which does not count: people write what they like."""
        self._tmux("send-keys", "-l", text)

    def task(self) -> int:
        """The number of keys of the task that ends here."""
        keys, self.keys = self.keys, 0
        return keys

    def until(self, pattern: str) -> str:
        """Waits for a text on the screen. The deadline only ends a hang."""
        end = time.monotonic() + PATIENCE
        while not re.search(pattern, shown := self._tmux("capture-pane", "-p")):
            assert time.monotonic() < end, f"{pattern!r} did not appear:\n{shown}"
            time.sleep(0.1)
        return shown

    def _tmux(self, *arguments: str) -> str:
        environment = {**os.environ, "XDG_CONFIG_HOME": str(self._folder / "settings"), "CUDA_VISIBLE_DEVICES": ""}
        command = ["tmux", "-L", self._server, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout
