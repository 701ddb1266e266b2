"""The libraries of native code (such as engine/optim/adam.c), and calls of them on the threads of a pool."""

import ctypes
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line loads a library before torch is imported
    import torch

_log = logging.getLogger(__name__)
_unusable: list[Path] = []  # libraries that are here, and cannot be loaded

_SUFFIXES = {  # of entries
    "torch.bfloat16": "bf16",
    "torch.float16": "f16",
    "torch.float32": "f32",
    "torch.float64": "f64",
    "torch.int8": "i8",
}


@cache
def library(module: str) -> ctypes.CDLL | None:
    """The library with this name, such as "rptrain.kernels._quant"; None if it was installed without a compiler.

    Also None, with a warning for the first one, if it cannot be loaded here: it was built for another machine or a
    newer C library, or its file system does not allow execution.
    """
    package, _, name = module.rpartition(".")
    file = Path(import_module(package).__path__[0], f"{name}.so")
    if not file.exists():
        return None
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        if not _unusable:
            _log.warning("a library cannot be loaded (%s): slower code replaces it; reinstall rptrain here", error)
        _unusable.append(file)
        return None


def suffix(dtype: "torch.dtype") -> str:
    """The end of the names of entries for this type, such as "bf16"."""
    return _SUFFIXES[str(dtype)]


def finish(pool: Executor, calls: Sequence[Callable[[], object]]) -> None:
    """Runs the calls on threads of the pool, or a single call in this thread. All have ended when it returns."""
    if len(calls) == 1:
        calls[0]()
        return
    ended([pool.submit(call) for call in calls])


def ended(begun: Sequence[Future[object]]) -> None:
    """Waits for submitted calls, and raises the exception of one of them."""
    wait(begun)  # waits for all, before an error frees the buffers
    for call in begun:
        call.result()
