"""The thread of a trainer that writes down what its devices do, into `lanes.jsonl`: see `rptrain.runs.lanes`."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import torch

from rptrain.engine.activity import Activity, LaneState
from rptrain.engine.engine import Engine
from rptrain.engine.store import available_bytes
from rptrain.runs.events import Event, MemoryLow
from rptrain.runs.lanes import FILE, OLD_FILE, LaneRecord, OptimizerState, Phase, Snapshot
from rptrain.runs.line_file import LineFile
from rptrain.utils.errors import RunDeleted
from rptrain.utils.nvml import Driver, GpuStatus

LOW = 0.05  # share of what the process has or may have: less free memory is told
PAUSE = 0.25  # seconds between two records
FULL = 8 << 20  # bytes of a file: some hours of one GPU
NOTHING = GpuStatus(None, None, None)


class Telemetry:
    """Writes a record every PAUSE seconds, of what the trainer says it does and of the engine that it watches.

    Context manager: owns the thread and the file. It reads what threads note anyway and holds up none of them. A disk
    that is full costs records, not the run, and so does a file that was deleted. `tell` is called with records from
    the thread, and `check` before a new file is begun: it raises RunDeleted once the run's folder is gone.
    """

    def __init__(
        self, folder: Path, devices: Sequence[str], tell: Callable[[Event], None], check: Callable[[], None]
    ) -> None:
        self.phase: Phase = "loading"
        self._path, self._devices, self._tell, self._check = folder / FILE, devices, tell, check
        self._told = False  # that little memory is left
        self._file = LineFile(self._path)
        self._driver = Driver()
        self._gpus = [self._handle(name) for name in devices]
        self._process = psutil.Process()
        self._watched: tuple[Engine, int] | None = None
        self._before: tuple[LaneState, ...] = ()
        self._last = time.perf_counter()
        self._looking = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main, name="telemetry", daemon=True)
        self._thread.start()

    @contextmanager
    def watching(self, engine: Engine, done: int) -> Iterator[None]:
        """While the engine trains, which was opened after `done` steps."""
        with self.doing("training"):
            with self._looking:
                self._watched, self._before = (engine, done), ()
            try:
                yield
            finally:
                with self._looking:
                    self._watched = None

    @contextmanager
    def doing(self, phase: Phase) -> Iterator[None]:
        """What the trainer is at meanwhile."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._driver.close()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ---- the thread

    def _main(self) -> None:
        while True:
            with suppress(OSError, RunDeleted):
                snapshot = self._look()
                self._write(snapshot)
                self._warn(snapshot)
            if self._stop.wait(PAUSE):
                return

    def _look(self) -> Snapshot:
        with self._looking:
            now = time.perf_counter()
            seconds, self._last = now - self._last, now
            lanes: tuple[LaneRecord, ...] = ()
            optimizer = None
            if self._watched is not None:
                engine, done = self._watched
                activity = engine.activity()
                lanes = tuple(self._lanes(activity, done))
                optimizer = OptimizerState(activity.optimizer, activity.queue, activity.update_seconds)
                self._before = activity.lanes
        process, free = self._process.memory_info().rss, available_bytes()
        return Snapshot(time.time(), round(seconds, 4), self.phase, process, free, lanes, optimizer)

    def _lanes(self, activity: Activity, done: int) -> Iterator[LaneRecord]:
        before = self._before or (None,) * len(activity.lanes)
        for device, gpu, last, state in zip(self._devices, self._gpus, before, activity.lanes, strict=False):
            status = NOTHING if gpu is None else self._driver.status(gpu)
            spent = {kind: total - (last.busy[kind] if last else 0.0) for kind, total in state.busy.items()}
            doing = "computing" if state.computing else "waiting" if state.waiting else "idle"
            at, slot = state.current, state.current.slot if state.current else None
            yield LaneRecord(
                device=device,
                doing=doing,
                stage=str(slot.stage) if slot else None,
                kind=slot.stage.kind if slot else None,
                slot=slot.index if slot else None,
                micro_batch=at.micro_batch if at else None,
                step=done + at.iteration + 1 if at else None,
                waiting=state.waiting,
                busy={kind: round(seconds, 4) for kind, seconds in spent.items() if seconds > 0},
                up=state.up - (last.up if last else 0),
                down=state.down - (last.down if last else 0),
                memory=status.memory,
                utilisation=status.utilization,
                temperature=status.temperature,
            )

    def _write(self, snapshot: Snapshot) -> None:
        if self._file.size > FULL:
            self._begin_anew()
        self._file.append(snapshot.to_line().encode())

    def _begin_anew(self) -> None:
        """In a new file; where the folder cannot be written, in the same one without what it holds."""
        self._check()
        if self._path.exists():  # it was renamed before, where no new one could be made
            try:
                self._path.replace(self._path.with_name(OLD_FILE))
            except OSError:
                self._file.clear()
                return
        full, self._file = self._file, LineFile(self._path)
        full.close()

    def _warn(self, snapshot: Snapshot) -> None:
        if not self._told and snapshot.free < LOW * (snapshot.process + snapshot.free):
            self._told = True
            self._tell(MemoryLow(snapshot.process, snapshot.free))

    def _handle(self, device: str) -> Any | None:
        if not device.startswith("cuda"):
            return None
        return self._driver.gpu(str(torch.cuda.get_device_properties(device).uuid))
