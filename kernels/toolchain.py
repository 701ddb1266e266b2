"""Try whether a GPU runs torch's kernels and whether Triton can compile its own."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from rptrain.kernels.launch import HAS_TRITON, triton
from rptrain.kernels.rms_norm import rms_norm_triton
from rptrain.kernels.target import target_of
from rptrain.kernels.toolchain_errors import explained, ptxas_fails

EMPTY_PTX = ".version 6.3\n.target sm_50\n.address_size 64\n"  # for every GPU since 2014


def try_out(device: torch.device, *, anew: bool = False) -> None:
    """Run an operation of torch and, if Triton is installed, a kernel of every model on a GPU.

    Triton compiles the kernel if its cache does not have it, and with `anew` in any case. Raises ToolchainError, which
    says what to do, if the GPU's architecture, the compilers, Triton's cache or the driver prevent that, and
    RuntimeError for any other failure.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.cuda.device(device))  # explanations name it
        stack.enter_context(explained())
        if anew and HAS_TRITON:
            stack.enter_context(_empty_cache())
        x = torch.ones(2, 64, device=device)
        if HAS_TRITON:
            _check_ptxas(device)
            with redirect_stdout(StringIO()):  # Triton prints the code that ptxas refused
                rms_norm_triton(x, None, x[0], 1e-6)
        torch.cuda.synchronize(device)


@contextmanager
def _empty_cache() -> Iterator[None]:
    """Triton's cache is a new folder in the usual one, so that Triton compiles all that it has not loaded yet."""
    cache = triton.knobs.cache
    usual = cache.dir
    empty = os.path.join(usual, f"empty-{os.getpid()}")
    cache.dir = usual and empty  # without a folder Triton says so
    try:
        yield
    finally:
        cache.dir = usual
        shutil.rmtree(empty, ignore_errors=True)


def _check_ptxas(device: torch.device) -> None:
    """Ask ptxas whether it knows the GPU's architecture: LLVM ends the process for one that is too old."""
    number = target_of(device).architecture
    if not isinstance(number, int):  # no GPU of NVIDIA
        return
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    path, name = get_ptxas(number).path, sm_arch_from_capability(number)
    with TemporaryDirectory() as folder:
        source, target = f"{folder}/empty.ptx", f"{folder}/empty.cubin"
        Path(source).write_text(EMPTY_PTX)
        asked = subprocess.run((path, f"--gpu-name={name}", source, "-o", target), capture_output=True, text=True)
    if "gpu-name" in asked.stderr:
        raise ptxas_fails(path, asked.stderr)
