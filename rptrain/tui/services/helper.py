"""A child process for work that needs torch, so that the interface starts at once, stays small and never blocks.

It ends when the parent process ends, because its input is closed. The CUDA context of planning ends with it.
"""

import asyncio
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO, Protocol, TypeVar

from rptrain.utils.errors import UserError, describe

T = TypeVar("T")
GRACE = 1.0  # seconds for a cancelled call to finish
COMMAND = (sys.executable, "-P", "-m", "rptrain.tui.services.helper")  # without the current directory on the path


class HelperError(RuntimeError):
    """The work failed for a reason other than user input; the message has its type."""


class Helper(Protocol):
    """Runs functions elsewhere. `function` must be importable; arguments and result must be picklable."""

    async def call(self, function: Callable[..., T], *given: Any) -> T:
        """Calls a function and returns its result. Raises its UserError, and HelperError for any other failure.

        A cancelled call does not delay the next one.
        """
        ...

    def close(self) -> None:
        """Ends the process; the next call starts a new one."""
        ...


class ChildHelper:
    """One process, started by the first call, which handles one call after another.

    A call that is cancelled before its turn is not made. A running call may finish, so that the process and its imports
    can be used again; if that takes longer than GRACE, the process is ended.
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
            if self._process is process:  # it did not end on purpose
                self._process = None
            return "error", "the helper process ended"

    @staticmethod
    def _begin() -> "subprocess.Popen[bytes]":
        return subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def serve(asked: BinaryIO, answers: BinaryIO) -> None:
    """Answers calls until the end of the input."""
    while True:
        try:
            function, given = pickle.load(asked)
        except EOFError:
            return
        try:
            answer = ("done", function(*given))
        except UserError as error:
            answer = ("user error", str(error))
        except Exception as error:  # noqa: BLE001 (sent to the parent process, which shows it)
            answer = ("error", describe(error, with_type=True))
        pickle.dump(answer, answers)
        answers.flush()


def main() -> None:
    """Serves calls. Output of libraries is discarded, because it would mix with the answers."""
    answers = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    try:
        serve(sys.stdin.buffer, answers)
    except BrokenPipeError:
        return


if __name__ == "__main__":
    main()
