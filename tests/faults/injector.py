"""Faults in a trainer's process: at a place, the n-th time that it is reached, an error or a hang."""

import ctypes
import json
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

import rptrain.train.save
import rptrain.train.trainer
from rptrain import cli
from rptrain.data.loader import Batches
from rptrain.engine.engine import Engine
from rptrain.engine.optimizer import OptimizerWorker
from rptrain.planner import memory
from rptrain.runs.folder import event_log
from rptrain.runs.records import events
from rptrain.train import telemetry, validation
from rptrain.train.telemetry import Telemetry
from tests import run_tools as tools

# Operations of the engine, by the names under which it announces them to a probe.
OPERATIONS = {
    "forward": r":F1-2.* micro-batch 0$",
    "backward": r":B1-2.* micro-batch 0$",
    "upload": r":B1-2.* upload$",
    "download": r":B1-2.* download$",
    "activation": r":F1-2.* micro-batch 0 output$",
    "optimizer": r"^optimizer update of layers\.1$",
}
# Functions that are reached in every step or save, and those that are reached once.
OFTEN: dict[str, tuple[Any, str]] = {
    "callback": (OptimizerWorker, "_publish"),
    "loader": (Batches, "batch"),
    "saver": (rptrain.train.save, "save_state"),
    "fsync": (os, "fsync"),
    "events": (event_log, "to_line"),
    "validation": (validation, "loss"),
    "lanes": (Telemetry, "_write"),
    "telemetry": (Telemetry, "_snapshot"),
}
ONCE: dict[str, tuple[Any, str]] = {
    "loading": (rptrain.train.trainer, "load_weights"),
    "questions": (rptrain.train.trainer, "ask_questions"),
    "export": (rptrain.train.trainer, "export_store"),
}
INTERVAL = 0.05  # seconds between two records of the telemetry: several in a run of a second
TRACKER = ("tracker open", "tracker log", "tracker close")


class Mute(Exception):
    """An error that cannot be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def hold() -> None:
    """Locks a mutex twice, in a call that keeps the interpreter lock."""
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


def fail(error: BaseException) -> None:
    raise error


KINDS: Mapping[str, Callable[[], object]] = {
    "raises": lambda: fail(RuntimeError("injected")),
    "exits": lambda: fail(SystemExit(3)),
    "mute": lambda: fail(Mute()),
    "sleeps": lambda: time.sleep(10**6),
    "holds": hold,
}


class Injector:
    """Counts how often each place is reached, and puts a fault in one: its kind, at the n-th time, counted from 1.

    `log` gets the counts, or with a fault the time at which it happened.
    """

    def __init__(self, log: Path, fault: tuple[str, str, int] | None) -> None:
        self._log, self._fault = log, fault
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def reach(self, place: str) -> None:
        with self._lock:
            self._counts[place] += 1
            if self._fault is None:
                self._log.write_text(json.dumps(self._counts))
                return
            name, kind, at = self._fault
            if (name, at) != (place, self._counts[place]):
                return
            self._log.write_text(str(time.time()))
        KINDS[kind]()

    def install(self) -> None:
        init = Engine.__init__
        patterns = {place: re.compile(pattern) for place, pattern in OPERATIONS.items()}

        def probe(name: str) -> None:
            for place, pattern in patterns.items():
                if pattern.search(name):
                    self.reach(place)

        Engine.__init__ = lambda engine, *given, observers, **named: init(
            engine, *given, observers=replace(observers, probe=probe), **named
        )
        for place, (owner, name) in (OFTEN | ONCE).items():
            setattr(owner, name, self._before(place, getattr(owner, name)))
        module = ModuleType("wandb")
        module.__spec__ = ModuleSpec("wandb", None)
        module.__dict__["init"] = self._before("tracker open", self._tracker)
        sys.modules["wandb"] = module

    def _tracker(self, **settings: Any) -> SimpleNamespace:
        """What wandb.init returns; it does nothing."""
        names = {"log": "tracker log", "finish": "tracker close"}
        return SimpleNamespace(**{name: self._before(place, lambda *_, **__: None) for name, place in names.items()})

    def _before(self, place: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            if place != "events" or isinstance(given[0], events.Step):
                self.reach(place)
            return function(*given, **named)

        return call


def _run(order: Mapping[str, Any]) -> None:
    for stream in (1, 2):
        os.dup2(os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream)
    make = memory.make_plan
    memory.make_plan = lambda spec, *sizes, **limits: tools.with_stages(
        make(spec, *sizes, **limits), spec, tools.STAGES
    )
    telemetry.INTERVAL = INTERVAL
    Injector(Path(order["log"]), order["fault"] and tuple(order["fault"])).install()
    sys.argv = ["rptrain", *order["arguments"]]
    cli.main()


def serve() -> None:
    """Run the command line in a fork for each line of the input, and print its exit status and when it ended."""
    torch.set_num_threads(1)  # no thread pool before a fork
    for module in ("numpy.random", "rich.progress", "rptrain.train.run", "rptrain.data.tasks"):
        import_module(module)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run(json.loads(line))
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), time.time(), flush=True)
