"""A child process for what needs torch, so that the interface itself starts at once, stays small, and never waits.

It ends with the process that began it, whatever becomes of that: its input ends. A GPU context that planning made goes
with it.
"""

import asyncio
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO, Protocol, TypeVar

from rptrain.utils.errors import UserError

T = TypeVar("T")
GRACE = 1.0  # seconds in which a call that nobody waits for any more may come to its end
COMMAND = (sys.executable, "-P", "-m", "rptrain.tui.services.helper")  # without the folder one is in on the path


class HelperError(RuntimeError):
    """The work failed in a way that is not the person's doing; the message is the last line of what happened."""


class Helper(Protocol):
    """Does work elsewhere. `function` is of a module, and its arguments and result can be pickled."""

    async def call(self, function: Callable[..., T], *given: Any) -> T:
        """What the function returns. UserError as it raises it; HelperError for any other failure.

        One that is cancelled does not hold up the next.
        """
        ...

    def close(self) -> None:
        """Ends it; the next call begins it anew."""
        ...


class ChildHelper:
    """One process, which is begun by the first call and does one thing after another.

    A call that is cancelled before its turn is never made. One that is under way may come to its end, so that the
    process with all that it has imported serves again; where that takes longer than GRACE, the process is ended.
    """

    def __init__(self) -> None:
        self._calls = ThreadPoolExecutor(1, "helper")
        self._process: subprocess.Popen[bytes] | None = None

    async def call(self, function: Callable[..., T], *given: Any) -> T:
        asked = self._calls.submit(self._ask, function, given)
        try:
            answer, value = await asyncio.wrap_future(asked)
        except asyncio.CancelledError:
            if not asked.cancel():
                asyncio.get_running_loop().call_later(GRACE, self._give_up, asked)
            raise
        if answer == "user error":
            raise UserError(value)
        if answer == "error":
            raise HelperError(value)
        return value

    def close(self) -> None:
        calls, self._calls = self._calls, ThreadPoolExecutor(1, "helper")
        calls.shutdown(wait=False, cancel_futures=True)
        self._end()

    def _give_up(self, asked: "Future[Any]") -> None:
        if not asked.done():
            self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _ask(self, function: Callable[..., Any], given: tuple[Any, ...]) -> tuple[str, Any]:
        process = self._process = self._process or self._begin()
        assert process.stdin is not None and process.stdout is not None
        try:
            pickle.dump((function, given), process.stdin)
            process.stdin.flush()
            return pickle.load(process.stdout)
        except (EOFError, OSError, ValueError, pickle.UnpicklingError):
            process.kill()
            process.wait()
            if self._process is process:  # it was not ended on purpose
                self._process = None
            return "error", "the helper process ended"

    @staticmethod
    def _begin() -> "subprocess.Popen[bytes]":
        return subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def serve(asked: BinaryIO, answers: BinaryIO) -> None:
    """Answers until there is nothing more to read."""
    while True:
        try:
            function, given = pickle.load(asked)
        except EOFError:
            return
        try:
            answer = ("done", function(*given))
        except UserError as error:
            answer = ("user error", str(error))
        except Exception:  # noqa: BLE001 (told to the process that asked, which shows it)
            answer = ("error", traceback.format_exception_only(*sys.exc_info()[:2])[-1].strip())
        pickle.dump(answer, answers)
        answers.flush()


def main() -> None:
    """What libraries print would stand among the answers: it goes nowhere."""
    answers = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    try:
        serve(sys.stdin.buffer, answers)
    except BrokenPipeError:
        return


if __name__ == "__main__":
    main()
