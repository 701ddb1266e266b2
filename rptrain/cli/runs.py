"""`rptrain runs` and `rptrain attach`."""

import json
from typing import Annotated

import typer

from rptrain.cli.complete import RUNS, run_names
from rptrain.cli.exits import exit_codes
from rptrain.cli.options import JsonArray, RunsFolder


def runs(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="Names or paths of runs to compare; by default all.",
            autocompletion=run_names,
        ),
    ] = None,
    folder: RunsFolder = RUNS,
    as_json: JsonArray = False,
) -> None:
    """List past and present runs, or compare some.

    A comparison shows their results, and the settings that differ.
    """
    with exit_codes():
        from rptrain.runs.folder.listing import show, summaries, summarize
        from rptrain.runs.folder.named import named_run
        from rptrain.runs.view.run_view import RunView
        from rptrain.utils.console import output
        from rptrain.utils.phase_display import PhaseDisplay

        with PhaseDisplay(shown=not as_json):
            views = [RunView(named_run(name, folder)) for name in names or ()]
            found = [summarize(view) for view in views] if names else summaries(folder)
        if as_json:
            print(json.dumps([run.to_dict() for run in found], indent=2))
        elif len(views) > 1:
            from rptrain.runs.folder.comparison import show as show_comparison

            show_comparison(views, output())
        elif found:
            show(found, output())
        else:
            missing = folder != RUNS and not folder.is_dir()  # the default folder is created by the first run
            print(f"no runs: the folder {folder} does not exist" if missing else f"no runs in {folder}")


def attach(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="Name or path of a run; by default the newest.", autocompletion=run_names),
    ] = None,
    folder: RunsFolder = RUNS,
) -> None:
    """Watch a run in the terminal interface, or replay a finished run. Leaving it does not stop the run."""
    with exit_codes():
        from rptrain.runs.folder.named import named_run
        from rptrain.tui.start import open_interface

        open_interface(named_run(run, folder))
