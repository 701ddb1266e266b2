"""`rptrain data`: commands for data files."""

import json
from pathlib import Path
from typing import Annotated

import typer

from rptrain.cli.complete import config_files, no_completions
from rptrain.cli.exits import exit_codes
from rptrain.utils.paths import expanded
from rptrain.utils.phase_display import PhaseDisplay
from rptrain.utils.signals import PROCESS
from rptrain.utils.text import counted, printable

data = typer.Typer(help="Work on data files.", rich_markup_mode=None)


@data.callback()
def _data() -> None:
    """Keeps `clean` a command of its own although it is the only one."""


@data.command()
def clean(
    source: Annotated[
        Path, typer.Argument(metavar="FILE", help="The data file.", autocompletion=no_completions, show_default=False)
    ],
    to: Annotated[
        Path,
        typer.Option(metavar="FILE", help="The file to write, of the same type.", autocompletion=no_completions),
    ],
    format: Annotated[
        str | None, typer.Option(help="The format of a row; by default the config's, or else detected.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="A run's TOML file: also leave out rows that its chat template or tokenizer refuses.",
            autocompletion=config_files,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files; never the data file itself.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Copy the good rows of a data file to another file.

    Rows are copied as they are. The bad ones go to a file beside it, such as good.bad.jsonl for good.jsonl, with their
    lines and reasons. Without --config only the format of the rows is checked. Exits with status 2, and writes nothing,
    if no row is good.
    """
    with exit_codes():
        from rptrain.runs.folder.run_dir import resolve_config

        settings = resolve_config(config).config if config else None
        with PhaseDisplay(shown=not as_json):
            with PROCESS.importing():
                from rptrain.data.clean import clean

            cleaned = clean(expanded(source), expanded(to), format, settings, force=force)
        if as_json:
            print(json.dumps(cleaned.to_dict(), indent=2))
            return
        print(printable(f"{cleaned.path}: {cleaned.good:,} of {counted(cleaned.rows, 'row')}"))
        if cleaned.bad_path:
            print(printable(f"{cleaned.bad_path}: {counted(cleaned.bad, 'bad row')} with the reasons"))
