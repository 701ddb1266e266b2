"""Signals at random times of a process's life, and how each must end."""

import signal
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from benchmarks.signals.process import Trainer, Usual, usual
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records import events
from rptrain.utils.signals import INTERRUPTED
from tests import run_tools as tools

KINDS = (("SIGINT",), ("SIGTERM",), ("SIGHUP",), ("SIGINT",) * 2, ("SIGINT",) * 3)
EDGE = 0.1  # seconds: the first ones of a process, and its last ones
SHARE = 0.08  # of the signals at each edge; as many come while the process closes
RUN_SHARE = 0.4  # of the signals during the run, which is a small part of the life of a process
GAP = 0.3  # most seconds between two signals
WITHIN = 1.0  # seconds to end after what a signal promises
SAVES = ("loading", "training", "saving")  # phases in or right before which the first signal may save
SHRINKS = 0.9  # what the time to close is taken to be after a process that ended before its signal
DRAWS = 30  # most draws of a time, since the process may end earlier


@dataclass(frozen=True)
class Case:
    place: str  # "first", "life": from the start; "run": from the first record; "closing", "last": from the last one
    after: float  # seconds
    signals: tuple[str, ...]
    gaps: tuple[float, ...]  # seconds before each signal


@dataclass(frozen=True)
class Sent:
    signal: str
    time: float  # seconds since the start
    phase: str


@dataclass(frozen=True)
class Outcome:
    case: Case
    sent: tuple[Sent, ...]  # fewer than in the case if the process had ended
    code: int
    seconds: float  # from the last signal to the end, without `delay`
    delay: float  # seconds meanwhile in which the main thread waited for a core
    record: str  # the last one; "" without a run
    saved: bool  # whether the last checkpoint is that of the last recorded step
    message: str  # the output's last line
    traceback: bool
    problems: tuple[str, ...] = ()
    repeated: bool = False  # the first time it ended too late

    @property
    def early(self) -> bool:
        """Whether the first signal came before the program's handlers."""
        return self.sent[0].phase == "before main"

    @property
    def closing(self) -> float | None:
        """Seconds from the last record to the end, if the signals were sent meanwhile and did not end the process."""
        if self.case.place not in ("closing", "last") or self.code != 0:
            return None
        return self.case.after + self.sent[-1].time - self.sent[0].time + self.seconds + self.delay

    @property
    def at_the_end(self) -> bool:
        """Whether the last signal came less than EDGE before the end of a process that closed."""
        return self.sent[-1].phase in ("closing", "after the end") and self.seconds + self.delay <= EDGE


def interrupted(folder: Path, count: int, seed: int, jobs: int) -> Iterator[Outcome]:
    """Run processes, some at a time, until so many have got signals; then more, if too few came at the very end."""
    tools.write_model(folder / "model")
    measured = [usual(prepared(folder, f"usual {number}")) for number in range(3)]
    middle, longest = (Usual(*map(pick, zip(*measured, strict=True))) for pick in (median, max))
    print(f"undisturbed: {middle}, at most {longest}", flush=True)
    edge = round(count * SHARE)
    places = ["first"] * edge + ["closing"] * edge + ["last"] * edge
    places += ["run"] * round(count * RUN_SHARE)
    places += ["life"] * (count - len(places))
    Random(seed).shuffle(places)

    closings = deque([middle.closing], 3)  # of the last processes: a machine is not equally fast all the time

    def one(number: int) -> Outcome:
        random, place = Random(f"{seed} {number}"), places[number] if number < count else "last"
        for draw in range(DRAWS):
            now = middle._replace(closing=median(closings) * SHRINKS**draw)
            case = drawn(place, now, random)
            if (outcome := run(prepared(folder, f"{number} {draw}"), case, longest)) is not None:
                break
        else:
            raise SystemExit(f"{DRAWS} processes ended before {place}")
        if outcome.problems and all(problem.startswith("late") for problem in outcome.problems):
            again = run(prepared(folder, f"{number} again"), outcome.case, longest)
            if again is not None:
                outcome = replace(again, repeated=True)
        if outcome.closing is not None:
            closings.append(outcome.closing)
        return outcome

    with ThreadPoolExecutor(jobs) as pool:
        at_the_end = 0
        for numbers in chain([range(count)], ([number] for number in range(count, 2 * count))):
            for outcome in pool.map(one, numbers):
                at_the_end += outcome.at_the_end
                yield outcome
            if at_the_end >= edge:
                return


def prepared(folder: Path, name: str) -> Path:
    path = folder / name
    path.mkdir()
    (path / "model").symlink_to(folder / "model")
    return path


def drawn(place: str, middle: Usual, random: Random) -> Case:
    kinds = random.choice(KINDS)
    low, high = {
        "first": (0, EDGE),
        "life": (0, middle.life),
        "run": (0, middle.run),
        "closing": (0, middle.closing),
        "last": (max(0, middle.closing - EDGE), middle.closing),
    }[place]
    gaps = (0.0, *(random.uniform(0, GAP) for _ in kinds[1:]))
    return Case(place, random.uniform(low, high), kinds, gaps)


def run(folder: Path, case: Case, longest: Usual) -> Outcome | None:
    """None if the process ended before the signal."""
    trainer = Trainer(folder)
    sent: list[Sent] = []
    delay = 0.0
    began = 0.0
    if case.place == "run":
        trainer.wait_for_run()
        began = trainer.seconds
    elif case.place in ("closing", "last"):
        trainer.wait_for_end_of_run()
        began = trainer.seconds
    trainer.wait_until(began + case.after)
    for name, gap in zip(case.signals, case.gaps, strict=True):
        time.sleep(gap)
        phase, before = trainer.phase, trainer.delay
        if not trainer.send(signal.Signals[name]):
            break
        sent.append(Sent(name, round(trainer.seconds, 3), phase))
        delay = before
    end = trainer.wait()
    if not sent:
        return None
    delay = end.delay - delay
    output = trainer.output.read_text()
    record, saved = last_record(trainer.run)
    lines = output.strip().splitlines()
    outcome = Outcome(
        case,
        tuple(sent),
        end.code,
        round(end.time - sent[-1].time - delay, 3),
        round(delay, 3),
        record,
        saved,
        lines[-1] if lines else "",
        "Traceback" in output or "Exception ignored" in output,
    )
    return replace(outcome, problems=tuple(problems(outcome, longest)))


def last_record(run: RunDir) -> tuple[str, bool]:
    """Its name, or "none", or "" without a run; and whether the last checkpoint is that of the last recorded step."""
    if not run.path.is_dir():
        return "", False
    found = [*events.read(run.events_path)] if run.events_path.is_file() else []
    steps = [event.step for event in found if isinstance(event, events.Step)]
    return (type(found[-1]).__name__ if found else "none"), steps[-1:] == [run.saved_step]


def bound(outcome: Outcome, longest: Usual) -> float:
    """Seconds from the last signal in which the process must end.

    The first signal asks for the end of the step that runs, with the validation after it, and for a save, which waits
    for the one before. While a process closes, only the third ends it earlier than it would have ended.
    """
    promised, sent = 0.0, len(outcome.sent)
    phase = outcome.sent[sent - 1].phase
    if sent == 1 and phase in SAVES:
        promised = 2 * longest.step + 2 * longest.save
    if sent < 3 and phase in ("closing", "after the end"):
        promised = longest.closing
    return promised + WITHIN


def problems(outcome: Outcome, longest: Usual) -> Iterator[str]:
    """Where the end is not as promised. "late" is the first word about time."""
    first, code = outcome.sent[0], outcome.code
    if outcome.early:  # the interpreter's own action, or none: what it imports while it starts may catch the error
        if code == -signal.SIGKILL:
            yield "it hangs"
        return
    if outcome.seconds > (most := bound(outcome, longest)):
        yield f"late: {outcome.seconds:.2f} s, not {most:.2f} s"
    closes = first.phase in ("closing", "after the end")
    if code != INTERRUPTED and not (code == 0 and outcome.record == "Finished"):
        yield f"code {code}"
    if outcome.record not in ("", "Stopped", "Finished") or (outcome.record != "Finished" and closes):
        yield f"the last record is {outcome.record}"
    if code == INTERRUPTED and not outcome.message:
        yield "without a message"
    if outcome.traceback:
        yield "a traceback"
    if len(outcome.sent) == 1 and first.phase in ("training", "saving") and not outcome.saved:
        yield "not saved after the last step"


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    phases = sorted({outcome.sent[0].phase for outcome in outcomes})
    return {
        "signals": len(outcomes),
        "with problems": sum(bool(outcome.problems) for outcome in outcomes),
        "repeated because they ended too late": sum(outcome.repeated for outcome in outcomes),
        "by phase": {phase: sum(outcome.sent[0].phase == phase for outcome in outcomes) for phase in phases},
        "before the handlers were installed, by code": _codes([outcome for outcome in outcomes if outcome.early]),
        "afterwards, by code": _codes([outcome for outcome in outcomes if not outcome.early]),
        "in the first 100 ms": sum(outcome.sent[0].time <= EDGE for outcome in outcomes),
        "in the last 100 ms": sum(outcome.at_the_end for outcome in outcomes),
        "longest seconds": max((outcome.seconds for outcome in outcomes if not outcome.early), default=0.0),
    }


def _codes(outcomes: list[Outcome]) -> dict[str, int]:
    codes = [outcome.code for outcome in outcomes]
    return {str(code): codes.count(code) for code in sorted(set(codes))}
