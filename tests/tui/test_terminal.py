"""A real terminal: from an empty folder to an answer by keys alone, the number of keys, and keys with alt."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from rptrain.runs.view import RunView

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")]

PATIENCE = 240  # seconds for a run of the bundled example on a busy machine
PROMPT = "Spell backwards: abc"
NUMBERS = count()


class Terminal:
    """rptrain in a terminal of tmux, on a server of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server = f"rptrain-test-{os.getpid()}-{next(NUMBERS)}"  # a server that is ending takes no session
        self.keys = 0  # pressed since the last `task`

    def start(self, *arguments: str) -> None:
        program = " ".join([sys.executable, "-P", "-m", "rptrain", *arguments])
        self._tmux("-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "24", "-c", str(self._folder), program)

    def close(self) -> None:
        """Ends the terminal, and a trainer that a failed test left."""
        subprocess.run(["tmux", "-L", self._server, "kill-server"], capture_output=True)  # it may have ended
        for config in self._folder.glob("runs/*/config.toml"):
            view = RunView(config.parent)
            if view.process is not None and view.process.alive:
                os.kill(view.process.pid, signal.SIGKILL)

    def press(self, *keys: str) -> None:
        for key in keys:
            self._tmux("send-keys", key)
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


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    (tmp_path / "work").mkdir()
    terminal = Terminal(tmp_path / "work")
    yield terminal
    terminal.close()


def test_alt_and_a_digit_takes_a_change(terminal: Terminal, tmp_path: Path):
    settings = '[model]\npath = "tiny-tasks"\n[[data.train]]\npath = "builtin:tasks"\n[engine]\nhost_limit = "200MiB"\n'
    (tmp_path / "work/tight.toml").write_text(settings)
    terminal.start("tight.toml")
    terminal.until("does not fit")
    terminal.press("M-1")
    terminal.until(r"✓ fits")
    assert re.search("model  +tiny-tasks  ", terminal.until("tight.toml [*]"))


def test_from_an_empty_folder_to_an_answer(terminal: Terminal, tmp_path: Path):
    terminal.start()
    keys: dict[str, int] = {}
    if "1 of 3" in terminal.until("1 of 3(.|\\n)*tiny-tasks  |✓ fits"):
        for step in (2, 3):
            terminal.press("Enter")
            terminal.until(f"{step} of 3(.|\\n)*(builtin:tasks|adapters)")
        terminal.press("Enter")
    else:
        terminal.press("C-r")
    terminal.until("▶ training|✓ finished")
    assert terminal.task() <= 3

    terminal.until("✓ finished")
    keys["watch until it is finished"] = terminal.task()

    terminal.press("e")
    terminal.until("Export tiny-tasks")
    terminal.press("Enter")
    terminal.until(r"Load it with(.|\n)*AutoModelForCausalLM")
    keys["export"] = terminal.task()
    assert (tmp_path / "work/runs/tiny-tasks-export/model.safetensors").is_file()
    terminal.press("Enter")
    terminal.until("esc back")
    terminal.task()

    terminal.press("c")
    terminal.until("> your message")
    keys["chat"] = terminal.task()
    terminal.type(PROMPT)
    terminal.press("Enter")
    terminal.until(f"> {PROMPT}(.|\\n)*> your message")
    keys["send a message"] = terminal.task()

    terminal.press("F3")
    terminal.until(r"tokens/s(.|\n)*tiny-tasks +✓ finished +1,500/1,500")
    keys["open the list of runs"] = terminal.task()
    terminal.press("Space")
    terminal.until("loss by steps")
    keys["compare a run"] = terminal.task()
    assert keys == {
        "watch until it is finished": 0,
        "export": 2,
        "chat": 1,
        "send a message": 1,
        "open the list of runs": 1,
        "compare a run": 1,
    }
