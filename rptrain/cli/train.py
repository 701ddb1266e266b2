"""`rptrain train`."""

import json
from typing import Annotated

import typer

from rptrain.cli.complete import config_keys
from rptrain.cli.exits import exit_codes
from rptrain.cli.options import ConfigFile, keep_allocator_tidy
from rptrain.runs.signals import PROCESS


def train(
    config: ConfigFile,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", help="Override a key, e.g. train.max_steps=20.", autocompletion=config_keys
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the config, show it, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of progress.")] = False,
) -> None:
    """Train the model of a config. The word `train` may be omitted."""
    from rptrain.train.watchdog import Watchdog

    with Watchdog(PROCESS.native, ends_process=PROCESS.installed) as watchdog, exit_codes(), PROCESS.handled():
        from rptrain.config.resolve import render
        from rptrain.engine.distributed.launch import Launch
        from rptrain.runs.run_dir import find, resolve_config

        resolved = resolve_config(config, overrides or ())
        launch = Launch.of()
        alone = launch is None or launch.world == 1
        # A run looks for it again, once torch is there. Several processes do not wait for one that ended before.
        found = find(resolved, warn=dry_run) if alone or dry_run else None
        if not dry_run:
            keep_allocator_tidy()
            with PROCESS.importing():
                from rptrain.train.run import train as run
            trained = run(resolved, quiet=as_json, watchdog=watchdog)
            if as_json and (launch is None or launch.rank == 0):
                model = str(trained.model_path) if trained.finished else None  # None: it was told to stop before
                print(json.dumps({"run": str(trained.path), "model": model}))
        elif as_json:
            values = resolved.config.model_dump(mode="json")
            resumes = str(found[1]) if found else None
            print(json.dumps({"config": values, "origins": resolved.origins, "resumes": resumes}, indent=2))
        else:
            print(f"# {f'resumes {found[1]}' if found else 'a new run'}\n\n{render(resolved)}", end="")
