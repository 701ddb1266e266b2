"""`rptrain download` and `rptrain push`: the Hugging Face Hub."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from rptrain.checkpoint.export_progress import is_export
from rptrain.checkpoint.metadata import RUN_CONFIG
from rptrain.checkpoint.result import find_result
from rptrain.checkpoint.run_states import EXPORTED, recorded
from rptrain.cli.complete import RUNS, no_completions, run_names
from rptrain.cli.exits import exit_codes
from rptrain.cli.export_display import ExportDisplay
from rptrain.utils.errors import UserError
from rptrain.utils.paths import from_here
from rptrain.utils.phase_display import PhaseDisplay
from rptrain.utils.replacing import replace_file
from rptrain.utils.signals import PROCESS
from rptrain.utils.text import is_terminal, one_line, printable
from rptrain.utils.units import format_bytes


def download(
    name: Annotated[
        str, typer.Argument(metavar="OWNER/NAME", help="The name on the hub.", autocompletion=no_completions)
    ],
    revision: Annotated[
        str | None, typer.Option(metavar="REV", help="A branch, a tag or a commit; by default main.")
    ] = None,
    dataset: Annotated[bool, typer.Option("--dataset", help="Download a data set.")] = False,
    config: Annotated[
        str | None, typer.Option(metavar="NAME", help="The configuration of a data set that has several.")
    ] = None,
) -> None:
    """Download a model or a data set from the Hugging Face Hub.

    It goes into the hub's cache, where model.path = "OWNER/NAME" finds a model; for a data set, its tables for a config
    file are printed. An interrupted download continues where it stopped when the command is run again. For gated or
    private repositories, log in with `hf auth login`, or set HF_TOKEN.
    """
    with exit_codes(), PhaseDisplay() as display:
        if config is not None and not dataset:
            raise UserError("--config names a configuration of a data set: add --dataset")
        if dataset:
            _download_dataset(name, revision, config, display)
        else:
            _download_model(name, revision, display)


def _download_model(name: str, revision: str | None, display: PhaseDisplay) -> None:
    with PROCESS.importing():
        from rptrain.hub.model import download
        from rptrain.models.families.registry import build
        from rptrain.models.locate import HUB_ID, download_command, locate

    with _continued(display):
        downloaded = download(name, revision, build, display.note)
    print(downloaded.path)
    if downloaded.base is None:
        path = name if locate(name) == downloaded.path else downloaded.path
        display.note(f'train it with model.path = "{path}" in a config file; `rptrain plan` shows what that takes')
    else:
        base = f": {download_command(downloaded.base)}" if HUB_ID.fullmatch(downloaded.base) else ""
        display.note(
            f'an adapter: continue training it with lora.adapter = "{downloaded.path}", on its base model{base}'
        )


def _download_dataset(name: str, revision: str | None, config: str | None, display: PhaseDisplay) -> None:
    with PROCESS.importing():
        from rptrain.hub.dataset import download

    with _continued(display):
        splits = download(name, revision, config, display.note)
    display.note("the data set's tables for a config file; leave out what you do not need:")
    print("\n\n".join(split.table for split in splits))


@contextmanager
def _continued(display: PhaseDisplay) -> Iterator[None]:
    """Says at an interrupt that nothing is lost."""
    try:
        yield
    except KeyboardInterrupt:
        display.note("what was transferred is kept: the same command continues from there")
        raise


def push(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|DIR", help="A run, whose result is pushed, or an export.", autocompletion=run_names
        ),
    ],
    name: Annotated[
        str, typer.Argument(metavar="OWNER/NAME", help="The repository on the hub.", autocompletion=no_completions)
    ],
    private: Annotated[bool, typer.Option("--private", help="Create a private repository.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the model card and the files; make no connection.")
    ] = False,
    base: Annotated[
        str | None,
        typer.Option(metavar="OWNER/NAME", help="The base model's name on the hub, if it was trained from a folder."),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            metavar="RUN", help="The run that an export comes from, for the model card.", autocompletion=run_names
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the README.md of the folder or the repository with a new card.")
    ] = False,
) -> None:
    """Push a result to the Hugging Face Hub, with a model card.

    The card says what was trained on which data and how, the losses, and how to load it; it names no local paths. To
    edit it, save what --dry-run prints as README.md in the export. An unfinished run is exported first. Needs a token
    that may write: log in with `hf auth login`, or set HF_TOKEN.
    """
    with exit_codes():
        from rptrain.runs.folder.named import named_run, named_source

        path = named_source(source, RUNS)
        with PhaseDisplay():
            with PROCESS.importing():
                from rptrain.hub.push import check_name, check_token, prepare, send

            check_name(name)
            if not dry_run:
                check_token()
        trained = named_run(run, RUNS) if run else _run_of(path)
        folder = _exported(path) if (path / RUN_CONFIG).is_file() else path
        pushed = prepare(folder, name, trained, base, force=force)
        if dry_run:
            print(printable(pushed.card))
            for file, size in pushed.sizes().items():
                print(f"{format_bytes(size):>10}  {one_line(file)}", file=sys.stderr)
            return
        bars = is_terminal(sys.stderr)
        with PhaseDisplay(shown=not bars) as display, _continued(display):
            print(send(pushed, private=private, force=force, bars=bars, tell=display.note))


def _run_of(path: Path) -> Path | None:
    """The run that a path names, or whose exported model it is."""
    return next(
        (run for run in (path, path.parent) if (run / RUN_CONFIG).is_file() and path.name in (run.name, EXPORTED)), None
    )


def _exported(run: Path) -> Path:
    """The folder with the export of a run's result, which is written beside the run if there is none. A card in an
    earlier export stays.
    """
    if (result := find_result(run)) is None:
        raise UserError(f"{run} has no complete state to push: train it first")
    if result.state.model is not None:
        return result.state.model
    to = run.with_name(f"{run.name}-export")
    if is_export(to) and recorded(to)[0] == result.state.step:
        return to
    with ExportDisplay(as_json=False) as display:
        with PROCESS.importing():
            from rptrain.checkpoint.export import export
            from rptrain.hub.card import NAME

        card = (to / NAME).read_bytes() if is_export(to) and (to / NAME).is_file() else None
        export(run, to, force=is_export(to), report=display.report, tell=display.tell)
        if card is not None:
            replace_file(to / NAME, card)
        display.note(f"{from_here(to)} holds what is pushed")
    return to
