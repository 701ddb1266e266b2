"""Calls of the CUDA driver that do not block. They take about a microsecond, and keep Python's interpreter lock.

PyTorch's take ten and release the lock, and beside the threads of other devices and of the optimizer it takes a thread
longer to get the lock back than to make the call. A call that keeps the lock must not block: host memory must be
page-locked, and the driver's queue must have room.

Handles are the integers that PyTorch's objects have. Call from a thread in which their device is current. A failed call
raises RuntimeError.
"""

import ctypes
from functools import cache

NOT_READY = 600  # CUDA_ERROR_NOT_READY


def record(event: int, stream: int) -> None:
    """Records an event of the stream's device."""
    _check(_driver().cuEventRecord(event, stream))


def wait(stream: int, event: int) -> None:
    """Makes work that is appended later start after `event`, which may belong to any device."""
    _check(_driver().cuStreamWaitEvent(stream, event, 0))


def copy(target: int, source: int, nbytes: int, stream: int) -> None:
    """Copies between addresses of the stream's device and of page-locked host memory."""
    _check(_driver().cuMemcpyAsync(target, source, nbytes, stream))


def launch(graph: int, stream: int) -> None:
    """Launches an instantiated graph."""
    _check(_driver().cuGraphLaunch(graph, stream))


def passed(event: int) -> bool:
    """Whether a recorded event's stream has reached it."""
    status = _driver().cuEventQuery(event)
    if status == NOT_READY:
        return False
    _check(status)
    return True


def elapsed(start: int, end: int) -> float:
    """Seconds between two timing events that have passed."""
    milliseconds = ctypes.c_float()
    _check(_driver().cuEventElapsedTime(ctypes.byref(milliseconds), start, end))
    return milliseconds.value / 1e3


@cache
def _driver() -> ctypes.PyDLL:
    library = ctypes.PyDLL("libcuda.so.1")
    handle, address = ctypes.c_void_p, ctypes.c_uint64
    library.cuEventRecord.argtypes = (handle, handle)
    library.cuStreamWaitEvent.argtypes = (handle, handle, ctypes.c_uint)
    library.cuMemcpyAsync.argtypes = (address, address, ctypes.c_size_t, handle)
    library.cuGraphLaunch.argtypes = (handle, handle)
    library.cuEventQuery.argtypes = (handle,)
    library.cuEventElapsedTime.argtypes = (ctypes.POINTER(ctypes.c_float), handle, handle)
    return library


def _check(status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA error {status}: {(text.value or b'unknown').decode()}")
