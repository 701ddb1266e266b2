"""A conversation in a plain terminal, or over pipes."""

import os
import signal
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import FrameType

from rptrain.inference.load import LoadedChat
from rptrain.utils.errors import UserError
from rptrain.utils.text import is_terminal, one_line, printable

PROMPT = "> "
HELP = """\
/retry         another answer to the last message
/base          show the base model's answers too, or no longer
/system TEXT   set the system prompt; without TEXT, remove it
/reset         forget the conversation
/quit          end; Ctrl+D does the same
Ctrl+C stops an answer. A space before "/" sends the line as a message."""


class Talk:
    """Reads messages and commands, and writes answers as they arrive."""

    def __init__(self, loaded: LoadedChat) -> None:
        self._loaded, self._chat = loaded, loaded.chat
        self._base = False
        self._terminal = is_terminal(sys.stdin) and is_terminal(sys.stdout)
        self._shown: Callable[[str], str] = printable if is_terminal(sys.stdout) else str

    def run(self, *, base: bool) -> None:
        """Talks until the input ends. Raises UserError for a mistake if no terminal is there to correct it."""
        if base:
            self._loaded.load_base()
            self._base = True
        self._begin()
        for line in self._lines():
            try:
                if not self._handle(line):
                    return
            except UserError as error:
                if not self._terminal:
                    raise
                self._tell(str(error))

    def _begin(self) -> None:
        model, placement = self._loaded.model, self._loaded.placement
        named = f"{model.source} ({model.state})" if model.state else str(model.source)
        print(f"{one_line(named)}: {placement} ({placement.reason})", file=sys.stderr)
        if not self._chat.templated:
            self._tell("The tokenizer has no chat template: the model continues your text.")
        if self._terminal:
            self._tell("/help lists commands. Ctrl+C stops an answer, Ctrl+D ends.\n")

    def _lines(self) -> Iterator[str]:
        """Messages and commands, without empty lines."""
        if self._terminal:
            with suppress(ImportError):
                import readline  # noqa: F401 (input() then edits lines and keeps a history)
        while True:
            try:
                line = input(PROMPT if self._terminal else "")
            except EOFError:
                if self._terminal:
                    print()
                return
            except KeyboardInterrupt:
                if not self._terminal:
                    raise
                self._tell("\nCtrl+D or /quit ends.")
                continue
            if line.strip():
                yield line

    def _handle(self, line: str) -> bool:
        """Answers a line. Returns whether the conversation continues."""
        if not line.startswith("/"):
            self._answer(self._chat.ask(line.strip()))
            return True
        command, _, given = line.partition(" ")
        if command == "/quit":
            return False
        if command == "/help":
            self._tell(HELP)
        elif command == "/reset":
            self._chat.reset()
            self._tell("The conversation begins again.")
        elif command == "/retry":
            self._answer(self._chat.retry())
        elif command == "/system":
            self._chat.system = given.strip()
            self._tell("The system prompt is set." if self._chat.system else "The system prompt is removed.")
        elif command == "/base":
            if not self._base:
                self._loaded.load_base()
            self._base = not self._base
            self._tell(f"The base model's answers are {'shown' if self._base else 'not shown any more'}.")
        else:
            raise UserError(f"unknown command {command}: /help lists them; a space before it sends it as a message")
        return True

    def _answer(self, pieces: Iterator[str]) -> None:
        if not self._write("tuned: " if self._base else "", pieces):
            return
        if self._base:
            self._write("base:  ", self._chat.ask_base())

    def _write(self, label: str, pieces: Iterator[str]) -> bool:
        """Writes an answer as it arrives. Returns False if Ctrl+C stopped it."""
        with _stopping() if self._terminal else nullcontext(lambda: False) as stopped:
            try:
                for number, piece in enumerate(pieces):
                    print(("" if number else label) + self._shown(piece), end="", flush=True)
                    if stopped():
                        break
            except KeyboardInterrupt:  # the second one, during a long step
                if not self._terminal:
                    raise
            print(" [stopped]" if stopped() else "", flush=True)
            return not stopped()

    def _tell(self, text: str) -> None:
        """Says something that is not an answer."""
        print(text, file=sys.stdout if self._terminal else sys.stderr)


@contextmanager
def _stopping() -> Iterator[Callable[[], bool]]:
    """The first SIGINT is only noted, so that an answer ends between two tokens; the next raises KeyboardInterrupt."""
    received = 0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        if received > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        with _end_kept():
            yield lambda: received > 0
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _end_kept() -> Iterator[None]:
    """Keeps Ctrl+D for the next prompt as a character: readline discards an end of input from before its prompt."""
    try:
        number = sys.stdin.fileno()
        before = termios.tcgetattr(number)
    except (OSError, termios.error):  # not a terminal
        yield
        return
    changed = [*before[:6], [*before[6]]]
    changed[6][termios.VEOF] = bytes([os.fpathconf(number, "PC_VDISABLE")])
    termios.tcsetattr(number, termios.TCSANOW, changed)
    try:
        yield
    finally:
        termios.tcsetattr(number, termios.TCSANOW, before)
