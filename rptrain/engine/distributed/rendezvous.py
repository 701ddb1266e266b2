"""The store through which processes meet. A call of it may never return."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed

from rptrain.engine.distributed.launch import Launch
from rptrain.utils.errors import UserError
from rptrain.utils.liveness import progressed

dist: Any = torch.distributed

CONNECTING = 300.0  # seconds to wait for the other processes at the start; they may load libraries at different speeds
POLL = 0.05  # seconds between two reads of the store while processes meet
ANSWER = 5.0  # seconds to wait for the store when an error is reported


def hosted(launch: Launch) -> Any:
    """The store, in the first process if torchrun has none."""
    return dist.TCPStore(launch.host, launch.port, is_master=True, wait_for_workers=False)


def connected(launch: Launch) -> Any:
    """A connection to the store: a call that waits keeps its connection."""
    return dist.TCPStore(launch.host, launch.port, is_master=False, timeout=timedelta(seconds=CONNECTING))


def value(store: Any, key: str) -> str:
    """The value of a key, or "" without one."""
    return store.get(key).decode() if store.check([key]) else ""


def bounded(call: Callable[[], Any]) -> Any:
    """The result of a call of the store; None if the store is lost or gives no answer within ANSWER seconds."""
    with suppress(RuntimeError):
        return within(ANSWER, call)
    return None


def leave(store: Any, launch: Launch) -> None:
    """This process ends after an error that all can read in the store. If the store is in this process, it first waits
    until the others have read that, for ANSWER seconds at most.
    """
    bounded(lambda: store.set(f"left/{launch.rank}", ""))
    if launch.hosts and launch.rank == 0:
        all_left = [f"left/{rank}" for rank in range(launch.world)]
        bounded(lambda: store.wait(all_left, timedelta(seconds=ANSWER)))


def within(seconds: float, call: Callable[[], Any], lost: Callable[[], Exception | None] = lambda: None) -> Any:
    """The result of a call that may never return. Raises its RuntimeError or UserError, a RuntimeError after `seconds`,
    or what `lost` returns meanwhile, unless the call then returns within POLL seconds: a process may end normally, or
    fail, right after a message that is still on its way here.

    To wait is progress: the watchdog of a process that hangs ends it, and others have as much time as `seconds` says.
    """
    found: list[Any] = []
    failed: list[Exception] = []

    def ask() -> None:
        try:
            found.append(call())
        except (RuntimeError, UserError) as error:
            failed.append(error)

    thread = threading.Thread(target=ask, name="call of the store", daemon=True)
    thread.start()
    until = time.monotonic() + seconds
    while thread.is_alive() and time.monotonic() < until:
        progressed()
        error = lost()
        thread.join(POLL)
        if error is not None and thread.is_alive():
            raise error
    if failed:
        raise failed[0]
    if not found:
        raise RuntimeError(f"no answer within {seconds:g} s")
    return found[0]
