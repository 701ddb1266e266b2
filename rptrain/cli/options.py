"""Options and arguments of several commands."""

import os
from pathlib import Path
from typing import Annotated

import typer

from rptrain.cli.complete import config_files, no_completions

ConfigFile = Annotated[Path, typer.Option(help="The run's TOML file.", autocompletion=config_files)]
Force = Annotated[
    bool,
    typer.Option("--force", help="Replace a file that this command did not write. Inputs and run files are refused."),
]
JsonArray = Annotated[bool, typer.Option("--json", help="Print a JSON array.")]
PlacementOption = Annotated[
    str, typer.Option(metavar="auto|gpu|streamed|cpu", help="Where it runs; auto: the fastest with enough memory.")
]
RunsFolder = Annotated[
    Path,
    typer.Option("--runs", metavar="DIR", file_okay=False, help="The folder of runs.", autocompletion=no_completions),
]


def quiet_connections() -> None:
    """Set before torch is imported: for each connection that is lost or not there yet it would print C++ frames beside
    the message that says so.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
