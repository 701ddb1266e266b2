"""The first signal asks, the second interrupts, and the third ends the process, also while the lock is held."""

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from typing import Any

import pytest

from rptrain.utils.native import library as native_library
from rptrain.utils.native_watchdog import NativeWatchdog
from rptrain.utils.signals import PROCESS, TOGETHER, Signals

from .. import run_tools as tools

KINDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A process that says when it is ready, and then does `{action}`. `hold` locks a mutex twice, in a call that keeps the
# interpreter lock and that no signal ends. `at_once` writes what the interpreter's handler writes for signals.
PROGRAM = """
import ctypes, os, signal, time
from rptrain.utils.signals import PROCESS
from rptrain.utils.native_watchdog import NativeWatchdog
PROCESS.install(NativeWatchdog.load())
PROCESS.begin()

def hold():
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)

def at_once(numbers):
    pipe = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(pipe)
    os.write(pipe, bytes(numbers))

with PROCESS.shielded():
    print("ready", flush=True)
    {action}
"""
native = pytest.mark.skipif(NativeWatchdog.load() is None, reason="needs a C compiler")


@pytest.fixture(autouse=True)
def not_ignored():
    """SIGHUP has its default action, here and in the processes that are started, also under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def start(action: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-P", "-c", PROGRAM.format(action=action)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def send(process: subprocess.Popen[Any], number: signal.Signals) -> int:
    """Sends signals until the process has ended: a busy one may count two as one. Returns how many were sent."""
    sent = 0
    while process.poll() is None:
        process.send_signal(number)
        sent += 1
        time.sleep(TOGETHER + 0.05)
    assert process.returncode == 130
    return sent


def test_a_third_signal_ends_a_process_without_native_code(monkeypatch):
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr("rptrain.utils.signals.TOGETHER", 0.0)
    with suppress(KeyboardInterrupt), PROCESS.handled(), PROCESS.deferred():
        for number, interrupts in zip(KINDS, (False, True), strict=False):
            with pytest.raises(KeyboardInterrupt) if interrupts else nullcontext():
                signal.raise_signal(number)
        assert not codes
        with suppress(KeyboardInterrupt):  # as the process does not end here
            signal.raise_signal(KINDS[2])
    assert codes == [130]


@pytest.mark.parametrize("numbers", [*((kind,) * 3 for kind in KINDS), KINDS], ids=[*(k.name for k in KINDS), "all"])
def test_signals_at_once_count_once(numbers, monkeypatch):
    """As `timeout` sends them: to the process, and to its group; a terminal that closes sends two kinds."""
    monkeypatch.setattr("rptrain.utils.signals.TOGETHER", 60.0)
    with suppress(KeyboardInterrupt), PROCESS.handled(), PROCESS.deferred():
        try:
            for number in numbers:
                signal.raise_signal(number)
        finally:
            received = PROCESS.received
        monkeypatch.setattr("rptrain.utils.signals.TOGETHER", 0.0)
        with pytest.raises(KeyboardInterrupt):  # a later one
            signal.raise_signal(numbers[0])
    assert received == 1


@native
def test_signals_at_once_count_once_in_native_code():
    """They are written to the pipe: a busy machine may deliver signals further apart than TOGETHER."""
    twice = f"[(at_once({[*map(int, KINDS * 6)]}), time.sleep({TOGETHER + 0.05})) for _ in range(2)]"
    process = start(f"{twice}; print('alive', flush=True); hold()")
    assert process.stdout is not None and process.stdout.readline() == "alive\n"
    send(process, KINDS[2])


@pytest.mark.parametrize("number", KINDS)
def test_the_first_signal_is_deferred_and_the_second_interrupts(number):
    handlers = [signal.getsignal(kind) for kind in KINDS]
    with pytest.raises(KeyboardInterrupt), PROCESS.handled(), PROCESS.deferred():
        assert not PROCESS.received
        os.kill(os.getpid(), number)
        tools.wait_for(lambda: PROCESS.received == 1)
        time.sleep(TOGETHER)
        os.kill(os.getpid(), number)
        tools.wait_for(lambda: False)  # the interrupt ends it
    assert not PROCESS.received and [signal.getsignal(kind) for kind in KINDS] == handlers


@pytest.mark.parametrize("context", [PROCESS.deferred, PROCESS.importing], ids=["deferred", "importing"])
def test_a_deferred_signal_interrupts_at_the_end_of_the_context(context):
    reached = []
    with pytest.raises(KeyboardInterrupt), PROCESS.handled():
        with context():
            signal.raise_signal(signal.SIGTERM)
            reached.append(True)
        reached.append(False)
    assert reached == [True]


def test_what_is_shielded_is_not_interrupted():
    with PROCESS.handled():
        with PROCESS.shielded():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            PROCESS.check()


def test_a_hangup_that_was_ignored_stays_ignored():
    """As nohup has it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals().handled():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@native
@pytest.mark.parametrize("number", KINDS)
def test_a_third_signal_ends_a_process_whose_lock_is_held(number):
    process = start("hold()")
    assert send(process, number) > 2
    assert process.communicate()[1] == "\ninterrupted\n"


@native
def test_a_third_signal_ends_a_process_at_exit():
    shield = "shield = PROCESS.shielded(); shield.__enter__()"  # also after the context of the program
    process = start(f"import atexit; {shield}; atexit.register(lambda: [print('exit', flush=True), hold()])")
    assert process.stdout is not None and process.stdout.readline() == "exit\n"
    assert send(process, signal.SIGTERM) > 2
    assert process.communicate()[1].endswith("\ninterrupted\n")


# A process that says when its interpreter has run all that was registered for its exit, and that then goes on: until
# its standard input ends, in the deletion of a module.
ENDING = """
import os, sys
from rptrain.utils.signals import PROCESS
from rptrain.utils.native_watchdog import NativeWatchdog

class Late:
    def __init__(self):
        self.write, self.read = os.write, os.read

    def __del__(self):
        self.write(1, b"ready\\n")
        self.read(0, 1)

late = Late()
PROCESS.install(NativeWatchdog.load())
PROCESS.close()
"""


@pytest.mark.skipif(native_library("rptrain.utils._signals") is None, reason="needs a C compiler")
@pytest.mark.parametrize("signals", (1, 2, 3))
def test_signals_are_counted_until_the_interpreter_has_ended(signals):
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", ENDING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None and process.stdout.readline() == b"ready\n"
    for number in KINDS[:signals]:
        process.send_signal(number)
        time.sleep(TOGETHER + 0.05)
    if signals == 3:
        send(process, KINDS[2])
    output, errors = process.communicate()
    assert (process.returncode, output, errors) == ((130, b"", b"\ninterrupted\n") if signals == 3 else (0, b"", b""))


def test_a_signal_in_code_from_a_string_leaves_the_exit_code(tmp_path):
    (tmp_path / "program.py").write_text("""
from rptrain.utils.signals import PROCESS
PROCESS.install(None)
PROCESS.begin()
try:
    exec("import signal; signal.raise_signal(signal.SIGTERM)")
except KeyboardInterrupt:
    PROCESS.close()
    raise SystemExit(130)
""")
    line = [sys.executable, "-P", "-m", "program"]
    assert subprocess.run(line, env=os.environ | {"PYTHONPATH": str(tmp_path)}).returncode == 130


@pytest.mark.parametrize("begin", ("", "PROCESS.begin()"), ids=("before", "imports"))
def test_a_signal_before_a_command_or_during_imports_ends_the_process(begin):
    program = f"""
import signal
from contextlib import nullcontext
from rptrain.utils.signals import PROCESS
PROCESS.install(None)
{begin}
with PROCESS.importing() if {bool(begin)} else nullcontext():
    signal.raise_signal(signal.SIGHUP)
"""
    process = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, check=False)
    assert (process.returncode, process.stderr) == (130, b"\ninterrupted\n")


# A process with a bar on its terminal, which waits for signals.
BAR = """
import time
from contextlib import nullcontext
from rptrain.utils.signals import PROCESS
from rptrain.utils import phases
from rptrain.utils.native_watchdog import NativeWatchdog
from rptrain.utils.phase_display import PhaseDisplay
PROCESS.install({native})
PROCESS.begin()
phases.SHORT = 0.0
with PhaseDisplay(), PROCESS.{context}(), phases.phase("loading libraries", unit=""):
    while True:
        time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("context", "signals", "watched"),
    [
        ("importing", 1, False),
        ("shielded", 3, False),
        pytest.param("shielded", 3, True, marks=native),
    ],
)
def test_a_terminal_has_its_cursor_after_a_process_that_ends_at_once(context: str, signals: int, watched: bool):
    program = BAR.format(context=context, native="NativeWatchdog.load()" if watched else None)
    ours, theirs = os.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80"}
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", program], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    shown = b""
    try:
        while b"loading libraries" not in shown:
            shown += os.read(ours, 4096)
        for number in KINDS[:signals]:
            process.send_signal(number)
            time.sleep(TOGETHER + 0.05)
        if signals == 3:
            send(process, KINDS[2])
        with suppress(OSError):  # EIO: the process has ended
            while part := os.read(ours, 4096):
                shown += part
        assert process.wait() == 130
    finally:
        process.kill()
        os.close(ours)
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")


def test_an_interrupt_is_not_lost_in_a_deletion():
    program = """
import signal, time
from rptrain.utils.signals import PROCESS

class Deleted:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)

PROCESS.install(None)
PROCESS.begin()
try:
    Deleted()
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted")
"""
    process = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, check=False)
    assert (process.returncode, process.stdout, process.stderr) == (0, b"interrupted\n", b"")


def test_signals_do_not_end_a_process_of_others(monkeypatch):
    """As a notebook's, however many come."""
    monkeypatch.setattr("rptrain.utils.signals.TOGETHER", 0.0)
    with PROCESS.handled(third_ends=False):
        for count in range(1, 5):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            assert PROCESS.received == count
    assert PROCESS.received == 0
