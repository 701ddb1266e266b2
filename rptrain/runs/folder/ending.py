"""How a run ended early: what happened as far as it is known, the last save, and what is lost."""

import signal
from dataclasses import dataclass
from pathlib import Path

from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.view.run_view import RunView
from rptrain.utils.errors import UserError
from rptrain.utils.units import format_bytes

EARLY = ("failed", "dead")
VMSTAT = Path("/proc/vmstat")  # counters of the kernel


@dataclass(frozen=True)
class Ending:
    cause: str  # a sentence or more
    seen: float | None  # Unix time of the last record
    saved: int  # the step of the last complete checkpoint; 0 without one
    lost: int  # completed steps after it
    gone: bool = False  # the run's folder does not exist any more, and with it its checkpoints


def ending_of(view: RunView, code: int | None = None) -> Ending | None:
    """How the run of a view failed or died; None for any other state. Looks for checkpoints in the run's folder.

    `code`: how its process ended, as `subprocess.Popen.returncode`; None if nobody knows.
    """
    if view.state not in EARLY:
        return None
    if not view.path.exists():
        cause = f"The folder {view.path} does not exist any more: it was deleted or moved while the run was active."
        return Ending(cause, view.last_seen, 0, view.step, gone=True)
    saved = _saved_step(view.path)
    cause = view.failure or _death(view, code)
    return Ending(cause, view.last_seen, saved, max(view.step - saved, 0))


def start_failure(code: int, kills: int) -> str:
    """What ended a trainer before its first record, if it gave no reason. `code` as in `ending_of`; `kills`: the
    `memory_kills` when it was started.
    """
    if code >= 0:
        return f"exit status {code}"
    if code != -signal.SIGKILL:
        return f"the trainer was ended by {_signal_name(-code)} while starting"
    killed = "the trainer was killed (SIGKILL) while starting"
    ran_out = memory_kills() > kills
    return f"{killed}, for example by the kernel because host memory ran out" if ran_out else killed


def memory_kills() -> int:
    """How many processes of this machine the kernel has killed because memory ran out; 0 if it does not count them."""
    try:
        counts = dict(line.split() for line in VMSTAT.read_text().splitlines())
    except OSError:
        return 0
    return int(counts.get("oom_kill", 0))


def _saved_step(path: Path) -> int:
    try:
        return RunDir(path).saved_step
    except (UserError, OSError):  # links that lead out of the folder, or a folder that cannot be read
        return 0


def _death(view: RunView, code: int | None) -> str:
    """What ended a process that wrote no last record."""
    process = view.process
    if code is not None and code >= 0:
        return f"The trainer exited with status {code} and wrote no last record."
    if code is not None and code != -signal.SIGKILL:
        return f"The trainer was ended by {_signal_name(-code)}."
    if process is not None and not process.here:
        return f"The trainer on {process.host} has not written any records for a while."
    if process is not None and process.rebooted:
        return "The machine was restarted while the run was active."
    what = "The trainer was ended without a last record" if code is None else "The trainer was killed (SIGKILL)"
    cause = f"{what}: perhaps by kill -9, or by the system because memory ran out."
    last = view.recent[-1] if view.recent else None
    if last is None:
        return cause
    if last.is_low:
        return f"{what}. Only {format_bytes(last.free)} of host memory was left: the system probably killed it."
    return f"{cause} Shortly before, {format_bytes(last.free)} of host memory was left."


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
