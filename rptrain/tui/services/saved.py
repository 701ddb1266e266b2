"""What a run has saved: checkpoints to export or to talk to, and its exported model."""

from pathlib import Path

from rptrain.runs.run_dir import RunDir
from rptrain.utils.errors import UserError
from rptrain.utils.files import read_small_text


def saved_checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints, the newest first; none if they cannot be read."""
    try:
        return RunDir(run).checkpoints()[::-1]
    except (OSError, UserError):
        return []


def answering(run: Path) -> list[Path]:
    """What can answer in a conversation: the exported model, and the checkpoints, the newest first."""
    try:
        model = RunDir(run).model_path
    except UserError:  # a link that leads out of the run
        return saved_checkpoints(run)
    exported = any((model / name).is_file() for name in ("config.json", "adapter_config.json"))
    return [*([model] if exported else []), *saved_checkpoints(run)]


def has_adapters(run: Path) -> bool:
    """Whether a run trains adapters."""
    try:
        return "[lora]" in read_small_text(RunDir(run).config_path)
    except (OSError, UserError, UnicodeDecodeError):
        return False
