"""Signals and kills at random times of a training process: whether each ends as promised, and nothing is lost.

python -m benchmarks.signals --signals 200 --kills 100 --out OUT.json

Signals: SIGINT, SIGTERM, SIGHUP, two and three SIGINT, at random times of a process; some in its first and some in its
last 100 ms. Each must end the process with status 130 (or 0 if the run was finished), with a record if there is a run,
without a traceback, within a second of what it promises: of the step and the save for the first signal, of the signal
itself for later ones. Time in which the main thread waits for a core does not count. A process that ends too late is
run again once. Before the program has installed its handlers, the system ends it.

Exits with status 1 if anything was not as it must be.
"""

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path
from random import Random

from benchmarks.commit import commit
from benchmarks.signals import cases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--signals", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    given = parser.parse_args()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # in the processes, too, under nohup
    outcomes: list[cases.Outcome] = []
    with tempfile.TemporaryDirectory() as name:
        for outcome in cases.signals(Path(name), given.signals, Random(given.seed)):
            outcomes.append(outcome)
            said = ", ".join(f"{sent.signal} at {sent.time:.2f} s while {sent.phase}" for sent in outcome.sent)
            print(
                f"{len(outcomes)}: {said}: {outcome.code} after {outcome.seconds:.2f} s {outcome.problems}", flush=True
            )
    summary = cases.summary(outcomes)
    result = {"commit": commit(), "seed": given.seed, "summary": summary, "signals": [*map(cases.row, outcomes)]}
    print(json.dumps(summary, indent=1))
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    return int(bool(summary["with problems"]))


if __name__ == "__main__":
    sys.exit(main())
