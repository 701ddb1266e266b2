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

from rptrain.runs import events
from rptrain.runs.run_dir import RunDir
from rptrain.utils.native_watchdog import NativeWatchdog
from tests import run_tools as tools
from tests.faults.injector import KINDS, OFTEN, ONCE, OPERATIONS, TRACKER

SERVE = str(Path(__file__).with_name("serve.py"))
STALL = 2.0  # engine.stall_timeout
BOUND = STALL + 10  # seconds from the fault to the end of the process
WORKERS = 2
# What the run does not need: it goes on without them, unless the interpreter lock is held.
OBSERVERS = ("lanes", "telemetry", *TRACKER)
SETTINGS = (
    f"engine.stall_timeout={STALL}",
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

    def run(self, folder: Path, output: Path, fault: Sequence[Any] | None, *overrides: str) -> tuple[int, float]:
        """The exit status, and the time at which the process ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        arguments = ["--config", str(folder / "run.toml"), *SETTINGS, *overrides]
        order = {"arguments": arguments, "output": str(output), "fault": fault}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        code, ended = self._process.stdout.readline().split()
        return int(code), float(ended)


class Table:
    """Runs cases in a folder. It counts how often a place is reached in an undisturbed run once for each update."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._states: dict[str, dict[str, bytes]] = {}
        self._counts: dict[tuple[str, str], int] = {}
        tools.write_model(folder / "model")

    def _prepared(self, name: str) -> Path:
        folder = self._folder / name
        folder.mkdir()
        (folder / "model").symlink_to(self._folder / "model")
        tools.write_config(folder)
        return folder

    def undisturbed(self, server: Server, place: str, update: str) -> tuple[int, dict[str, bytes]]:
        """How often the place is reached, and the weights at the end."""
        if (place, update) not in self._counts:
            folder = self._prepared(f"{place} {update}")
            fault = (place, "raises", 0, str(folder / "fault.json"))
            code, _ = server.run(folder, folder / "output.txt", fault, f"optim.update={update}")
            assert code == 0, (folder / "output.txt").read_text()
            self._counts[place, update] = json.loads((folder / "fault.json").read_text())["count"]
            self._states[update] = tools.state(newest(folder))
        return self._counts[place, update], self._states[update]

    def run(self, server: Server, case: Case) -> Outcome:
        count, state = self.undisturbed(server, case.place, case.update)
        at = {"middle": (count + 1) // 2, "last": count}.get(case.when, 1)
        folder = self._prepared(str(case))
        fault = (case.place, case.kind, at, str(folder / "fault.json"))
        update = f"optim.update={case.update}"
        code, ended = server.run(folder, folder / "output.txt", fault, update)
        began = json.loads((folder / "fault.json").read_text())["time"]
        output = (folder / "output.txt").read_text()
        run = newest(folder)
        records = [*events.read(run.events_path)]
        problems = [*_problems(case, code, ended - began, output, records)]
        if not run.finished:
            again, _ = server.run(folder, folder / "again.txt", None, update)
            if again != 0:
                problems.append(f"the second process ended with {again}: {(folder / 'again.txt').read_text()[-500:]}")
            run = newest(folder)
        if not run.finished or tools.state(run) != state:
            problems.append("the weights differ from those of an undisturbed run")
        message = next(iter(reversed(output.strip().splitlines())), "")
        last = records[-1]
        name = json.loads(events.to_line(last))["event"]
        return Outcome(case, code, round(ended - began, 2), message, f"{name}: {last.sentence()}", tuple(problems))


def newest(folder: Path) -> RunDir:
    """The run that was begun last."""
    return RunDir(max((folder / "runs").iterdir(), key=lambda path: int(path.name.partition("-")[2] or 1)))


def _problems(case: Case, code: int, seconds: float, output: str, records: Sequence[events.Event]) -> Iterator[str]:
    if seconds > BOUND:
        yield f"ended after {seconds:.1f} seconds"
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
    if not isinstance(records[-1], events.Failed):
        yield f"the last record is {type(records[-1]).__name__}"
    if not output.strip():
        yield "without a message"


def main(out: Path, places: Sequence[str]) -> int:
    assert NativeWatchdog.load() is not None, "needs a C compiler"
    found: list[Outcome] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        table, waiting = Table(Path(name)), SimpleQueue[Server]()
        servers = [Server().__enter__() for _ in range(WORKERS)]
        for place in places or (*OPERATIONS, *OFTEN, *ONCE, *TRACKER):
            for update in ("async", "sync"):
                table.undisturbed(servers[0], place, update)
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
