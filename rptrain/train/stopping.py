"""How a signal ends a step that takes long: it is finished if there is time, and dropped otherwise."""

from collections.abc import Callable
from time import monotonic

from rptrain.engine.progress import StepProgress
from rptrain.utils.signals import PROCESS
from rptrain.utils.text import counted
from rptrain.utils.units import format_duration

TOLD = 2.0  # seconds: a step that ends sooner is not reported


class Stopping:
    """Decides after a signal whether a step is dropped: if its state would be saved later than `timeout` seconds after
    the signal (`save.stop_timeout`). If dropping it leaves nothing new to save, it has the whole time.

    `note` is called with what happens to each step. `saved` returns the step of the last checkpoint, 0 without one.
    `alone`: no other process trains the run; others would wait for the step forever, so that it is never dropped.
    """

    def __init__(self, timeout: float, note: Callable[[str], object], saved: Callable[[], int], *, alone: bool) -> None:
        self._timeout, self._note, self._saved, self._alone = timeout, note, saved, alone
        self._told = 0  # the step that was reported last

    def drops(self, step: int, progress: StepProgress, save_seconds: float) -> bool:
        """Whether to drop this step, which has not ended. `save_seconds`: how long the last save took, 0 before."""
        if not PROCESS.received:
            return False
        left, saved = progress.left, self._saved()
        time = max(PROCESS.first + self._timeout - save_seconds - monotonic(), 0.0)
        late = left is not None and left > time
        if self._alone and (time == 0 or (late and step - 1 > saved)):
            return True
        if self._told < step and (left is None or left >= TOLD):
            self._told = step
            ends = "has just begun" if left is None else f"ends in about {format_duration(left)}"
            limit = f", or dropped after {format_duration(time)}" if self._alone and (left is None or late) else ""
            keeps = f"keeps checkpoint-{saved}" if saved else "saves nothing"
            what = f"step {step} {ends} ({_done(progress)}): it is saved at its end{limit}"
            self._note(f"{what}; another signal stops at once and {keeps}")
        return False

    def dropped(self, step: int, progress: StepProgress) -> None:
        """Report that this step was dropped."""
        left = "" if progress.left is None else f", about {format_duration(progress.left)} more to go"
        before = f"the state after step {step - 1} is saved" if step > 1 else "no step is complete"
        self._note(f"step {step} is dropped ({_done(progress)}{left}): {before}")


def _done(progress: StepProgress) -> str:
    return f"{progress.done:,} of {counted(progress.micro_batches, 'micro-batch')} done"
