"""Every kernel compiles for every supported GPU, without spilling and inside the card's shared memory; and for AMD."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest

from tests.kernels.compiling import AMD, ARCHITECTURES

OPERATIONS = sorted(path.stem.removeprefix("variants_") for path in Path(__file__).parent.glob("variants_*.py"))
FIRST = {
    "delta_rule": 80,
    "fp8": 89,
    "grouped_fp8": 89,
    "half": 80,
    "requantize": 89,
}  # the first architecture with the matrix units that an operation needs
# kernels of features that no target of AMD has
WITHOUT_FEATURE = ("delta_rule", "fp8", "grouped_fp8", "half", "requantize")
NOT_FOR_AMD = {("rope", "_backward"): "unknown options: maxnreg"}  # kernels that Triton cannot compile for AMD, and why
AMD_SHARED, AMD_THREADS = 64 << 10, 1024  # bytes and threads of a program
pytest.importorskip("triton")

Answer = tuple[list[str], list[dict[str, Any]]]
Compiler = Callable[[int | str, list[str], bool], Answer]


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    """Compiles in a process without Triton's interpreter. Tests share it, as it takes seconds to start."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    code = f"import sys; sys.path.append({str(Path(__file__).parents[2])!r}); "
    code += "from tests.kernels.compiling import main; main()"
    with TemporaryFile("w+") as errors, subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
    ) as child:  # fmt: skip
        assert child.stdin is not None and child.stdout is not None
        requests, answers = child.stdin, child.stdout

        def ask(architecture: int | str, operations: list[str], once: bool) -> Answer:
            requests.write(json.dumps([architecture, operations, once]) + "\n")
            requests.flush()
            if not (answer := answers.readline()):
                errors.seek(0)
                pytest.fail(f"the compiler ended:\n{errors.read()}")
            return json.loads(answer)

        yield ask


@pytest.mark.compile
@pytest.mark.parametrize("architecture", [80, 89, 90])
def test_each_kernel_compiles(compiler, architecture):
    """One variant of each; all of them take minutes."""
    operations = [operation for operation in OPERATIONS if architecture >= FIRST.get(operation, 0)]
    check(*compiler(architecture, operations, True))


@pytest.mark.grid
@pytest.mark.parametrize(
    ("architecture", "operation"),
    [
        pytest.param(architecture, operation, id=f"sm_{architecture}-{operation}")
        for architecture in ARCHITECTURES
        for operation in OPERATIONS
        if architecture >= FIRST.get(operation, 0)
    ],
)
def test_every_variant_compiles(operation, architecture, compiler):
    check(*compiler(architecture, [operation], False))


@pytest.mark.amd
@pytest.mark.parametrize("architecture", AMD)
@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name not in WITHOUT_FEATURE])
def test_every_variant_compiles_for_amd(operation, architecture, compiler):
    """That the compiler accepts it, with as much shared memory and as many threads as a program can have: no more."""
    kernels, found = compiler(architecture, [operation], False)
    for usage in found:
        expected = NOT_FOR_AMD.get((operation, usage["kernel"]))
        assert usage["error"] == expected, usage
        if expected is None:
            assert usage["shared"] <= AMD_SHARED and usage["threads"] <= AMD_THREADS, usage
    assert kernels and {usage["kernel"] for usage in found} == set(kernels)


def check(kernels: list[str], found: list[dict[str, Any]]) -> None:
    """Kernels must not spill, nor take more shared memory than the card has, and must sum as they are to."""
    for usage in found:
        assert usage["stack"] <= usage["stack_allowed"], usage
        assert usage["shared"] <= usage["shared_allowed"], usage
        assert usage["sums"] == ["f16"] or not usage["half_sums"], usage
        assert usage["adds"] or not usage["promoted"], usage
    assert kernels and {usage["kernel"] for usage in found} == set(kernels)
