"""Keeps the repository root off sys.path: its `kernels` and `models` folders must not be importable by those names."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

import torch  # noqa: E402 - the path comes first

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported; kernels are tested on the CPU then

torch.set_num_threads(1)  # what tests compare must not depend on the machine, and the tensors are tiny
