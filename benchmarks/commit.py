"""The commit of this checkout, for the files that hold results."""

import subprocess
from pathlib import Path


def commit() -> str:
    """The hash of HEAD; "unknown" outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--verify", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
