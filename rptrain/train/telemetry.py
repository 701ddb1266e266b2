"""A thread that records what the devices do in `lanes.jsonl`; `rptrain.runs.lanes` defines the records."""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import torch

from rptrain.engine.engine import Engine
from rptrain.engine.failures import gpu_failure
from rptrain.engine.memory.arena import available_bytes
from rptrain.engine.recorder import Activity, LaneState
from rptrain.engine.trace import Span
from rptrain.runs.events import Event, MemoryLow, Slots, SlotTime, TelemetryFailed
from rptrain.runs.lanes import FILE, OLD_FILE, LaneRecord, OptimizerState, Phase, Snapshot, StepNumbers, Work
from rptrain.runs.line_file import LineFile
from rptrain.runs.timeline import StepTimeline, window
from rptrain.runs.usage import progress_of
from rptrain.schedule.plan import Slot
from rptrain.utils.errors import RunDeleted, UserError, describe
from rptrain.utils.liveness import progressed
from rptrain.utils.nvml import Driver, GpuStatus
from rptrain.utils.phases import current

INTERVAL = 0.25  # seconds between two records
TIMELINE = 5.0  # seconds between two records with the timeline of a step
MINUTE = 60.0  # seconds between two Progress events
MAX_BYTES = 8 << 20  # per file: a few hours of one GPU
UNKNOWN = GpuStatus(None, None, None)


class Telemetry:
    """Writes a record every INTERVAL seconds: the phase of the run, memory, and the state of the engine.

    Context manager: owns the thread and the file. It reads state that other threads keep anyway, and blocks none of
    them. If the disk is full or the file was deleted, records are lost, but training continues. After any other error,
    a TelemetryFailed is emitted, and there are no more records. `emit` is called with events from the thread; one of
    them is a Progress every MINUTE. `last`: the numbers of the last completed step, which another thread may set.
    `check` is called before a new file is created, and raises RunDeleted if the run's folder was deleted. `patience`:
    the most seconds that `close` waits for the thread. `done`: steps that were completed before the run was resumed.
    """

    def __init__(
        self,
        folder: Path,
        devices: Sequence[str],
        emit: Callable[[Event], None],
        check: Callable[[], None],
        patience: float = 60.0,
        done: int = 0,
    ) -> None:
        self.phase: Phase = "loading"
        self.last: StepNumbers | None = None
        self._written_step = done
        self._timeline: StepTimeline | None = None
        self._with_timeline = -math.inf  # when the last record with a timeline was written
        self._minute: list[Snapshot] = []  # since the last Progress
        self._path, self._devices, self._emit, self._check = folder / FILE, devices, emit, check
        self._patience = patience
        self._warned = False  # that memory is low
        self._process = psutil.Process()
        self._watched: tuple[Engine, int] | None = None
        self._before: tuple[LaneState, ...] = ()
        self._last = time.perf_counter()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main, name="telemetry", daemon=True)
        try:
            self._file = LineFile(self._path)
        except OSError as error:
            emit(TelemetryFailed(f"{self._path}: {error.strerror}"))
            return
        except UserError as error:  # it names the file
            emit(TelemetryFailed(str(error)))
            return
        self._thread.start()

    @contextmanager
    def watching(self, engine: Engine, done: int) -> Iterator[None]:
        """Record the state of an engine, opened after `done` steps, as long as the context lasts."""
        with self.doing("training"):
            with self._lock:
                self._watched, self._before, self._timeline = (engine, done), (), None
            try:
                yield
            finally:
                with self._lock:
                    self._watched = None

    @contextmanager
    def doing(self, phase: Phase) -> Iterator[None]:
        """Record this phase as long as the context lasts."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def close(self) -> None:
        """End the thread. One that hangs is left behind."""
        if self._stop.is_set():
            return
        self._stop.set()
        until = time.monotonic() + self._patience
        while self._thread.is_alive() and time.monotonic() < until:
            progressed()  # the run waits on purpose
            self._thread.join(INTERVAL)
        if self._thread.is_alive():
            self._emit(TelemetryFailed(f"did not end within {self._patience:g} seconds"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ---- the thread

    def _main(self) -> None:
        try:
            with ExitStack() as stack:
                stack.callback(lambda: self._file.close())  # a later file, too
                self._driver = Driver()
                stack.callback(self._driver.close)
                self._gpus = [self._handle(name) for name in self._devices]
                self._record()
        except BaseException as error:  # noqa: BLE001 (whatever it is, training continues)
            if gpu_failure(error) is not None:  # training ends with the same error
                return
            self._emit(TelemetryFailed(describe(error, with_type=True)))

    def _record(self) -> None:
        while True:
            with suppress(OSError, RunDeleted):
                snapshot = self._snapshot()
                self._write(snapshot)
                self._warn(snapshot)
                self._sum_up(snapshot)
            if self._stop.wait(INTERVAL):
                return

    def _snapshot(self) -> Snapshot:
        with self._lock:
            now = time.perf_counter()
            seconds, self._last = now - self._last, now
            phase = self.phase  # under the lock, because the phase begins before an engine is watched and ends after
            lanes: tuple[LaneRecord, ...] = ()
            optimizer = None
            if self._watched is not None:
                engine, done = self._watched
                activity = engine.activity()
                lanes = tuple(self._lanes(activity, done))
                optimizer = OptimizerState(activity.optimizer, activity.queue, activity.update_seconds)
                self._before = activity.lanes
            timeline = self._due_timeline(now)
        process, free = self._process.memory_info().rss, available_bytes()
        last = self.last
        if last is not None and last.step == self._written_step:
            last = None
        elif last is not None:
            self._written_step = last.step
        long = current()
        work = None if long is None else Work(long.sentence(), long.fraction, long.repeats)
        return Snapshot(time.time(), round(seconds, 4), phase, process, free, lanes, optimizer, last, timeline, work)

    def _due_timeline(self, now: float) -> StepTimeline | None:
        """The timeline of the last step that nothing interrupted, if it is time to record one."""
        since = now - self._with_timeline
        if since < TIMELINE:
            return None
        found = None
        last = self.last
        if self._watched is not None and last is not None and last.seconds is not None:
            engine, done = self._watched
            found = window(engine.computations(), last.step - 1 - done, last.step)
        if found is None and (self._timeline is None or since < 2 * TIMELINE):
            return None
        self._timeline, self._with_timeline = found or self._timeline, now
        return self._timeline

    def _lanes(self, activity: Activity, done: int) -> Iterator[LaneRecord]:
        before = self._before or (None,) * len(activity.lanes)
        for device, gpu, last, state in zip(self._devices, self._gpus, before, activity.lanes, strict=False):
            status = UNKNOWN if gpu is None else self._driver.status(gpu)
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
                power=status.power,
            )

    def _write(self, snapshot: Snapshot) -> None:
        if self._file.size > MAX_BYTES:
            self._rotate()
        self._file.append(snapshot.to_line().encode())

    def _rotate(self) -> None:
        """Rename the full file and start a new one. If the folder cannot be written, empty the file instead."""
        self._check()
        if self._path.exists():  # else it was renamed before, but no new one could be created
            try:
                self._path.replace(self._path.with_name(OLD_FILE))
            except OSError:
                self._file.clear()
                return
        full, self._file = self._file, LineFile(self._path)
        full.close()

    def _warn(self, snapshot: Snapshot) -> None:
        if not self._warned and snapshot.is_low:
            self._warned = True
            self._emit(MemoryLow(snapshot.process, snapshot.free))

    def _sum_up(self, snapshot: Snapshot) -> None:
        self._minute.append(snapshot)
        if sum(shot.seconds for shot in self._minute) >= MINUTE:
            minute, self._minute = self._minute, []
            self._emit(progress_of(minute, self._written_step))

    def _handle(self, device: str) -> Any | None:
        if not device.startswith("cuda"):
            return None
        return self._driver.gpu(str(torch.cuda.get_device_properties(device).uuid))


def slots(step: int, spans: list[Span]) -> Slots:
    """The record of a traced step: for each slot, from the start of its first computation to the end of its last."""
    times: dict[Slot, list[Span]] = {}
    for span in spans:
        times.setdefault(span.slot, []).append(span)
    return Slots(
        step,
        tuple(
            SlotTime(
                slot.device,
                slot.index,
                slot.stage.kind,
                slot.stage.start,
                slot.stage.stop - 1,
                slot.round,
                part[0].start(),
                part[-1].end(),
            )
            for slot, part in sorted(times.items(), key=lambda item: item[0].index)
        ),
    )
