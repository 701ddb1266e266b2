"""Every kernel compiles for every supported GPU, without spilling and inside the card's shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.compiling import ARCHITECTURES

OPERATIONS = sorted(path.stem.removeprefix("variants_") for path in Path(__file__).parent.glob("variants_*.py"))
FAST = 89  # the card that the fast suite compiles for; the others take minutes
pytest.importorskip("triton")


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    "architecture",
    [pytest.param(each, id=f"sm_{each}", marks=[] if each == FAST else pytest.mark.compile) for each in ARCHITECTURES],
)
def test_compiles_without_spilling_and_inside_shared_memory(operation, architecture):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    child = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys; sys.path.append({str(Path(__file__).parents[2])!r}); "
         f"from tests.kernels.compiling import main; main({operation!r}, {architecture})"],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    kernels, *found = map(json.loads, child.stdout.splitlines())
    for usage in found:
        assert usage["stack"] <= usage["stack_allowed"], usage
        assert usage["shared"] <= usage["shared_allowed"], usage
    assert kernels and {usage["kernel"] for usage in found} == set(kernels)
