"""Commands in forks of a process that has imported the program: each costs no import of torch.

As a program it is that process: see `Commands`.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from benchmarks.bad_inputs.server import run_command
from tests.run_tools import wait_for

MODULES = ("numpy.random", "peft", "rich.progress", "torch.distributed", "rptrain.cli.commands", "rptrain.train.run")


class Command:
    """A running command: what `subprocess.Popen` offers for one, with text in files."""

    def __init__(self, pid: int, files: Path) -> None:
        self.pid, self.returncode = pid, None
        self._files = files

    def send_signal(self, number: int) -> None:
        if not self._code.exists():
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self) -> tuple[str, str]:
        """Output and errors, once the command has ended."""
        wait_for(self._code.exists)
        self.returncode = int(self._code.read_text())
        out, err = (self._files.with_suffix(suffix).read_text() for suffix in (".out", ".err"))
        return out, err

    @property
    def _code(self) -> Path:
        return self._files.with_suffix(".code")


class Commands:
    """Starts commands in forks of a process that has done nothing but import. Context manager.

    `folder`: where their output is kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._numbers = folder, count()

    def __enter__(self) -> "Commands":
        self._server = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.commands"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)},
        )
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.communicate()

    def start(self, *arguments: str | Path, environment: Mapping[str, str]) -> Command:
        """`environment`: what the command has besides that of tests."""
        assert self._server.stdin is not None and self._server.stdout is not None
        files = self._folder / str(next(self._numbers))
        order = {"arguments": list(map(str, arguments)), "environment": dict(environment), "files": str(files)}
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        return Command(int(self._server.stdout.readline()), files)


def _serve() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
    for line in sys.stdin:
        if os.fork() == 0:
            _keep(**json.loads(line))


def _keep(arguments: list[str], environment: dict[str, str], files: str) -> NoReturn:
    """Starts a command in a fork, says its process id, and writes its exit code when it has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child == 0:
        os.environ.update(environment)
        sys.argv[1:] = arguments
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, suffix in ((1, ".out"), (2, ".err")):
            os.dup2(os.open(files + suffix, os.O_WRONLY | os.O_CREAT), number)
        run_command()
    print(child, flush=True)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    Path(files + ".part").write_text(str(code))
    os.rename(files + ".part", files + ".code")
    os._exit(0)


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)  # no thread pool before a fork
    for module in MODULES:
        import_module(module)
    _serve()
