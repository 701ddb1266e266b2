"""Every place with every fault in the first, a middle and the last step, async and sync; and what must follow.

python -m tests.faults.cases OUT.json [PLACE …]

Each case trains with the fault, and then again without it. The first process must end in time, with a status, a message
and a record; the second one must end with the weights of an undisturbed run.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records import events
from rptrain.utils.native_watchdog import NativeWatchdog
from tests import run_tools as tools
from tests.faults.injector import KINDS, OFTEN, ONCE, OPERATIONS, TRACKER

SERVE = str(Path(__file__).with_name("serve.py"))
STALL = 2.0  # engine.stall_timeout of the runs with a fault
BUSY_STALL = 15.0  # the same on a busy machine, where a step may wait for seconds for a core
BOUND = STALL + 10  # seconds from the fault to the end of the process
WORKERS = 2
HANGS = ("sleeps", "holds")
REASONS = ("injected", "SystemExit", "Mute", "no progress for")  # what a message says about a fault
NOT_BEGUN = "none: no run was begun"
# What the run does not need: it goes on without them, unless the interpreter lock is held.
OBSERVERS = ("lanes", "telemetry", *TRACKER)
SETTINGS = (
    "save.save_steps=2",
    "data.val_size=0.3",
    "train.eval_steps=2",
    "eval.questions=2",
    'log.report_to=["wandb"]',
)


@dataclass(frozen=True)
class Case:
    place: str
    kind: str
    when: str  # "first", "middle", "last", or "once"
    update: str

    def __str__(self) -> str:
        return f"{self.place}, {self.kind}, {self.when}, {self.update}"


@dataclass(frozen=True)
class Outcome:
    case: Case
    code: int
    seconds: float  # from the fault to the end of the process
    message: str  # the last line of its output
    record: str  # the last record
    problems: tuple[str, ...]


def cases(places: Sequence[str] = ()) -> Iterator[Case]:
    for place in places or (*OPERATIONS, *OFTEN, *ONCE, *TRACKER):
        once = place in ONCE or place in ("tracker open", "tracker close")
        for kind in KINDS:
            for when in ("once",) if once else ("first", "middle", "last"):
                for update in ("async", "sync"):
                    yield Case(place, kind, when, update)


class Server:
    """A process that runs the command line with faults, one run at a time. Context manager."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-P", SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.communicate()

    def run(self, folder: Path, output: str, fault: Sequence[Any] | None, *overrides: str) -> tuple[int, float]:
        """The exit status, and the time at which the process ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        arguments = ["--config", str(folder / "run.toml"), *SETTINGS, *overrides]
        order = {"arguments": arguments, "output": str(folder / output), "fault": fault, "log": str(folder / "log")}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        code, ended = self._process.stdout.readline().split()
        return int(code), float(ended)


class Table:
    """Runs cases in a folder. On a `busy` machine, ends may come late, and hangs have a longer limit."""

    def __init__(self, folder: Path, *, busy: bool = False) -> None:
        self._folder, self._busy = folder, busy
        self._undisturbed: dict[str, tuple[dict[str, int], dict[str, bytes]]] = {}
        tools.write_model(folder / "model")

    def _prepared(self, name: str) -> Path:
        folder = self._folder / name
        folder.mkdir()
        (folder / "model").symlink_to(self._folder / "model")
        tools.write_config(folder)
        return folder

    def undisturbed(self, server: Server, update: str) -> tuple[dict[str, int], dict[str, bytes]]:
        """How often each place is reached, and the weights at the end."""
        if update not in self._undisturbed:
            folder = self._prepared(update)
            code, _ = server.run(folder, "output", None, f"optim.update={update}")
            assert code == 0, (folder / "output").read_text()
            run = newest(folder)
            assert run is not None
            self._undisturbed[update] = json.loads((folder / "log").read_text()), tools.state(run)
        return self._undisturbed[update]

    def run(self, server: Server, case: Case) -> Outcome:
        counts, state = self.undisturbed(server, case.update)
        count = counts[case.place]
        at = {"middle": (count + 1) // 2, "last": count}.get(case.when, 1)
        if case.place in ("lanes", "telemetry"):  # how often depends on time
            at = {"middle": 2, "last": 3}.get(case.when, 1)
        folder, overrides = self._prepared(str(case)), [f"optim.update={case.update}"]
        stall = BUSY_STALL if self._busy else STALL
        limits = [] if self._busy and case.kind not in HANGS else [f"engine.stall_timeout={stall}"]
        code, ended = server.run(folder, "output", (case.place, case.kind, at), *overrides, *limits)
        if not (folder / "log").exists():
            return Outcome(case, code, 0.0, "", "", ("the place was not reached",))
        seconds = ended - float((folder / "log").read_text())
        output, run = (folder / "output").read_text(), newest(folder)
        records = [] if run is None else [*events.read(run.events_path)]
        problems = [*_problems(case, code, output, records)]
        if run is None and case.kind not in HANGS and (folder / "runs").exists():
            problems.append("an incomplete run folder is left")
        if seconds > BOUND and not self._busy:
            problems.append(f"ended after {seconds:.1f} seconds")
        if run is None or not run.finished:
            again, _ = server.run(folder, "again", None, *overrides)
            if again != 0:
                problems.append(f"the second process ended with {again}: {(folder / 'again').read_text()[-500:]}")
            run = newest(folder)
        if run is None or not run.finished or tools.state(run) != state:
            problems.append("the weights differ from those of an undisturbed run")
        lines = output.strip().splitlines()
        said = [line for line in lines if any(reason in line for reason in REASONS)]
        message = (said or lines or [""])[-1]
        record = NOT_BEGUN
        if records:
            record = f"{events.NAMES[type(records[-1])]}: {records[-1].sentence()}"
        return Outcome(case, code, round(seconds, 2), message, record, tuple(problems))


def newest(folder: Path) -> RunDir | None:
    """The run that was begun last, if one was: its records begin once its config is written."""
    runs = [RunDir(path) for path in (folder / "runs").glob("*")]
    begun = [run for run in runs if run.events_path.exists()]
    return max(begun, key=lambda run: int(run.path.name.partition("-")[2] or 1), default=None)


def _problems(case: Case, code: int, output: str, records: Sequence[events.Event]) -> Iterator[str]:
    if "Exception in thread" in output:
        yield "a thread's traceback"
    failed = any(isinstance(event, events.TelemetryFailed | events.TrackerFailed) for event in records)
    if case.place in OBSERVERS and case.kind != "holds":
        if code != 0 or not isinstance(records[-1], events.Finished):
            yield f"ended with {code}, {type(records[-1]).__name__}"
        if not failed:
            yield "without a record of what failed"
        return
    if code != 1:
        yield f"ended with {code}"
    if not records and (case.place, case.when) != ("fsync", "first"):  # before the run is created
        yield "without a record"
    if records and not isinstance(records[-1], events.Failed):
        yield f"the last record is {type(records[-1]).__name__}"
    if not any(reason in output for reason in REASONS):
        yield "without a message"


def main(out: Path, places: Sequence[str]) -> int:
    assert NativeWatchdog.load() is not None, "needs a C compiler"
    found: list[Outcome] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        table, waiting = Table(Path(name)), SimpleQueue[Server]()
        servers = [Server().__enter__() for _ in range(WORKERS)]
        for update in ("async", "sync"):
            table.undisturbed(servers[0], update)
        for server in servers:
            waiting.put(server)

        def run(case: Case) -> Outcome:
            server = waiting.get()
            try:
                return table.run(server, case)
            finally:
                waiting.put(server)

        with ThreadPoolExecutor(WORKERS) as pool:
            for outcome in pool.map(run, cases(places)):
                found.append(outcome)
                if outcome.problems:
                    print(outcome.case, outcome.problems, outcome.message, flush=True)
        for server in servers:
            server.__exit__(None, None, None)
    bad = sum(bool(outcome.problems) for outcome in found)
    slowest = max(outcome.seconds for outcome in found)
    said = f"{len(found)} cases, {bad} with problems, at most {slowest} s; {time.monotonic() - began:.0f} s in all"
    print(said)
    out.write_text(json.dumps({"summary": said, "cases": [asdict(outcome) for outcome in found]}, indent=1) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
