"""The cost of watching a run: `python -m benchmarks.watching` measures the real interface in a terminal of 120 × 36.

    python -m benchmarks.watching --seconds 60 --json benchmarks/results/watching.json

The run is written by this program as a trainer of eight devices writes it: four snapshots and a step per second. It
measures

- the share of a core that watching takes, in CPU time, which other programs on the machine hardly change,
- how long a run with 100,000 recorded steps takes to open, and how much longer than one with 100: from the start of the
  process until its head and devices, its log and curves of a sample of its steps are on the screen,
- how long reading all of its steps takes, which a thread does after that,
- behind a relay that delays each direction by half of `--round-trip`, as a session of ssh: the bytes per second that a
  run of eight devices sends, and the time from a key to its answer on the screen, in wall time.
"""

import argparse
import fcntl
import json
import os
import pty
import struct
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from tempfile import TemporaryDirectory

import psutil

from benchmarks.commit import commit
from rptrain.runs.records.events import Estimated, Event, Plan, ProcessStarted, RunStarted, Step, to_line
from rptrain.runs.records.lanes import FILE, LaneRecord, OptimizerState, Snapshot, StepNumbers
from rptrain.runs.records.process import ProcessId
from rptrain.runs.records.timeline import Schedule, SlotSpan, StepTimeline
from rptrain.runs.view.run_view import RunView

DEVICES = tuple(f"cuda:{number}" for number in range(8))
STAGES = ("F0-7", "FB8-28", "B0-7")
COLUMNS, ROWS = 120, 36
RECORDED = 100_000  # steps of the run to open
SETTLED = 10.0  # seconds after which the interface has read all that there was
OPENED = 3  # times that each run is opened; the fastest counts
KEYS = 20  # that are pressed
PRESSED = (("?", "search the log", "\x1b"), ("t", "Schedule of a step", "t"))  # with what they show, and the key back
PATIENCE = 120.0  # seconds until something must be on the screen
GIB = 1 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds of watching")
    parser.add_argument("--round-trip", type=float, default=0.2, help="seconds that the relay adds to a round trip")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        short, long = Path(folder, "runs", "short"), Path(folder, "runs", "long")
        write_run(short, 100)
        write_run(long, RECORDED)
        results = {
            "commit": commit(),
            "terminal": [COLUMNS, ROWS],
            "devices": len(DEVICES),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            **opening(short, long),
            **watching(short, given.seconds),
            **remote(short, given.seconds, given.round_trip),
        }
    print(json.dumps(results, indent=2))
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=2) + "\n")


# ---- the run


def write_run(run: Path, steps: int) -> None:
    """A run of this process with recorded steps, one per second until now."""
    run.mkdir(parents=True)
    (run / "config.toml").touch()
    now, own = time.time(), ProcessId.of(os.getpid())
    began = now - steps
    memory = ({"kind": "host memory", "name": "host", "parts": [["weights", 90 * GIB]], "limit": 200 * GIB},)
    events: list[Event] = [
        RunStarted("0", "0", DEVICES, "llama-3.1-8b", 8_030_261_248, time=began - 9),
        ProcessStarted(own.pid, own.host, own.birth, 10 * steps, 1, memory, time=began - 8),
        Plan(("F0-7 FB8-28 B0-7",), time=began - 7),
        Estimated(1.0, 0.02, 0.9, Schedule(STAGES, len(DEVICES), 1, timeline(0)), time=began - 6),
        *(step_of(number, began + number) for number in range(1, steps + 1)),
    ]
    (run / "events.jsonl").write_text("".join(to_line(event) + "\n" for event in events))
    (run / FILE).write_text("".join(snapshot(now - 60 + n / 4, n).to_line() + "\n" for n in range(240)))


def step_of(number: int, when: float) -> Step:
    return Step(number, 1.2 + 20 / (number + 9), 1e-5, 0.8 + number % 7 / 10, 131_072, 100_000, 131_072.0, time=when)


def snapshot(when: float, index: int) -> Snapshot:
    """A quarter of a second of devices that go through F, FB and B in turn."""
    lanes = []
    for number, device in enumerate(DEVICES):
        kind = ("F", "FB", "FB", "B", "F", "FB", "B", "")[(index // 3 + 2 * number) % 8]
        stage = {"F": "F0-7", "FB": "FB8-28", "B": "B0-7", "": "F0-7"}[kind]
        busy = {kind: 0.2 + index % 5 / 100} if kind else {}
        lanes.append(
            LaneRecord(
                device=device,
                doing="computing" if kind else "waiting",
                stage=stage,
                kind=kind or "F",
                slot=number,
                micro_batch=index % 16,
                step=index // 4,
                waiting=None if kind else "weights of layers.3",
                busy=busy,
                up=3_100_000_000 + index * 7_000_000 % 10**9,
                down=1_200_000_000 + index * 3_000_000 % 10**9,
                memory=int(18.2 * GIB) + index % 50 * (GIB // 100),
                utilisation=90 + index % 10,
                temperature=60 + index // 40 % 9,
                power=400.0 + index % 90,
            )
        )
    last = StepNumbers.of(index // 4, 1.2, 1e-5, 0.8, 131_072.0, 1.0) if index % 4 == 0 else None
    optimizer, step = OptimizerState("updates layers.17", 1, 1.41), timeline(index // 4) if index % 20 == 0 else None
    return Snapshot(when, 0.25, "training", 118 * GIB, 74 * GIB, tuple(lanes), optimizer, last, step)


def timeline(step: int) -> StepTimeline:
    """A second of devices that compute ten slots each."""
    lane = tuple(SlotSpan(slot, slot / 10, slot / 10 + 0.09) for slot in range(10))
    return StepTimeline(step, 1.0, (0.9,) * len(DEVICES), (lane,) * len(DEVICES), step)


@contextmanager
def growing(run: Path, steps: int) -> Iterator[None]:
    """Writes to the run as its trainer would, four times per second, as long as the context lasts."""
    stop = threading.Event()

    def write() -> None:
        with (run / "events.jsonl").open("a") as events, (run / FILE).open("a") as lanes:
            index = 0
            while not stop.wait(0.25):
                lanes.write(snapshot(time.time(), 4 * steps + index).to_line() + "\n")
                lanes.flush()
                if index % 4 == 0:
                    events.write(to_line(step_of(steps + index // 4 + 1, time.time())) + "\n")
                    events.flush()
                index += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


# ---- the interface


class Interface:
    """`rptrain attach` in a terminal, behind a relay that delays each direction by `delay` seconds. Context manager."""

    def __init__(self, run: Path, delay: float = 0.0) -> None:
        self.began = time.monotonic()
        self.received = 0  # bytes, at this end of the relay
        self._screen = bytearray()  # what was received since the last `expect`
        self._changed = threading.Condition()
        self._delay = delay
        self._out: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
        self._in: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
        self._child, self._terminal = pty.fork()
        if self._child == 0:
            os.environ.update(TERM="xterm-256color", COLORTERM="truecolor", XDG_CONFIG_HOME=str(run))
            if delay:
                os.environ["SSH_CONNECTION"] = "192.0.2.1 50000 192.0.2.2 22"  # as sshd sets it
            os.execv(sys.executable, [sys.executable, "-P", "-m", "rptrain", "attach", str(run)])
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        for work in (self._read, self._deliver, self._type):
            threading.Thread(target=work, daemon=True).start()

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self._child)

    def press(self, key: str) -> None:
        with self._changed:
            self._screen.clear()
        self._in.put((time.monotonic() + self._delay, key.encode()))

    def expect(self, text: str) -> None:
        """Waits until a text was received since the last key."""
        end = time.monotonic() + PATIENCE
        with self._changed:
            while text.encode() not in self._screen:
                if not self._changed.wait(end - time.monotonic()):
                    raise SystemExit(f"{text!r} did not appear within {PATIENCE:g} seconds")

    def __enter__(self) -> "Interface":
        return self

    def __exit__(self, *error: object) -> None:
        os.kill(self._child, 9)
        os.waitpid(self._child, 0)

    def _read(self) -> None:
        while True:
            try:
                self._out.put((time.monotonic() + self._delay, os.read(self._terminal, 65536)))
            except OSError:
                return

    def _deliver(self) -> None:
        while True:
            due, data = self._out.get()
            time.sleep(max(0.0, due - time.monotonic()))
            with self._changed:
                self.received += len(data)
                self._screen += data
                self._changed.notify_all()

    def _type(self) -> None:
        while True:
            due, data = self._in.get()
            time.sleep(max(0.0, due - time.monotonic()))
            os.write(self._terminal, data)


def opening(short: Path, long: Path) -> dict[str, float]:
    """Seconds until a run with few steps and one with many are on the screen, and the differences."""
    took, spent = {}, {}
    for name, run, shown in (("short", short, "100/1,000"), ("long", long, f"{RECORDED:,}/{10 * RECORDED:,}")):
        times = []
        for _ in range(OPENED):
            with Interface(run) as interface:
                interface.expect(shown)
                cpu = interface.process.cpu_times()
                times.append((time.monotonic() - interface.began, cpu.user + cpu.system))
        took[name], spent[name] = (min(column) for column in zip(*times, strict=True))
    began = time.monotonic()
    RunView(long)
    return {
        "open_100_steps_s": round(took["short"], 3),
        "open_100000_steps_s": round(took["long"], 3),
        "open_100000_steps_more_s": round(took["long"] - took["short"], 3),
        "open_100000_steps_more_cpu_s": round(spent["long"] - spent["short"], 3),
        "read_100000_steps_s": round(time.monotonic() - began, 3),
    }


def watching(run: Path, seconds: float) -> dict[str, float]:
    """What the interface takes on this machine while the run grows."""
    with growing(run, 100), Interface(run) as interface:
        time.sleep(SETTLED)
        process = interface.process
        before, began = process.cpu_times(), time.monotonic()
        time.sleep(seconds)
        after, took = process.cpu_times(), time.monotonic() - began
        user, system = (after.user - before.user) / took, (after.system - before.system) / took
        return {
            "seconds": round(took, 1),
            "share_of_core": round(user + system, 4),
            "share_of_core_user": round(user, 4),
            "share_of_core_system": round(system, 4),
            "resident_mib": process.memory_info().rss >> 20,
        }


def remote(run: Path, seconds: float, round_trip: float) -> dict[str, float]:
    """What the interface sends over ssh while the run grows, and how soon it answers keys."""
    with growing(run, 100), Interface(run, round_trip / 2) as interface:
        time.sleep(SETTLED)
        began, had = time.monotonic(), interface.received
        time.sleep(seconds)
        sent = (interface.received - had) / (time.monotonic() - began)
        answers = []
        for key, text, back in islice(cycle(PRESSED), KEYS):
            answers.append(_answer(interface, key, text))
            _answer(interface, back, "Devices")
            time.sleep(0.5)
        return {
            "round_trip_s": round_trip,
            "sent_bytes_per_s": round(sent),
            "answer_median_s": round(median(answers), 3),
            "answer_most_s": round(max(answers), 3),
        }


def _answer(interface: Interface, key: str, text: str) -> float:
    """Seconds from a key to a text that it brings to the screen."""
    began = time.monotonic()
    interface.press(key)
    interface.expect(text)
    return time.monotonic() - began


if __name__ == "__main__":
    main()
