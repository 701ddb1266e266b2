"""Machines on which kernels cannot be compiled: each fault is explained, with what to do."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rptrain.kernels import toolchain_errors
from rptrain.kernels.toolchain_errors import PTXASError, ToolchainError, explain, explained
from tests.kernels import stub_cuda
from tests.kernels.stub_cuda import raised

pytest.importorskip("triton")
CACHE = "/nowhere/triton"


REFUSED = """Internal Triton PTX codegen error
`ptxas` stderr:
ptxas fatal   : Value 'sm_121a' is not defined

Repro command: /x/ptxas -v"""
# The module that raises an exception, the exception, and parts of the problem and the advice, if it is explained.
RAISED = {
    "full": (
        "triton.runtime.cache",
        OSError(28, "No space left"),
        f"{CACHE} cannot be used (No sp",
        "TRITON_CACHE_DIR",
    ),
    "network": (
        "triton.compiler.compiler",
        OSError(116, "Stale file handle", f"{CACHE}/A/k"),
        "Stale file",
        "local disk",
    ),
    "noexec": ("triton.runtime.build", ImportError("a.so: failed to map segment"), "noexec", "TRITON_CACHE_DIR"),
    "damaged": ("triton.runtime.build", ImportError("a.so: invalid ELF header"), "invalid ELF", f"delete {CACHE}"),
    "libcuda": (
        "triton.backends.nvidia.driver",
        AssertionError("libcuda.so cannot found!"),
        "libcuda.so.1",
        "ldconfig",
    ),
    "no_ldconfig": ("subprocess", FileNotFoundError(2, "No such file", "/sbin/ldconfig"), "libcuda.so.1", "ldconfig"),
    "no_ptxas": ("triton.knobs", RuntimeError("Cannot find ptxas"), "Cannot find ptxas", "--force-reinstall triton"),
    "old_driver": (
        "triton.runtime.jit",
        RuntimeError("device kernel image is invalid"),
        "refuses a kernel",
        "the driver",
    ),
    "ptxas": ("triton.compiler", PTXASError(REFUSED), "/x/ptxas, which compiles kernels, fails", "TRITON_PTXAS_PATH"),
    "temporary": ("triton.compiler", OSError(28, "No space left"), "temporary files (No space left)", "TMPDIR"),
    "gpu": ("triton.runtime.jit", RuntimeError("Triton Error [CUDA]: an illegal memory access"), None, ""),
    "ours": ("rptrain.engine.memory.store", OSError(28, "No space left"), None, ""),
}


@pytest.mark.parametrize("name", RAISED)
def test_what_is_wrong(monkeypatch, name):
    module, error, problem, advice = RAISED[name]
    triton = SimpleNamespace(knobs=SimpleNamespace(cache=SimpleNamespace(dir=CACHE)))
    monkeypatch.setattr(toolchain_errors, "triton", triton)
    monkeypatch.setattr(os.path, "isdir", lambda path: True)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))
    for variable in toolchain_errors.PTXAS_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    within = module if module.startswith(("triton", "rptrain")) else "triton"
    found = explain(raised(within, raised(module, error)))
    if problem is None:
        assert found is None
    else:
        assert found is not None and problem in found.problem and advice in found.advice
        assert str(found) == f"{found.problem}: {found.advice}"


@pytest.mark.parametrize(
    ("capability", "advice"), [((6, 1), "older CUDA"), ((13, 0), "newer CUDA")], ids=["old", "new"]
)
def test_torch_without_kernels_for_the_gpu(monkeypatch, capability, advice):
    properties = SimpleNamespace(major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_120", "compute_120"])
    said = "CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors might be"
    with pytest.raises(ToolchainError) as found, explained():
        raise RuntimeError(said)
    assert f"(a GPU, sm_{capability[0]}{capability[1]}), only for sm_75, sm_120" in found.value.problem
    assert advice in found.value.advice and "pytorch.org" in found.value.advice


def test_what_caused_an_error():
    """Such as one in a captured graph, whose end raises another."""
    try:
        raise RuntimeError("the capture failed") from raised(
            "triton.runtime", RuntimeError("Failed to find C compiler")
        )
    except RuntimeError as error:
        found = explain(error)
    assert found is not None and "no C compiler" in found.problem


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match="unspecified launch failure"), explained():
        raise RuntimeError("CUDA error: unspecified launch failure")


# What the environment of a machine is, what is wrong with it, and what to do. FOLDER has files that tests make.
FAULTS = {
    "nothing": ({}, None, None),
    "headers": ({"INCLUDE": "/nowhere"}, "(Python.h: No such file or directory)", "-dev"),
    "c_headers": ({"CC": "FOLDER/cc"}, ".h: No such file or directory)", "libc6-dev"),
    "compiler_fails": ({"CC": "/bin/false"}, "/bin/false cannot build", "build-essential"),
    "compiler_lacks": ({"CC": "/nowhere/cc"}, "/nowhere/cc cannot be run", "install gcc"),
    "no_compiler": ({"PATH": "/nowhere"}, "no C compiler", "install gcc"),
    "no_libcuda": ({"TRITON_LIBCUDA_PATH": "/nowhere"}, "libcuda.so.1", "ldconfig"),
    "no_home": ({"TRITON_HOME": "/proc/nowhere"}, "/proc/nowhere/.triton/cache cannot be used", "TRITON_CACHE_DIR"),
    "cache_is_a_file": ({"TRITON_CACHE_DIR": "FOLDER/cc"}, "(Not a directory)", "TRITON_CACHE_DIR"),
    "cache_is_read_only": ({"TRITON_CACHE_DIR": "/proc/triton"}, "/proc/triton cannot be used", "TRITON_CACHE_DIR"),
    "cache_is_empty": ({"TRITON_CACHE_DIR": ""}, "no cache folder", "TRITON_CACHE_DIR"),
    "old_ptxas": ({"TRITON_PTXAS_PATH": "FOLDER/old"}, "Value 'sm_89' is not defined", "unset TRITON_PTXAS_PATH"),
    "other_ptxas": ({"TRITON_PTXAS_PATH": "FOLDER/bad"}, "ptxas fatal : something else", "unset TRITON_PTXAS_PATH"),
    "no_program": ({"TRITON_PTXAS_PATH": "FOLDER/cuda.c"}, "cuda.c: Permission denied", "unset TRITON_PTXAS_PATH"),
}
PTXAS = """#!/bin/sh
[ "$1" = --version ] && echo "Cuda compilation tools, release {release}, V1" && exit
case "$*" in *-v*|*{option}*) echo "ptxas fatal   : {said}" >&2; exit 255; esac
"""


@pytest.fixture(scope="module")
def tried(tmp_path_factory) -> Iterator[Callable[[dict[str, str]], list[str] | None]]:
    """Tries kernels out in environments, with a driver that computes nothing."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    folder = tmp_path_factory.mktemp("machine")
    stub_cuda.build(folder)
    old = PTXAS.format(release="11.4", option="--gpu-name", said="Value 'sm_89' is not defined for option 'gpu-name'")
    bad = PTXAS.format(release="12.4", option="none", said="something else")
    for name, text in (("cc", '#!/bin/sh\nexec gcc -nostdinc "$@"\n'), ("old", old), ("bad", bad)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    removed = {"TRITON_INTERPRET", "CC", "TRITON_CACHE_DIR", *toolchain_errors.PTXAS_VARIABLES}
    environment = {name: value for name, value in os.environ.items() if name not in removed}
    environment |= {"LD_LIBRARY_PATH": str(folder), "TRITON_LIBCUDA_PATH": str(folder), "TRITON_HOME": str(folder)}
    code = f"import sys; sys.path.append({str(Path(__file__).parents[2])!r}); "
    code += "from tests.kernels.stub_cuda import main; main()"
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code, str(folder)],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as child:  # fmt: skip
        assert child.stdin is not None and child.stdout is not None
        requests, answers = child.stdin, child.stdout

        def ask(variables: dict[str, str]) -> list[str] | None:
            given = {name: value.replace("FOLDER", str(folder)) for name, value in variables.items()}
            requests.write(json.dumps(given) + "\n")
            requests.flush()
            return json.loads(answers.readline())

        yield ask
        requests.close()


@pytest.mark.long
@pytest.mark.sample(6)
@pytest.mark.parametrize("fault", FAULTS)
def test_real_compilers(tried, fault):
    variables, problem, advice = FAULTS[fault]
    found = tried(variables)
    if problem is None:
        assert found is None
    else:
        assert found is not None and problem in found[0] and advice in found[1]


def test_a_compiler_without_a_temporary_folder(monkeypatch):
    """The explanation does not raise, whatever the machine lacks."""

    def refuse(**named):
        raise OSError(28, "No space left on device", "/tmp/x")

    monkeypatch.setattr(toolchain_errors.tempfile, "TemporaryDirectory", refuse)
    found = explain(raised("triton.runtime.build", subprocess.CalledProcessError(1, ["/usr/bin/gcc", "a.c"])))
    assert found is not None and "No space left" in found.problem and "TMPDIR" in found.advice
