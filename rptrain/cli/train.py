"""`rptrain train`."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from rptrain.cli.complete import config_keys
from rptrain.cli.exits import exit_codes
from rptrain.cli.options import ConfigFile, quiet_connections
from rptrain.utils.allocator import keep_allocator_tidy
from rptrain.utils.console import console
from rptrain.utils.errors import UserError
from rptrain.utils.phase_display import PhaseDisplay
from rptrain.utils.signals import PROCESS

if TYPE_CHECKING:
    from rptrain.config.resolve import Resolved


def train(
    config: ConfigFile,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", help="Override a key, e.g. train.max_steps=20.", autocompletion=config_keys
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check the config, the model, the data and the memory; show the config; stop."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of progress.")] = False,
) -> None:
    """Train the model of a config. The word `train` may be omitted."""
    from rptrain.train.watchdog import Watchdog

    with Watchdog(PROCESS.native, ends_process=PROCESS.installed) as watchdog, exit_codes(), PROCESS.handled():
        from rptrain.engine.distributed.launch import Launch
        from rptrain.runs.folder.run_dir import find, resolve_config

        resolved = resolve_config(config, overrides or ())
        if dry_run:
            _check(resolved, as_json=as_json)
            return
        launch = Launch.of()
        if launch is None or launch.world == 1:  # several processes do not wait for one that ended before
            find(resolved, warn=False)  # a run looks for it again, once torch is there
        keep_allocator_tidy()
        if launch is not None:
            quiet_connections()
        shown = not as_json and (launch is None or launch.rank == 0)
        with PhaseDisplay(shown=shown, console=console()), PROCESS.importing():
            from rptrain.train.run import train as run
        try:
            trained = run(resolved, quiet=as_json, watchdog=watchdog)
        except UserError as error:
            if launch is not None and launch.world > 1:
                raise
            with PhaseDisplay(shown=shown):
                from rptrain.train.mistakes import with_others

                raise with_others(resolved, error) from None
        if as_json and (launch is None or launch.rank == 0):
            model = str(trained.model_path) if trained.finished else None  # None: it was asked to stop before
            print(json.dumps({"run": str(trained.path), "model": model}))


def _check(resolved: "Resolved", *, as_json: bool) -> None:
    """`--dry-run`: plans the run, and shows its config. Raises UserError with all mistakes."""
    from rptrain.config.resolve import render
    from rptrain.runs.folder.run_dir import find

    keep_allocator_tidy()
    with PhaseDisplay(shown=not as_json):
        with PROCESS.importing():
            from rptrain.planner.dry_run import check_run

        check_run(resolved)
    found = find(resolved, warn=False)  # the plan has warned of damaged checkpoints
    if as_json:
        values = resolved.config.model_dump(mode="json")
        resumes = str(found[1]) if found else None
        print(json.dumps({"config": values, "origins": resolved.origins, "resumes": resumes}, indent=2))
    else:
        print(f"# {f'resumes {found[1]}' if found else 'a new run'}\n\n{render(resolved)}", end="")
