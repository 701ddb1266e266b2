"""`rptrain bench`."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from rptrain.cli.complete import config_keys, no_completions
from rptrain.cli.exits import exit_codes
from rptrain.cli.options import ConfigFile, Force
from rptrain.utils.allocator import keep_allocator_tidy
from rptrain.utils.phase_display import PhaseDisplay
from rptrain.utils.signals import PROCESS


def bench(
    config: ConfigFile,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", help="Override a key, e.g. engine.devices=cuda:0.", autocompletion=config_keys
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure.")] = 4,
    warmup: Annotated[
        int | None,
        typer.Option(min=1, help="Steps before; by default until timings are stable."),
    ] = None,
    floor: Annotated[bool, typer.Option("--floor", help="Also time the arithmetic alone, and compare.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of progress.")] = False,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the steps for chrome://tracing.", autocompletion=no_completions),
    ] = None,
    force: Force = False,
) -> None:
    """Measure how fast a config trains, and where the time goes.

    Trains for some steps with random weights and tokens. Reads no weights and no data, and saves nothing.
    """
    with exit_codes():
        from rptrain.bench.trace import PRODUCER, document
        from rptrain.runs.folder.outputs import Output, check
        from rptrain.runs.folder.run_dir import resolve_config
        from rptrain.schedule.trace import mark

        resolved = resolve_config(config, overrides or ())
        events = trace and Output("--trace", trace, mark(PRODUCER), force)
        keep_allocator_tidy()
        check((events,), config, resolved.config)
        tell = (lambda text: None) if as_json else partial(print, file=sys.stderr)
        with PhaseDisplay(shown=not as_json):
            with PROCESS.importing():
                from rptrain.bench.run import bench as run

            measured = run(resolved, steps=steps, warmup=warmup, with_floor=floor, tell=tell)
        if as_json:
            print(json.dumps(measured.to_dict(), indent=2))
        else:
            from rptrain.bench.show import show
            from rptrain.utils.console import output

            show(measured, output())
        if events is not None:
            events.write(json.dumps(document(measured.lanes, measured.updates, measured.window)))
