"""Runs commands of the program in forks of a process that has imported it, with limits of time and memory.

Starting the program with torch takes seconds, and a fork takes none. `python -m benchmarks.bad_inputs.server` reads an
order per line, a JSON object of `Order`, and answers with a line: a JSON object of `Ended`. A fork does what a new
process does, from `main` of the command line to the functions that run at exit, except that modules are loaded already
and are not torn down at the end.
"""

import atexit
import ctypes
import gc
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal, NoReturn, Self

from benchmarks.bad_inputs.sound import make

ROOT = Path(__file__).resolve().parents[2]
MODULES = (
    *("rptrain.cli.commands", "rptrain.train.run", "rptrain.inference.generate", "rptrain.checkpoint.export"),
    *("rptrain.planner.report", "rptrain.planner.text", "rptrain.bench.run", "rptrain.bench.show"),
    *("rptrain.runs.folder.listing", "rptrain.data.preview", "rptrain.tui.start", "rptrain.data.loader"),
    *("transformers.models.auto.tokenization_auto", "transformers.models.auto.modeling_auto", "tokenizers"),
    *("transformers.convert_slow_tokenizer", "transformers.models.qwen3", "safetensors", "peft"),
    *("jinja2.sandbox", "pyarrow.parquet", "pyarrow.csv", "numpy.random", "rich.progress", "tomlkit", "filecmp"),
    *("encodings.utf_8_sig", "encodings.unicode_escape", "transformers.models.qwen3.configuration_qwen3"),
    *("pydantic.dataclasses", "rich._emoji_codes", "typer._adapters", "typer._click.decorators"),
)
PAGE = os.sysconf("SC_PAGE_SIZE")
INTERVAL = 0.05  # seconds between two looks at the memory of a command
LARGEST = 4 << 30  # bytes that a command may write into a file
# linux/capability.h: CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER
OVERRIDES = (1, 2, 3)
CAPABILITY_VERSION = 0x20080522
PR_CAPBSET_DROP = 24


@dataclass(frozen=True)
class Order:
    """A command: its arguments, folder and limits. `nbytes` is memory beyond what the server itself has."""

    args: tuple[str, ...]
    folder: str
    stdin: str
    stdout: str
    stderr: str
    environment: dict[str, str]
    seconds: float
    nbytes: int
    fresh: bool = False
    as_user: bool = False
    sound: bool = False  # make the sound files of the folder instead


@dataclass(frozen=True)
class Ended:
    """How a command ended. `code` is negative for a signal."""

    code: int
    seconds: float
    peak: int  # bytes of memory, of all its processes, beyond what the server itself has
    stopped: Literal["", "time", "memory"] = ""  # the limit that it was stopped at


class Server:
    """The process that forks. Context manager."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.bad_inputs.server"],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.communicate()

    def run(self, order: Order) -> Ended:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(order)) + "\n")
        self._process.stdin.flush()
        return Ended(**json.loads(self._process.stdout.readline()))


def _serve() -> None:
    """Answers orders until the input ends. Returns in each fork."""
    answers = os.fdopen(os.dup(1), "w")  # the forks' own output goes elsewhere
    for line in sys.stdin:
        order = Order(**json.loads(line))
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            _become(order)
            return
        print(json.dumps(asdict(_watch(child, order, began))), file=answers, flush=True)
    os._exit(0)  # frozen objects would be reported as leaked


def _become(order: Order) -> None:
    """Turns a fork into the command."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST, LARGEST))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for descriptor, name, flags in (
        (0, order.stdin, os.O_RDONLY),
        (1, order.stdout, os.O_WRONLY),
        (2, order.stderr, os.O_WRONLY),
    ):
        opened = os.open(name, flags)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(order.folder)
    os.environ |= order.environment
    if order.as_user and os.getuid() == 0:
        _drop_capabilities()
    if order.sound:
        make(Path(order.folder))
        os._exit(0)
    sys.argv = ["rptrain", *order.args]
    sys.modules["__main__"].__package__ = None  # else usage messages name this module
    if order.fresh:
        _execute(order.args)


def _drop_capabilities() -> None:
    """Drops root's capabilities, so that file permissions apply, in child processes too."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, none = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    calls = [libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) for capability in OVERRIDES]
    if any([*calls, libc.capset(header, none)]):
        raise OSError(ctypes.get_errno(), "capabilities cannot be dropped")


def _execute(args: tuple[str, ...]) -> NoReturn:
    command = [sys.executable, "-P", "-m", "rptrain", *args]
    os.execv(sys.executable, [os.fsencode(part) for part in command])


def run_command() -> NoReturn:
    """Runs the program's `main`, and ends the process as the interpreter does."""
    from rptrain.cli import main

    code: object = 0
    try:
        main()
    except SystemExit as error:
        code = error.code
    except BaseException:  # noqa: BLE001 - as the interpreter shows it
        traceback.print_exc()
        code = 1
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue] - waits for threads
    atexit._run_exitfuncs()
    if isinstance(code, str):
        print(code, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _watch(child: int, order: Order, began: float) -> Ended:
    """Waits for a command, and stops it at its limits."""
    own, peak, stopped = _resident(child), 0, ""  # first of all, so that the command has taken nothing yet
    descriptor = os.pidfd_open(child)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while not poll.poll(INTERVAL * 1000):
        peak = max(peak, sum(_resident(process) for process in _family(child)) - own)
        stopped = "memory" if peak > order.nbytes else "time" if time.monotonic() - began > order.seconds else ""
        if stopped:
            break
    os.close(descriptor)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # also what it left behind
    _, status, usage = os.wait4(child, 0)
    code, seconds = os.waitstatus_to_exitcode(status), time.monotonic() - began
    return Ended(code, round(seconds, 3), max(peak, usage.ru_maxrss * 1024 - own, 0), stopped)


def _family(process: int) -> Iterator[int]:
    """A process and all that it started, and these."""
    yield process
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            for child in file.read_text().split():
                yield from _family(int(child))


def _resident(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * PAGE
    except (OSError, IndexError):
        return 0


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)  # no thread pool before a fork
    for module in MODULES:
        import_module(module)
    gc.freeze()  # collections of the forks leave these objects alone, and so their pages shared
    _serve()
    run_command()
