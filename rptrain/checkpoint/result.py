"""The result of a run: which of its states commands use. Imports no torch.

It is the state with the lowest validation loss if save.load_best_model_at_end is set and a loss is known, else the
newest complete state.
"""

import tomllib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rptrain.checkpoint.atomic_dir import MANIFEST, Damaged
from rptrain.checkpoint.export_progress import is_export
from rptrain.checkpoint.metadata import CHECKPOINTS, RUN_CONFIG
from rptrain.checkpoint.run_states import EXPORTED, State, loss_of, states
from rptrain.utils.errors import UserError
from rptrain.utils.files import read_small_text
from rptrain.utils.paths import inside, leads_inside
from rptrain.utils.units import format_loss

NAMED = "name a checkpoint instead of the run"


@dataclass(frozen=True)
class Result:
    """The result of a run. `other`: an exported model that does not hold it."""

    run: Path
    state: State
    is_best: bool  # chosen by validation loss
    other: State | None

    def sentence(self) -> str:
        """Which state it is, why, and which other state the exported model has."""
        if self.state.step is None:  # the only state
            return self.state.named
        why = f"the lowest validation loss, {format_loss(self.state.loss)}" if self.is_best else "the newest state"
        said = f"{self.state.named}, {why}"
        return f"{said}; {EXPORTED}/ holds {self.other.named}, until the run finishes again" if self.other else said


def find_result(source: Path) -> Result | None:
    """The result of a run; None for a folder without a complete state. `source`: the folder of a run or of checkpoints.

    UserError if the result cannot be determined: the run's config or the metadata of a checkpoint are damaged. OSError
    if the run cannot be read.
    """
    run = _run_of(source)
    if not (found := states(run)):
        return None
    measured = _measured(found) if _wants_best(run) else []
    chosen = min(measured, key=lambda state: (state.loss, state.step)) if measured else found[0]
    other = next((state for state in found if state.model and state.step != chosen.step), None)
    return Result(run, chosen, bool(measured), other)


def answer_sources(run: Path) -> dict[Path, str]:
    """The folders whose models can answer: that of the run's result, then the exported model, then the checkpoints, the
    newest first. Each with a mark; that of a checkpoint that is not the result is empty.

    Links that lead out of the run are not among them. OSError if the run cannot be read.
    """
    found, marks = states(run), dict[Path, str]()
    with suppress(UserError):  # the run itself then does not answer, and says why
        if result := find_result(run):
            marks[result.state.answering] = f"result, {result.state.named}"
    marks |= {state.model: state.named for state in found if state.model and state.model not in marks}
    marks |= {state.checkpoint: "" for state in found if state.checkpoint and state.checkpoint not in marks}
    return {path: mark for path, mark in marks.items() if leads_inside(run, path)}


def answering(source: Path) -> tuple[Path, str]:
    """The folder whose model answers for a run, and a sentence about the result.

    UserError if the run has no complete state, or if the folder is reached by a link that leads out of the run.
    """
    if (result := find_result(source)) is None:
        raise UserError(f"{source} is neither a model, a checkpoint nor a run with a complete checkpoint")
    path = inside(result.run, result.state.answering.relative_to(result.run))
    return path, result.sentence()


def checkpoint_of(source: Path) -> tuple[Path, str]:
    """The checkpoint with the result of a run, and a sentence about the result; or the named checkpoint itself, and "".

    UserError if there is none, if only the exported model holds the result, or if the checkpoint is reached by a link
    that leads out of the run.
    """
    if is_export(source):
        raise UserError(f"{source} is an export already: name its run, or a checkpoint")
    if (source / MANIFEST).is_file():
        return source, ""
    if not source.is_dir():
        raise UserError(f"{source} is not a directory")
    if (result := find_result(source)) is None:
        raise UserError(f"{source} is neither a checkpoint nor a run with a complete checkpoint")
    if result.state.checkpoint is None:
        raise UserError(
            f"the result of {result.run} ({result.state.named}) has no checkpoint to export, but "
            f"{result.state.model} is an export of it: use that, or {NAMED}"
        )
    path = inside(result.run, result.state.checkpoint.relative_to(result.run))
    return path, result.sentence()


def _run_of(source: Path) -> Path:
    """The run whose folder of checkpoints this is; any other folder itself."""
    place = source.absolute()
    return place.parent if place.name == CHECKPOINTS and (place.parent / RUN_CONFIG).is_file() else source


def _measured(found: Sequence[State]) -> list[State]:
    """The states with a validation loss. Damaged if that of a checkpoint cannot be read."""
    measured = []
    for state in found:
        if state.checkpoint is not None:
            try:
                loss = loss_of(state.checkpoint)
            except Damaged as error:
                if not (state.checkpoint / MANIFEST).is_file():  # the run has just deleted it
                    continue
                raise Damaged(
                    f"the result of the run is unknown: {error}. Move {state.checkpoint} away, or {NAMED}"
                ) from error
            state = state if loss is None else replace(state, loss=loss)
        if state.loss is not None and state.step is not None:
            measured.append(state)
    return measured


def _wants_best(run: Path) -> bool:
    """Whether the config of a run has save.load_best_model_at_end."""
    file = inside(run, RUN_CONFIG)
    if not file.is_file():
        return False
    try:
        save = tomllib.loads(read_small_text(file)).get("save")
    except (UserError, ValueError) as error:  # a TOML error and text that is not UTF-8 are ValueErrors
        raise UserError(f"the result of the run is unknown: {file}: {error}. Correct it, or {NAMED}") from error
    return isinstance(save, dict) and save.get("load_best_model_at_end") is True
