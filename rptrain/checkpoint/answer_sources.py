"""The models of a run that can answer: its exported model and its checkpoints. Imports no torch."""

from pathlib import Path

from rptrain.checkpoint.atomic_dir import complete_checkpoints
from rptrain.checkpoint.export_progress import ADAPTER_CONFIG
from rptrain.checkpoint.metadata import CHECKPOINTS
from rptrain.utils.paths import leads_inside

EXPORTED = "model"  # the directory of a run's exported model


def answer_sources(run: Path) -> list[Path]:
    """The exported model, and then the complete checkpoints, the newest first. A run answers from the first of them.

    Links that lead out of the run are not among them. OSError if the run cannot be read.
    """
    model = run / EXPORTED
    exported = any((model / name).is_file() for name in ("config.json", ADAPTER_CONFIG))
    saved = complete_checkpoints(run / CHECKPOINTS)[::-1]
    return [path for path in ([model] if exported else []) + saved if leads_inside(run, path)]
