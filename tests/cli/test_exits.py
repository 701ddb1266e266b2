"""Processes that end at once."""

import os
import subprocess
import sys

import pytest

ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
PROGRAM = """
import atexit, sys
from rptrain.cli.exits import ending_at_once
atexit.register(print, "the interpreter ends")
with ending_at_once():
    print("output")
    print("message", file=sys.stderr)
    sys.exit({code!r})
"""


@pytest.mark.parametrize("code", [0, 2])
def test_a_process_that_ends_at_once_keeps_its_output_and_exit_code(code):
    line = [sys.executable, "-c", PROGRAM.format(code=code)]
    done = subprocess.run(line, capture_output=True, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stdout, done.stderr) == (code, "output\n", "message\n")


def test_a_closed_pipe_ends_as_without_it():
    reading, writing = os.pipe()
    os.close(reading)
    line = [sys.executable, "-c", PROGRAM.format(code=2)]
    done = subprocess.run(line, stdout=writing, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    os.close(writing)
    assert done.returncode == 120  # that of the interpreter, which reports the lost output
    assert "BrokenPipeError" in done.stderr
