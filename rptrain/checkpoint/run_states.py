"""The complete states of a run: its checkpoints and its exported model, with their steps and validation losses.

Imports no torch.
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from rptrain.checkpoint.atomic_dir import (
    CHECKPOINT,
    MANIFEST,
    STATE,
    Damaged,
    check_hash,
    complete_checkpoints,
    manifest_alone,
    read_manifest,
)
from rptrain.checkpoint.export_progress import ADAPTER_CONFIG
from rptrain.checkpoint.metadata import CHECKPOINTS, EVENTS
from rptrain.utils.errors import UserError
from rptrain.utils.files import open_regular, read_small
from rptrain.utils.paths import leads_inside

EXPORTED = "model"  # the folder of a run's exported model
STEP, LOSS = "step", "validation_loss"  # in the manifest of an export
# Records of a run's events (runs/records/events.py) that tell which state a model has that an earlier version exported.
_TELLING = re.compile(rb'\{"schema":1,"event":"(run_started|best_loaded|finished)",')
_LONGEST = 8192  # bytes of such a record


@dataclass(frozen=True)
class State:
    """A complete state of a run, in a checkpoint, in the exported model, or in both."""

    step: int | None  # None: an exported model whose step is unknown
    checkpoint: Path | None = None
    model: Path | None = None
    loss: float | None = None  # the validation loss of the exported model, if it is recorded

    @property
    def named(self) -> str:
        """The step as text."""
        return "an unknown step" if self.step is None else f"step {self.step}"

    @property
    def answering(self) -> Path:
        """The folder whose weights answer: they are fewer bytes in the exported model than in a checkpoint."""
        found = self.model or self.checkpoint
        assert found is not None
        return found


def facts(step: int | None, loss: float | None) -> dict[str, Any]:
    """What the manifest of an export records about the state that was exported; nothing that is unknown."""
    known = {STEP: step, LOSS: _finite(loss)}
    return {name: value for name, value in known.items() if value is not None}


def recorded(directory: Path) -> tuple[int | None, float | None]:
    """The step and the validation loss in the manifest of an export; None: not recorded, or not an export."""
    try:
        manifest = json.loads(read_small(directory / MANIFEST))
    except (OSError, ValueError, RecursionError):  # other programs' folders have none
        return None, None
    return _numbers(manifest, STEP, LOSS) if isinstance(manifest, dict) else (None, None)


def states(run: Path) -> list[State]:
    """The complete states in a run's folder, or in a folder of checkpoints: the newest first, and one of an unknown
    step last. OSError if the folder cannot be read.
    """
    saved = complete_checkpoints(run) or complete_checkpoints(run / CHECKPOINTS)
    found: dict[int | None, State] = {step_of(path): State(step_of(path), path) for path in saved}
    model = run / EXPORTED
    if any((model / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        step, loss = recorded(model) if leads_inside(run, model) else (None, None)
        if step is None:
            step, loss = _recorded_by_events(run)
        same = found.get(step, State(step))
        if same.checkpoint is None or not _is_newer(same.checkpoint, model):  # else that step was trained once more
            found[step] = replace(same, model=model, loss=loss)
    return sorted(found.values(), key=lambda state: -1 if state.step is None else state.step, reverse=True)


def _is_newer(checkpoint: Path, model: Path) -> bool:
    """Whether a checkpoint was completed after an exported model, which is exported from one that is complete."""
    try:
        return (checkpoint / MANIFEST).stat().st_mtime_ns > (model / MANIFEST).stat().st_mtime_ns
    except OSError:  # deleted meanwhile, or a model without a manifest
        return False


def step_of(checkpoint: Path) -> int:
    """The step in the name of a complete checkpoint."""
    match = CHECKPOINT.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[1] or match[2])


def loss_of(checkpoint: Path) -> float | None:
    """The validation loss after a checkpoint's step; None if it was not evaluated or is not finite.

    Damaged if its metadata are not as they were saved. Other files are not looked at.
    """
    files = manifest_alone(checkpoint)["files"]
    if not (checkpoint / STATE).is_file():
        raise Damaged(f"{checkpoint} is damaged: {STATE} is missing")
    try:
        check_hash(checkpoint / STATE, files[STATE])
        loss = json.loads(read_small(checkpoint / STATE))["meta"].get("validation", {}).get("loss")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise Damaged(f"{checkpoint / STATE} is damaged: its validation loss cannot be read") from error
    return _finite(loss)


def checkpoints_by_loss(checkpoints_dir: Path) -> list[tuple[float, Path]]:
    """The checkpoints that have a validation loss, with it: lowest loss first; of equal losses, earliest step first.

    Damaged checkpoints, and those that lack files, are left out.
    """
    found = []
    for path in complete_checkpoints(checkpoints_dir):
        with suppress(Damaged):
            read_manifest(path)
            if (loss := loss_of(path)) is not None:
                found.append((loss, path))
    return sorted(found, key=lambda entry: entry[0])


def _recorded_by_events(run: Path) -> tuple[int | None, float | None]:
    """The step and the validation loss of a model that a version before they were recorded exported, by the run's
    events: those of the best checkpoint, if one was loaded, else the last step.
    """
    exported: tuple[int | None, float | None] = (None, None)
    best: tuple[int | None, float | None] = (None, None)
    path = run / EVENTS
    if not (path.is_file() and leads_inside(run, path)):
        return exported
    with open_regular(path) as file:
        while line := file.readline(_LONGEST):
            if not (telling := _TELLING.match(line)):
                continue
            try:
                record = json.loads(line)
            except ValueError:  # cut off
                continue
            if telling[1] == b"finished":
                exported = best if best[0] is not None else _numbers(record, "step", "")
            else:
                best = _numbers(record, "step", "loss") if telling[1] == b"best_loaded" else (None, None)
    return exported


def _numbers(record: Mapping[str, Any], step: str, loss: str) -> tuple[int | None, float | None]:
    """The values of these keys, if they are a step and a finite number."""
    whole = record.get(step)
    found = whole if isinstance(whole, int) and not isinstance(whole, bool) and whole >= 0 else None
    return found, _finite(record.get(loss))


def _finite(value: object) -> float | None:
    """A value of JSON as a number; None if it is another value, or not a finite float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # of an integer
        return None
    return number if isfinite(number) else None
