"""Whether a run of three processes, of which some are killed or cut off, ends with the bits of an undisturbed one.

python -m benchmarks.kill_processes --kills 10 --out FILE   # exit code 1 where a bound or the bits are not kept

torchrun starts the processes, and again after each kill (SIGKILL of a random process at a random time, every third one
in a save). In a second run, two network namespaces stand for two machines, and the link between them is cut. The
processes of the first machine train on.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import psutil

from benchmarks.commit import commit
from benchmarks.kill_and_resume import digests
from benchmarks.network.namespaces import SIDES, Side, Unavailable, joined, set_link
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records import events
from rptrain.utils.replacing import PARTIAL
from tests import run_tools as tools

PROCESSES = 3
STEPS = 600
MODEL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
SETTINGS = (
    f"train.max_steps={STEPS}",
    "save.save_steps=5",
    "save.save_total_limit=2",
    "engine.replicas=4",
    "engine.round_size=1",
    "engine.devices=cpu:4",
    "engine.replan=false",
    "log.logging_steps=1",
)
PORT = 29872
KILLED, CUT = 5.0, 30.0  # most seconds from a kill, and from a cut, to the last record of every other process
TRAINED = 2.0  # most seconds from the first step of a group to a kill that is not in a save
SAVES = 5  # most saves of a group before the one in which a process is killed
LOOK = 0.0005  # seconds between two looks for a save
HANGS = 180.0  # seconds until a wait is given up


@dataclass(frozen=True)
class Other:
    """A process that was not killed, or not cut off from the first one."""

    rank: int
    record_seconds: float | None  # from the kill to its last record; None: it had not begun its records
    end_seconds: float  # from the kill to its end
    message: str
    named: bool  # whether the message names the lost process


@dataclass(frozen=True)
class Loss:
    """A process that was killed or cut off. `returned_seconds`: from there to the next step that the run records."""

    rank: int
    phase: str  # "start", "training" or "save"
    step: int  # the last one that was recorded
    others: tuple[Other, ...]
    returned_seconds: float
    processes: int  # that trained on

    def problems(self, most: float) -> Iterator[str]:
        for other in self.others:
            seconds = other.end_seconds if other.record_seconds is None else other.record_seconds
            if seconds > most:
                yield f"process {other.rank} ended its records {seconds:.1f} s after the loss of process {self.rank}"
            if not other.named and self.phase != "start":
                yield f"process {other.rank} says {other.message!r} after the loss of process {self.rank}"


class Group:
    """A torchrun, and the processes that it starts. On a `side` of the link, or by itself."""

    def __init__(self, folder: Path, *overrides: str, processes: int = PROCESSES, side: Side | None = None) -> None:
        meet = ["--standalone"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if side is not None:
            endpoint = f"{SIDES[0].address}:{PORT}"
            meet = ["--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=cut"]
            host = int(side is SIDES[0])  # torchrun does not recognize an address of a namespace as its own
            meet += [f"--rdzv-conf=is_host={host},last_call_timeout=10", f"--local-addr={side.address}"]
            environment |= {"GLOO_SOCKET_IFNAME": side.interface}
        command = [sys.executable, "-P", "-m", "torch.distributed.run", *meet, f"--nproc-per-node={processes}"]
        command += ["--max-restarts=1000", "-m", "rptrain", "--config", str(folder / "run.toml")]
        command += [*SETTINGS, *overrides]
        with (folder / "output").open("ab") as output:
            self._process = subprocess.Popen(
                command if side is None else side.command(*command), stdout=output, stderr=output, env=environment
            )
        self._output = folder / "output"

    def workers(self) -> dict[int, int]:
        """The process ids by rank."""
        found = {}
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self._process.pid).children(recursive=True):
                with suppress(psutil.Error):  # it has ended meanwhile
                    if rank := child.environ().get("RANK"):
                        found[int(rank)] = child.pid
        return found

    def wait(self) -> None:
        if self._process.wait() != 0:
            raise SystemExit(f"torchrun has ended with {self._process.returncode}:\n{self._output.read_text()[-4000:]}")

    def end(self) -> None:
        """Kill it and its processes, if they are there."""
        for pid in (self._process.pid, *self.workers().values()):
            if self._process.poll() is None and _alive(pid):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def group(folder: Path, *overrides: str, **kind: Any) -> Iterator[Group]:
    started = Group(folder, *overrides, **kind)
    try:
        yield started
    finally:
        started.end()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kill_processes", description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that processes and namespaces are ended
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tools.write_model(folder / "model", **MODEL)
        tools.write_config(folder)
        whole, killed, cut = (RunDir(folder / "runs" / name) for name in ("whole", "killed", "cut"))
        with group(folder, "log.run_name=whole") as started:
            started.wait()
        kills = []
        with group(folder, "log.run_name=killed") as started:
            random, gone = Random(arguments.seed), set[int]()
            until(lambda: killed.path.is_dir() and killed.saved_step > 0)
            for number in range(arguments.kills):
                kind = ("training", "save", "any")[number % 3]
                kills.append(kill(killed, started, kind, random, gone))
                report(kills[-1])
            started.wait()
        try:
            loss: Loss | None = cut_link(folder, cut)
            report(loss)
        except Unavailable as error:
            loss = None
            print(f"no link was cut: {error}")
        problems = list(chain(*(each.problems(KILLED) for each in kills), loss.problems(CUT) if loss else ()))
        for run in (killed, cut)[: 1 if loss is None else 2]:
            if losses(run) != losses(whole):
                problems.append(f"the losses of the run that was {run.path.name} differ")
            if digests(run) != digests(whole) or not digests(run):
                problems.append(f"the weights of the run that was {run.path.name} differ")
        if not any(each.phase == "save" for each in kills):
            problems.append("no kill was in a save")
    result = {
        "commit": commit(),
        "cores": os.cpu_count(),
        "processes": PROCESSES,
        "steps": STEPS,
        "problems": problems,
        "longest_seconds_to_last_record": {
            "kills": max(_seconds(kills), default=None),
            "cut": max(_seconds([loss] if loss else []), default=None),
        },
        "kills": [asdict(each) for each in kills],
        "cut": loss and asdict(loss),
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(problems) or "no problems")
    return int(bool(problems))


def kill(run: RunDir, started: Group, kind: str, random: Random, gone: set[int]) -> Loss:
    """Kill a process of a new group, which has none of the pids that are `gone`; `kind` "any" is at any time."""
    until(lambda: len(workers := started.workers()) == PROCESSES and not gone & set(workers.values()))
    workers, victim = started.workers(), random.randrange(PROCESSES)
    if kind == "any":
        time.sleep(random.uniform(0, 2 * TRAINED))
    else:
        until(lambda: last_step(run, since=workers) > 0)
        if kind == "save":
            wait_for_save(run, random.randint(1, SAVES))
        else:
            time.sleep(random.uniform(0, TRAINED))
    os.kill(workers[victim], signal.SIGKILL)
    at = time.time()
    saving = saves(run)
    step = last_step(run)
    phase = "save" if saving else "training" if last_step(run, since=workers) else "start"
    gone |= set(workers.values())
    others = {rank: pid for rank, pid in workers.items() if rank != victim}
    return lost(run, phase, step, victim, others, at)


def cut_link(folder: Path, run: RunDir) -> Loss:
    """Train on two machines and cut the link: the first one trains on. Raises Unavailable without namespaces."""
    name = f"log.run_name={run.path.name}"
    with (
        joined() as sides,
        group(folder, name, processes=2, side=sides[0]) as first,
        group(folder, name, processes=1, side=sides[1]) as second,
    ):
        until(lambda: last_step(run) >= STEPS // 10)
        others, (victim,) = first.workers(), second.workers()
        step, at = last_step(run), time.time()
        set_link(sides[1], up=False)
        loss = lost(run, "training", step, victim, others, at)
        first.wait()
    return loss


def lost(run: RunDir, phase: str, step: int, victim: int, others: dict[int, int], at: float) -> Loss:
    """What the other processes do after a process was lost, until the run goes on."""
    ends: dict[int, float] = {}

    def ended() -> bool:
        for rank, pid in others.items():
            if rank not in ends and not _alive(pid):
                ends[rank] = time.time()
        return len(ends) == len(others)

    until(ended)
    found = []
    for rank, pid in sorted(others.items()):
        last = last_record(run.of_process(rank).events_path, pid)
        message = "" if last is None else last.sentence() or ""
        seconds = None if last is None else round(last.time - at, 2)
        named = message.startswith(f"process {victim} on ")
        found.append(Other(rank, seconds, round(ends[rank] - at, 2), message, named))
    until(lambda: (latest := newest(run)) is not None and latest.time > max(ends.values()))
    latest = newest(run)
    assert latest is not None
    (*_, processes) = (each.processes for each in records(run.events_path) if isinstance(each, events.ProcessStarted))
    return Loss(victim, phase, step, tuple(found), round(latest.time - at, 2), processes)


def wait_for_save(run: RunDir, count: int) -> None:
    """Wait until that many saves have begun."""
    before = True
    deadline = time.monotonic() + HANGS
    while count:
        now = saves(run)
        count -= now and not before
        before = now
        if time.monotonic() > deadline:
            raise SystemExit(f"{run.path} does not save")
        time.sleep(LOOK)


def saves(run: RunDir) -> bool:
    """Whether there is a checkpoint that is not complete."""
    return any(run.checkpoints_path.glob(f"*{PARTIAL}"))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANGS
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"a wait took more than {HANGS:g} s")
        time.sleep(0.01)


def records(path: Path) -> list[events.Event]:
    return [*events.read(path)] if path.is_file() else []


def last_record(path: Path, pid: int) -> events.Event | None:
    """The last record of a process; None if it has begun no records."""
    found: events.Event | None = None
    own = False
    for event in records(path):
        if isinstance(event, events.RunStarted):
            own = False
        elif isinstance(event, events.ProcessStarted):
            own = event.pid == pid
        if own:
            found = event
    return found


def newest(run: RunDir) -> events.Step | None:
    """The step that was recorded last."""
    return next((each for each in reversed(records(run.events_path)) if isinstance(each, events.Step)), None)


def last_step(run: RunDir, since: dict[int, int] | None = None) -> int:
    """The last recorded step; 0: none. `since`: of these processes."""
    step, counts = 0, since is None
    for event in records(run.events_path):
        if isinstance(event, events.ProcessStarted) and since is not None:
            step, counts = 0, event.pid == since[0]
        elif isinstance(event, events.Step) and counts:
            step = event.step
    return step


def losses(run: RunDir) -> dict[int, float | None]:
    """By step, as it was last trained."""
    return {each.step: each.loss for each in records(run.events_path) if isinstance(each, events.Step)}


def report(loss: Loss) -> None:
    seconds = ", ".join(f"{each:.2f}" for each in _seconds([loss]))
    print(
        f"process {loss.rank} lost ({loss.phase}, step {loss.step}): last records of the others after {seconds} s, "
        f"{loss.processes} processes trained on after {loss.returned_seconds:.1f} s",
        flush=True,
    )


def _seconds(found: Sequence[Loss]) -> list[float]:
    return [
        other.end_seconds if other.record_seconds is None else other.record_seconds
        for loss in found
        for other in loss.others
    ]


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    sys.exit(main())
