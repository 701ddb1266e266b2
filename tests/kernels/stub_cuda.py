"""A CUDA driver that computes nothing, and torch with a GPU of it, so that Triton really compiles and launches kernels.

`main` is a program: its argument is the folder with the driver's library. It reads JSON lines of the variables of an
environment, and answers each with a JSON line: the problem and the advice of `try_out`, or null if the kernel ran.
INCLUDE is the folder of Python's header files.
"""

import ctypes
import json
import os
import subprocess
import sys
import sysconfig
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import patch

SOURCE = """
#include <stdint.h>
#define OK(name) int name(void) { return 0; }
OK(cuInit) OK(cuCtxSetCurrent) OK(cuCtxGetDevice) OK(cuCtxGetLimit) OK(cuCtxSetLimit) OK(cuDevicePrimaryCtxRetain)
OK(cuDriverGetVersion) OK(cuFuncSetAttribute) OK(cuFuncSetCacheConfig) OK(cuLaunchKernel) OK(cuLaunchKernelEx)
OK(cuModuleUnload) OK(cuOccupancyMaxActiveClusters) OK(cuStreamIsCapturing) OK(cuTensorMapEncodeIm2col)
OK(cuTensorMapEncodeTiled)
int cuCtxGetCurrent(void **context) { *context = (void *)8; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 99 << 10; return 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute ? 0 : 1024; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "an error"; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = (void *)8; return 0; }
int cuModuleLoadData(void **module, const void *data) { *module = (void *)8; return 0; }
int cuPointerGetAttribute(uint64_t *value, int attribute, uint64_t pointer) { *value = pointer; return 0; }
"""
LIBRARY = "libcuda.so.1"


def build(folder: Path) -> None:
    """Compile the driver's library into this folder."""
    (folder / "cuda.c").write_text(SOURCE)
    command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}", "cuda.c", "-o", LIBRARY]
    subprocess.run(command, cwd=folder, check=True)


def raised(module: str, error: Exception) -> Exception:
    """The error, raised by code of a module with this name."""
    try:
        exec("raise error", {"__name__": module, "error": error})
    except type(error) as caught:
        return caught
    raise AssertionError


def _paths(include: str, scheme: str = "") -> dict[str, str]:
    return {"include": include}


def main() -> None:
    ctypes.CDLL(f"{sys.argv[1]}/{LIBRARY}", mode=ctypes.RTLD_GLOBAL)
    import torch

    cuda = torch.cuda
    changes = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: (8, 9),
        "synchronize": lambda device: None,
        "device": lambda device: nullcontext(),
    }
    with (
        patch.multiple(cuda, **changes),
        patch.object(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, create=True),
    ):
        from rptrain.kernels.toolchain import try_out
        from rptrain.kernels.toolchain_errors import ToolchainError

        for line in sys.stdin:
            if child := os.fork():
                if status := os.waitpid(child, 0)[1]:
                    print(json.dumps([f"the process ended with {status}", ""]), flush=True)
                continue
            for name, value in json.loads(line).items():
                os.environ[name] = value
            if folder := os.environ.get("INCLUDE"):
                sysconfig.get_paths = partial(_paths, folder)
            answer = None
            try:
                try_out(torch.device("cpu"), anew=True)
            except ToolchainError as error:
                answer = error.problem, error.advice
            print(json.dumps(answer), flush=True)
            os._exit(0)
