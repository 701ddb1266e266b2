"""A real terminal: from an empty folder to an answer by keys alone, the number of keys, and keys with alt."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from .terminal import Terminal

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")]

PROMPT = "Spell backwards: abc"


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
