"""Commands to a trainer: files in the run's `control/` folder, which may also be made by hand."""

from pathlib import Path

from rptrain.errors import UserError

FOLDER = "control"
PAUSE, SAVE, STOP = "PAUSE", "SAVE", "STOP"


def ask(run: Path, command: str) -> None:
    """Puts the command there. UserError where that cannot be."""
    try:
        (run / FOLDER).mkdir(exist_ok=True)
        (run / FOLDER / command).touch()
    except OSError as error:
        raise UserError(f"the trainer cannot be told: {error}") from None


def withdraw(run: Path, command: str) -> None:
    """Takes a command back; nothing where it was not given."""
    (run / FOLDER / command).unlink(missing_ok=True)


def is_asked(run: Path, command: str) -> bool:
    return (run / FOLDER / command).exists()
