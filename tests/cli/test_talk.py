"""Conversations in a plain terminal and over pipes: commands, what goes where, and stopping."""

import io
import os
import pty
import select
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rptrain.cli.talk import Talk
from rptrain.inference.placement import Placement
from rptrain.inference.settings import AnswerSettings
from rptrain.utils.errors import UserError

from ..inference.letters import letters_chat
from ..run_tools import PATIENCE

BEGIN = "runs/a␛ (step 4): 2.00 KiB on the CPU, about 900 tokens/s expected (this machine has no GPU)"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Loaded(SimpleNamespace):
    """What `LoadedChat` has, around a small conversation."""

    def __init__(self) -> None:
        chat = letters_chat()
        chat.settings = AnswerSettings(temperature=0, max_new_tokens=4)
        chat.base, self._base = None, chat.base
        placement = Placement("cpu", "this machine has no GPU", 2048, 900.0)
        super().__init__(
            chat=chat, model=SimpleNamespace(source=Path("runs/a\x1b"), state="step 4"), placement=placement
        )

    def load_base(self) -> None:
        self.chat.base = self._base


@pytest.fixture
def loaded() -> Loaded:
    return Loaded()


@pytest.fixture
def talk(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Talk]:
    """A conversation whose input is given, in a terminal or from a pipe."""

    def talk(*lines: str, terminal: bool = False) -> Talk:
        kind = Terminal if terminal else io.StringIO
        monkeypatch.setattr("sys.stdin", kind("".join(line + "\n" for line in lines)))
        if terminal:
            monkeypatch.setattr("sys.stdout", Terminal())
        return Talk(loaded)  # type: ignore[arg-type]

    return talk


def test_each_line_of_a_pipe_is_a_message_and_only_answers_go_to_the_output(talk, loaded, capsys) -> None:
    talk("abc", "", " /d").run(base=False)
    said, told = capsys.readouterr()
    turns = loaded.chat.turns
    assert [turn.said for turn in turns] == ["abc", "/d"]
    assert said == "".join(f"{turn.answer}\n" for turn in turns)
    assert told.splitlines()[0] == BEGIN and "> " not in told


def test_commands(talk, loaded, capsys) -> None:
    talk("/system zz", "abc", "/retry", "/base", "d", "/base", "/help", "/reset", "/system", "/quit", "e").run(
        base=False
    )
    said, told = capsys.readouterr()
    assert not loaded.chat.turns and loaded.chat.system == ""
    assert [line.partition(" ")[0] for line in said.splitlines() if ": " in line] == ["tuned:", "base:"]
    for word in ("prompt is set", "are shown", "not shown any more", "/retry ", "begins again", "prompt is removed"):
        assert word in told, word


def test_a_mistake_ends_a_pipe_and_not_a_terminal(talk, loaded) -> None:
    with pytest.raises(UserError, match="unknown command /nope: /help lists them"):
        talk("/nope", "abc").run(base=False)
    assert not loaded.chat.turns
    talk("/nope", "/retry", "abc", terminal=True).run(base=False)
    assert len(loaded.chat.turns) == 1


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where a shell started this process with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_stops_the_answer_in_a_terminal_and_the_program_without_one(talk, loaded, interruptible) -> None:
    """The answer is a process's that interrupts itself at its second token."""

    def interrupted(pieces: Iterator[str]) -> Iterator[str]:
        yield next(pieces)
        os.kill(os.getpid(), signal.SIGINT)
        yield from pieces

    ask = loaded.chat.ask
    loaded.chat.ask = lambda said: interrupted(ask(said)) if said == "abc" else ask(said)
    handler = signal.getsignal(signal.SIGINT)
    talk("/base", "abc", "d", terminal=True).run(base=False)
    assert signal.getsignal(signal.SIGINT) is handler
    stopped, whole = loaded.chat.turns
    assert len(stopped.answer) == 2 and stopped.base_answer is None and len(whole.answer) == 4
    assert isinstance(sys.stdout, Terminal) and f"tuned: {stopped.answer} [stopped]\n" in sys.stdout.getvalue()
    with pytest.raises(KeyboardInterrupt):
        talk("abc", "d").run(base=False)
    assert loaded.chat.turns[-1].said == "abc"


WAITING = """
import os
import sys
import time
from types import SimpleNamespace as Values

from rptrain.cli.talk import Talk


def ask(said):
    yield "begun"
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)


chat = Values(templated=True, ask=ask)
Talk(Values(chat=chat, model=Values(source="m", state="step 4"), placement=Values(reason="r"))).run(base=False)
print("left")
"""


@pytest.mark.long
def test_the_end_of_the_input_during_an_answer_ends_a_terminal_after_it(tmp_path: Path) -> None:
    go = tmp_path / "go"
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-c", WAITING, str(go)])
    shown = b""

    def until(text: bytes) -> None:
        nonlocal shown
        while text not in shown:
            assert select.select([terminal], [], [], PATIENCE)[0], shown
            shown += os.read(terminal, 4096)

    try:
        until(b"> ")
        os.write(terminal, b"hello\n")
        until(b"begun")
        os.write(terminal, b"\x04")
        until(b"begun^D")
        go.touch()
        until(b"left")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(terminal)


def test_control_characters_are_shown_in_a_terminal(talk, loaded, monkeypatch) -> None:
    loaded.chat.ask = lambda said: iter(["a\x1b[2J"])
    conversation: Any = talk("x", terminal=True)
    conversation.run(base=False)
    assert isinstance(sys.stdout, Terminal) and "a␛[2J" in sys.stdout.getvalue()
