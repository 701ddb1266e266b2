"""Programs that measure and compare: `python -m benchmarks.NAME`, in the root of a checkout."""

import sys
from pathlib import Path

import tests  # noqa: F401 - while the root is on the path: some programs use its made-up runs

# The root's `kernels` and `models` folders must not be importable by those names: a PyPI package has one of them.
ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
