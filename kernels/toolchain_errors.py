"""What is wrong when kernels cannot be compiled or run, from the exceptions of torch and Triton, and what to do."""

import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rptrain.kernels import with_triton
from rptrain.kernels.launch import HAS_TRITON, triton
from rptrain.kernels.target import read
from rptrain.utils.errors import UserError, describe
from rptrain.utils.text import as_message

if TYPE_CHECKING or not (HAS_TRITON and with_triton):  # nothing raises them

    class TritonError(Exception): ...

    class PTXASError(TritonError): ...
else:
    from triton.errors import TritonError
    from triton.runtime.errors import PTXASError

# What torch, Triton and the programs that Triton starts raise.
FAILURES = (RuntimeError, OSError, ImportError, AssertionError, subprocess.CalledProcessError, TritonError)
PTXAS_VARIABLES = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")
NO_IMAGE = "no kernel image is available"
OLD_DRIVER = ("device kernel image is invalid", "unsupported toolchain", NO_IMAGE)  # of kernels that Triton compiled
# What to do.
WHERE_LIBCUDA = "run ldconfig as root, or set TRITON_LIBCUDA_PATH to the folder that has libcuda.so.1"
TEMPORARY = "free disk space, or set TMPDIR to another folder that can be written"
OTHER_CACHE = "set TRITON_CACHE_DIR to a folder on a local disk that can be written"


class ToolchainError(UserError):
    """Kernels cannot be compiled or run. `problem` says why, `advice` what to do."""

    def __init__(self, problem: str, advice: str) -> None:
        super().__init__(f"{problem}: {advice}")
        self.problem, self.advice = as_message(problem), advice


@contextmanager
def explained() -> Iterator[None]:
    """Raise a ToolchainError in place of an exception of the block that `explain` knows."""
    try:
        yield
    except FAILURES as error:
        if (known := explain(error)) is None:
            raise
        raise known from error


def explain(error: BaseException) -> ToolchainError | None:
    """The problem of the machine that an exception of torch or Triton shows, or one that caused it; None for others.

    Those of Triton are recognized by its modules in the traceback, since it also raises exceptions of the system.
    """
    cause: BaseException | None = error
    while cause is not None:
        if (known := _explain(cause)) is not None:
            return known
        cause = cause.__cause__ or cause.__context__
    return None


def _explain(error: BaseException) -> ToolchainError | None:
    if isinstance(error, ToolchainError):
        return error
    modules = _modules(error)
    if not any(name.partition(".")[0] == "triton" for name in modules):
        return _no_image() if isinstance(error, RuntimeError) and NO_IMAGE in str(error) else None
    match error:
        case PTXASError():
            return ptxas_fails(*_refused(str(error)))
        case subprocess.CalledProcessError():
            return _compiler_fails(error.cmd) if "triton.runtime.build" in modules else _no_ptxas(describe(error))
        case ImportError():
            return _not_loaded(error)
        case OSError():
            return _of_system(error, modules)
        case RuntimeError() | AssertionError():
            return _by_text(str(error))
    return None


def reinstall() -> str:
    """How to install the version of Triton that torch needs."""
    needed: list[str] = []
    with suppress(PackageNotFoundError):  # a torch of one's own build
        needed = [text.partition(";")[0].strip() for text in requires("torch") or () if "triton" in text]
    return f"reinstall Triton (pip install --force-reinstall {needed[0] if needed else 'triton'})"


def ptxas_fails(path: str, said: str) -> ToolchainError:
    """The ptxas at this path does not compile for the GPU, and printed this."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    line = next((line for line in lines if "fatal" in line or "error" in line.lower()), lines[0] if lines else "")
    problem = f"{path}, which compiles kernels, fails for this GPU ({' '.join(line.split())})"
    if "open" in line and "file" in line:
        return ToolchainError(problem, TEMPORARY)
    set_by = [name for name in PTXAS_VARIABLES if os.environ.get(name) == path]
    if set_by:
        return ToolchainError(problem, f"unset {set_by[0]}, or set it to the ptxas of a newer CUDA toolkit")
    variable = PTXAS_VARIABLES[path.endswith("-blackwell")]
    advice = f"set {variable} to the ptxas of a newer CUDA toolkit, or install newer versions of torch and Triton"
    return ToolchainError(problem, advice)


def _modules(error: BaseException) -> set[str]:
    """The names of the modules in the traceback."""
    found, trace = set(), error.__traceback__
    while trace is not None:
        found.add(str(trace.tb_frame.f_globals.get("__name__")))
        trace = trace.tb_next
    return found


def _no_image() -> ToolchainError:
    target = read()
    built = torch.cuda.get_arch_list()
    problem = (
        f"torch {torch.__version__} has no kernels for this GPU ({torch.cuda.get_device_name()}, {target.name}), "
        f"only for {', '.join(built)}"
    )
    numbers = [int(name[3:]) for name in built if name[3:].isdigit()]
    older = isinstance(target.architecture, int) and bool(numbers) and target.architecture < min(numbers)
    which = "for an older CUDA, such as 12.6" if older else "for a newer CUDA"
    return ToolchainError(problem, f"install a build of torch {which} (https://pytorch.org/get-started/locally)")


def _refused(text: str) -> tuple[str, str]:
    """The path of ptxas and what it printed, from the text of a PTXASError."""
    said, _, command = text.partition("Repro command: ")
    return command.split(" ", 1)[0] or "ptxas", said.partition("stderr:")[2] or said


def _no_ptxas(said: str) -> ToolchainError:
    advice = [f"unset {name}" for name in PTXAS_VARIABLES if name in os.environ] + [reinstall()]
    return ToolchainError(f"ptxas, which compiles kernels, cannot be used ({said})", " or ".join(advice))


def _compiler_fails(command: Sequence[str]) -> ToolchainError:
    """What the C compiler says of a file that includes Python.h, with the options of a command that failed."""
    compiler, *options = command
    kept = [option for option in options if option.startswith(("-I", "-L", "-l"))]
    try:
        with tempfile.TemporaryDirectory() as folder:
            again = [compiler, "-x", "c", "-", "-shared", "-fPIC", "-o", f"{folder}/a.so", *kept]
            english = os.environ | {"LC_ALL": "C"}
            source = "#include <Python.h>\n"
            said = subprocess.run(again, input=source, env=english, capture_output=True, text=True).stderr
    except OSError as error:
        said = f"error: {describe(error)}"
    line = next((line for line in said.splitlines() if "error" in line or "cannot" in line), "")
    said = line.rpartition("error: ")[2] or "it printed no reason"
    problem = f"the C compiler {compiler} cannot build Triton's module for the driver ({said.strip()})"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    if "Python.h" in said:
        folder = sysconfig.get_paths()["include"]
        advice = f"install {version}-dev (Fedora: python3-devel), which has the header files of Python for {folder}"
    elif "libcuda" in said:
        advice = WHERE_LIBCUDA
    elif ".h: No such file" in said:
        advice = "install libc6-dev (Fedora: glibc-devel), which has the header files of C"
    elif "No space left" in said:
        advice = TEMPORARY
    else:
        advice = "install gcc with its parts (Debian: build-essential), or set CC to a C compiler that works"
    return ToolchainError(problem, advice)


def _no_libcuda() -> ToolchainError:
    return ToolchainError("Triton does not find libcuda.so.1, the library of NVIDIA's driver", WHERE_LIBCUDA)


def _not_loaded(error: ImportError) -> ToolchainError | None:
    """A module that was compiled cannot be loaded."""
    folder, said = triton.knobs.cache.dir, describe(error)
    if "libcuda.so" in said:
        return _no_libcuda()
    if "failed to map segment" in said:
        if not os.path.isdir(folder) or not os.statvfs(folder).f_flag & os.ST_NOEXEC:
            return None  # memory is short
        problem = f"Triton's cache folder {folder} is on a file system without execution (noexec)"
        return ToolchainError(problem, "set TRITON_CACHE_DIR to a folder on another file system")
    return ToolchainError(f"a module in Triton's cache cannot be loaded ({said})", f"delete {folder}")


def _of_system(error: OSError, modules: set[str]) -> ToolchainError:
    folder, file = triton.knobs.cache.dir, str(error.filename or "")
    said = error.strerror or str(error)
    if "triton.runtime.cache" in modules or Path(file).is_relative_to(folder):
        return ToolchainError(f"Triton's cache folder {folder} cannot be used ({said})", OTHER_CACHE)
    if "subprocess" in modules:  # a program that cannot be started
        if "ldconfig" in file:
            return _no_libcuda()
        if "triton.runtime.build" in modules:
            return ToolchainError(f"the C compiler {file} cannot be run ({said})", "install gcc, or set CC to another")
        return _no_ptxas(f"{file}: {said}")
    return ToolchainError(f"Triton cannot write temporary files ({describe(error)})", TEMPORARY)


def _by_text(said: str) -> ToolchainError | None:
    if "Failed to find C compiler" in said:
        return ToolchainError("Triton finds no C compiler", "install gcc, or set CC to a C compiler")
    if "cache dir" in said:
        return ToolchainError("Triton has no cache folder (TRITON_CACHE_DIR is empty)", OTHER_CACHE)
    if "ptxas" in said or "support CUDA" in said:
        return _no_ptxas(said)
    if "libcuda" in said or "0 active drivers" in said:
        return _no_libcuda()
    if any(text in said for text in OLD_DRIVER):
        advice = "update the driver, or install torch and Triton for the CUDA version that nvidia-smi shows"
        return ToolchainError(f"NVIDIA's driver refuses a kernel that Triton compiled ({said})", advice)
    return None
