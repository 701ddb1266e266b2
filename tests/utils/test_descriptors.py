"""Standard streams that are closed when a process starts."""

import subprocess
import sys
from itertools import product

PROGRAM = """
import os, subprocess, sys
from rptrain.utils.descriptors import open_missing_streams
open_missing_streams()
assert sys.stdin.read() == ""
print("out", flush=True)
print("err", file=sys.stderr, flush=True)
opened = os.open(os.devnull, os.O_RDONLY)
assert opened > 2
assert subprocess.run([sys.executable, "-S", "-c", "import os; [os.fstat(n) for n in range(3)]"]).returncode == 0
"""


def test_closed_streams_are_opened_also_for_child_processes():
    for closed in product(("<&-", "</dev/null"), (">&-", ""), ("2>&-", "")):
        done = subprocess.run(
            ["sh", "-c", f'"$@" {" ".join(closed)}', "sh", sys.executable, "-c", PROGRAM],
            capture_output=True,
            text=True,
            check=False,
        )
        shown = "" if ">&-" in closed else "out\n", "" if "2>&-" in closed else "err\n"
        assert (done.returncode, done.stdout, done.stderr) == (0, *shown)
