"""Signals and kills at random times of a training process: whether each ends as promised, and nothing is lost.

python -m benchmarks.signals --signals 200 --kills 100 --out OUT.json

Signals: SIGINT, SIGTERM, SIGHUP, two and three SIGINT, at random times of a process; some in its first and some in its
last 100 ms. Each must end the process with status 130 (or 0 if the run was finished), with a record if there is a run,
without a traceback, within a second of what it promises: of the step and the save for the first signal, of the signal
itself for later ones. Time in which the main thread waits for a core does not count. A process that ends too late is
run again once. Signals that come before the program has installed its handlers are counted, not judged.

Kills: SIGKILL at random times, every second one in a save. The resumed run must end with the weights, the optimizer
state and the losses of an undisturbed one.

Exits with status 1 if anything was not as it must be.
"""

import argparse
import json
import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from random import Random

from benchmarks.commit import commit
from benchmarks.signals.cases import Outcome, interrupted
from benchmarks.signals.cases import summary as cases_summary
from benchmarks.signals.kills import Kill, killed
from benchmarks.signals.kills import summary as kills_summary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--signals", type=int, default=200)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes that get signals, at a time")
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    given = parser.parse_args()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # in the processes, too, under nohup
    kills: list[Kill] = []
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / part for part in ("kills", "signals")]
        for folder in folders:
            folder.mkdir()
        for kill in killed(folders[0], given.kills, Random(given.seed)):
            kills.append(kill)
            where = "in a save" if kill.in_save else "elsewhere"
            print(
                f"{len(kills)}: killed {where} at {kill.seconds:.2f} s, after step {kill.step}",
                *kill.problems,
                flush=True,
            )
        for outcome in interrupted(folders[1], given.signals, given.seed, given.jobs):
            outcomes.append(outcome)
            said = ", ".join(f"{sent.signal} at {sent.time:.2f} s while {sent.phase}" for sent in outcome.sent)
            ended = f"{outcome.code} after {outcome.seconds:.2f} s"
            print(f"{len(outcomes)}: {said}: {ended}", *outcome.problems, flush=True)
    summaries = {"signals": cases_summary(outcomes), "kills": kills_summary(kills)}
    result = {"commit": commit(), "seed": given.seed, "summary": summaries}
    result |= {"signals": [*map(asdict, outcomes)], "kills": [*map(asdict, kills)]}
    print(json.dumps(summaries, indent=1))
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(summary["with problems"] for summary in summaries.values()))


if __name__ == "__main__":
    sys.exit(main())
