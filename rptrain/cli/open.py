"""`rptrain FILE.toml`: the interface on a config file; without a terminal the file is trained (see cli/__init__)."""

from pathlib import Path
from typing import Annotated

import typer

from rptrain.cli.exits import exit_codes
from rptrain.cli.options import existing


def open_file(config: Annotated[Path, typer.Argument(metavar="FILE")]) -> None:
    """Edit a config file in the terminal interface, and start it."""
    with exit_codes():
        from rptrain.tui.start import open_interface

        open_interface(config=existing(config))
