"""The models that answer in a chat: results and checkpoints of runs."""

from pathlib import Path

from rptrain.checkpoint.metadata import RUN_CONFIG
from rptrain.checkpoint.result import answer_sources


def readable_sources(run: Path) -> list[Path]:
    """The `answer_sources` of a run; none if it cannot be read."""
    return list(_marked_sources(run))


def run_of(source: Path) -> Path:
    """The run of an exported model or of a checkpoint; any other path as it is."""
    return next((path for path in (source, *source.parents[:2]) if (path / RUN_CONFIG).is_file()), source)


def models_to_ask(run: Path, folder: Path) -> dict[Path, str]:
    """The `answer_sources` of a run, with their marks, and then those of the other runs in a folder, sorted by name."""
    here = run.resolve()
    others = sorted(file.parent for file in folder.glob(f"*/{RUN_CONFIG}") if file.parent.resolve() != here)
    return {source: mark for each in (run, *others) for source, mark in _marked_sources(each).items()}


def _marked_sources(run: Path) -> dict[Path, str]:
    try:
        return answer_sources(run)
    except OSError:
        return {}
