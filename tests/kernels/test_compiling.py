"""Every kernel compiles for every supported GPU, without spilling and inside the card's shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.compiling import ARCHITECTURES

OPERATIONS = sorted(path.stem.removeprefix("variants_") for path in Path(__file__).parent.glob("variants_*.py"))
pytest.importorskip("triton")


def test_each_kernel_compiles():
    """One variant of each for one card; all of them take minutes."""
    check(89, OPERATIONS, once=True)


@pytest.mark.compile
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=[f"sm_{each}" for each in ARCHITECTURES])
def test_every_variant_compiles(operation, architecture):
    check(architecture, [operation])


def check(architecture: int, operations: list[str], once: bool = False) -> None:
    """Kernels must not spill, nor take more shared memory than the card has."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    child = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys; sys.path.append({str(Path(__file__).parents[2])!r}); "
         f"from tests.kernels.compiling import main; main({architecture}, {operations!r}, {once})"],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    kernels, *found = map(json.loads, child.stdout.splitlines())
    for usage in found:
        assert usage["stack"] <= usage["stack_allowed"], usage
        assert usage["shared"] <= usage["shared_allowed"], usage
    assert kernels and {usage["kernel"] for usage in found} == set(kernels)
