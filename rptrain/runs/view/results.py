"""What a run has produced so far: checkpoints, scores and samples."""

from collections.abc import Mapping
from typing import Any

from rptrain.runs.records.events import VALIDATION_LOSS
from rptrain.runs.view.values import Checkpoint, Score, lowest
from rptrain.utils.units import format_loss


class Results:
    """`checkpoints`, `scores` and `samples` are oldest first; a sample has `step`, `prompt` and `text`. `best` is the
    score with the lowest validation loss.
    """

    def __init__(self) -> None:
        self.checkpoints: list[Checkpoint] = []
        self.scores: list[Score] = []
        self.best: Score | None = None
        self._best_before: Score | None = None  # before the newest evaluation
        self.samples: list[Mapping[str, Any]] = []

    def on_evaluation(self, record: Mapping[str, Any]) -> None:
        score = Score(record["time"], record["step"], record["name"], record["score"], record.get("tasks", {}))
        self.scores.append(score)
        self._best_before, self.best = self.best, lowest((*filter(None, [self.best]), score))

    def on_sample(self, record: Mapping[str, Any]) -> None:
        self.samples.append({name: record[name] for name in ("step", "prompt", "text")})

    def on_checkpoint_saved(self, record: Mapping[str, Any]) -> None:
        self.checkpoints.append(Checkpoint(record["time"], record["step"], record["path"]))

    def on_resumed(self, record: Mapping[str, Any]) -> None:
        """Removes what came after the step from which the run was resumed."""
        step = record["step"]
        self.checkpoints = [checkpoint for checkpoint in self.checkpoints if checkpoint.step <= step]
        self.scores = [score for score in self.scores if score.step <= step]
        self.best = lowest(self.scores)
        self.samples = [sample for sample in self.samples if sample["step"] <= step]

    @property
    def saved_step(self) -> int:
        """The step of the newest checkpoint; 0 without one."""
        return self.checkpoints[-1].step if self.checkpoints else 0

    @property
    def validation_loss(self) -> float | None:
        """The newest one that is finite; None if there is none."""
        losses = (score.score for score in reversed(self.scores) if score.name == VALIDATION_LOSS)
        return next((loss for loss in losses if loss is not None), None)

    @property
    def is_improved(self) -> bool:
        """Whether the newest validation loss is lower than all before it, as far as the shown digits tell."""
        if self.best is None or self.best is not self.scores[-1]:
            return False
        return self._best_before is None or format_loss(self._best_before.score) != format_loss(self.best.score)
