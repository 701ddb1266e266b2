"""Checks of the host: software, cores, memory, page-locking, and the disk of the runs."""

import os
import platform
import shutil
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

import rptrain
from rptrain.checkpoint.trial import FULL, REMEDY, remedy, try_saving
from rptrain.doctor.checks import Check, check
from rptrain.doctor.failures import attempt
from rptrain.engine.memory.arena import Arena
from rptrain.engine.optim import adam
from rptrain.utils import control_groups, native, numa
from rptrain.utils.errors import describe
from rptrain.utils.host_memory import available_bytes
from rptrain.utils.locks import lock
from rptrain.utils.page_locks import COST, WSL_LIMIT, is_wsl, locking_advice, memlock_limit
from rptrain.utils.parallel import cores
from rptrain.utils.units import format_bytes

EXTENSIONS = (
    "rptrain.engine.optim._adam",
    "rptrain.engine.optim._embedding_grads",
    "rptrain.kernels._quant",
    "rptrain.kernels._fp8",
    "rptrain.schedule._estimate",
    "rptrain.utils._watchdog",
    "rptrain.utils._signals",
)
WRITTEN = 32 << 20  # bytes of the file that measures the disk's speed
SLOW_DISK = 100e6  # bytes per second; a checkpoint of an 8B model would take a quarter of an hour
SCARCE = 20 << 30  # free bytes on the disk, less than a checkpoint of a 1.7B model
LOCKED = 64 << 20  # bytes to page-lock as a test


def examine(runs: Path, *, gpus: bool) -> list[Check]:
    folder = next(path for path in (runs.absolute(), *runs.absolute().parents) if path.is_dir())
    return [
        attempt("software", _versions, gpus),
        attempt("C compiler", _compiler, gpus),
        attempt("optimizer", _native),
        attempt("CPU", _cpu),
        attempt("host memory", _memory),
        attempt("page-locking", _locking, gpus),
        attempt("disk", _disk, folder),
        attempt("runs folder", _saving, folder),
    ]


def _versions(gpus: bool) -> Check:
    named = {"rptrain": rptrain.__version__, "python": platform.python_version(), "torch": _version("torch")}
    named["triton"] = _version("triton")
    text = ", ".join(f"{name} {number or 'not installed'}" for name, number in named.items())
    advice = None
    if gpus and named["triton"] is None:
        advice = "install triton: without it the slower kernels of torch run on the GPU"
    return check("software", text, advice, **named)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _compiler(gpus: bool) -> Check:
    path = next(filter(None, map(shutil.which, filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")))), None)
    if path is not None:
        return check("C compiler", path, path=path)
    advice = "install gcc: triton compiles the kernels' launchers with it" if gpus else None
    return check("C compiler", "none", advice, path=None)


def _native() -> Check:
    missing = [name for name in EXTENSIONS if native.library(name) is None]
    if missing:
        advice = "install a C compiler and then rptrain again: torch does the same arithmetic more slowly"
        return check("optimizer", f"not compiled: {', '.join(missing)}", advice, instructions=None)
    instructions = adam.instruction_set()
    return check("optimizer", f"compiled, runs with {instructions}", instructions=instructions)


def _cpu() -> Check:
    usable = cores()
    name = _cpu_name()
    text = f"{usable} cores, {name}" if usable == os.cpu_count() else f"{usable} of {os.cpu_count()} cores, {name}"
    nodes = max(1, len(numa.topology().nodes))
    return check("CPU", text if nodes == 1 else f"{text}, {nodes} NUMA nodes", cores=usable, name=name, nodes=nodes)


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory() -> Check:
    free, there, total = available_bytes(), psutil.virtual_memory().available, psutil.virtual_memory().total
    left = min(control_groups.memory_left(), default=there)
    figures = {"free": free, "total": total, "group_left": left if left < there else None}
    text = f"{format_bytes(free)} free of {format_bytes(total)}"
    if left < there:
        text += f": the control group leaves that, the machine {format_bytes(there)}"
    return check("host memory", text, **figures)


def _locking(gpus: bool) -> Check:
    """Tries to lock memory, because the limit does not apply to drivers that lock memory themselves."""
    limit = memlock_limit()
    text = "no limit" if limit is None else f"the limit is {format_bytes(limit)}"
    if not gpus:
        return check("page-locking", f"{text}; only GPUs need it", limit=limit, locks=None)
    with Arena(LOCKED) as arena:
        arena.take(LOCKED, torch.uint8)
        arena.lock()
        locks = not arena.locking.missing
    if not locks:
        advice = f"{COST}. {locking_advice()}"
        return check("page-locking", f"the driver cannot lock memory; {text}", advice, limit=limit, locks=False)
    if is_wsl():
        text += f"; {WSL_LIMIT}"
    return check("page-locking", f"the driver locks memory; {text}", limit=limit, locks=True)


def _disk(folder: Path) -> Check:
    """Writes, syncs and deletes a file in the folder of runs, or in its nearest existing parent."""
    subject, usage = "disk", shutil.disk_usage(folder)
    free = usage.free if usage.total else None
    data = os.urandom(1 << 20)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            began = time.perf_counter()
            for _ in range(WRITTEN // len(data)):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
            speed = WRITTEN / (time.perf_counter() - began)
    except OSError as error:
        remedy_here = "free disk space" if error.errno in FULL else "make it writable"
        advice = f"{remedy_here}, or set save.output_dir to another folder"
        return check(subject, f"nothing can be written to {folder}: {error.strerror}", advice, free=free, speed=None)
    amount = "an unknown amount is" if free is None else format_bytes(free)
    text = f"{amount} free in {folder}, {speed / 1e6:,.0f} MB/s written and synced"
    advice = None
    if free is not None and free < SCARCE:
        advice = "make room, or set save.output_dir to another disk: rptrain plan says what a run needs"
    elif speed < SLOW_DISK:
        advice = "set save.output_dir to a faster disk: checkpoints take long to write"
    return check(subject, text, advice, free=free, speed=speed)


def _saving(folder: Path) -> Check:
    """Does what saves do in the folder of runs, or in its nearest existing parent, and leaves nothing there."""
    subject = "runs folder"
    try:
        synced = try_saving(folder)
        with tempfile.TemporaryFile(dir=folder) as file:
            no_locks = lock(file.fileno())
    except OSError as error:
        text = f"runs cannot save in {folder}: {describe(error)}"
        return check(subject, text, remedy(error), saves=False, syncs_folders=None, locks=None)
    figures = {"saves": True, "syncs_folders": synced, "locks": no_locks is None}
    text = "files and folders are written, replaced and renamed"
    if not synced:
        text += "; folders are not synced: a loss of power may undo the last save"
    if no_locks is None:
        return check(subject, text, None, **figures)
    advice = f"start only one process that resumes a run, or {REMEDY}"
    return check(subject, f"{text}; the file system has no locks ({no_locks})", advice, **figures)
