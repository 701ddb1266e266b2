"""A strict check of checkpoints that a test has written."""

from pathlib import Path
from typing import Any

from rptrain.checkpoint.atomic_dir import check_hash
from rptrain.checkpoint.metadata import read_facts


def verify_checkpoint(directory: Path) -> dict[str, Any]:
    """Hashes every file, whatever was hashed before, and returns the content of trainer_state.json. UserError names
    what is damaged.
    """
    state, files = read_facts(directory)
    for name, entry in files.items():
        check_hash(directory / name, entry)
    return state
