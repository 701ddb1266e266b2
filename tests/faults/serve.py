"""A program that imports the command line once, and runs it with a fault for each line of its input."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # as in conftest.py: `tests` is found, and `kernels` and `models` are not
from tests.faults import injector  # noqa: E402

sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

if __name__ == "__main__":
    injector.serve()
