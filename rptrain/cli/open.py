"""`rptrain FILE.toml`: the interface on a config file; without a terminal the file is trained (see argv.py)."""

from pathlib import Path
from typing import Annotated

import typer

from rptrain.cli.exits import exit_codes
from rptrain.utils.errors import UserError
from rptrain.utils.paths import expanded


def open_file(config: Annotated[Path, typer.Argument(metavar="FILE")]) -> None:
    """Edit a config file in the terminal interface, and start it."""
    with exit_codes():
        config = expanded(config)
        if not config.exists():
            raise UserError(f"{config} does not exist: `rptrain init` writes a config to start from")
        from rptrain.tui.start import open_interface

        open_interface(config=config)
