"""Calling code that is compiled with the package (adam.c, embedding_grads.c, quant.c), by the threads of a pool."""

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from functools import cache
from importlib.util import find_spec

import torch

SUFFIXES = {  # of entries
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.int8: "i8",
}


@cache
def library(module: str) -> ctypes.CDLL | None:
    """A compiled file, by the name of its extension module; None where the package was installed without a compiler."""
    spec = find_spec(module)
    return ctypes.CDLL(spec.origin) if spec and spec.origin else None


def finish(pool: Executor, calls: Sequence[Callable[[], object]]) -> None:
    """Makes the calls, each on a thread of the pool; one alone is made here. All have ended when it returns."""
    if len(calls) == 1:
        calls[0]()
        return
    ended([pool.submit(call) for call in calls])


def ended(begun: Sequence[Future[object]]) -> None:
    """Waits for calls that a pool was given, and raises what one of them raised."""
    wait(begun)  # all of them, before an error lets go of the buffers
    for call in begun:
        call.result()
