"""`rptrain download`: models and data sets of the Hugging Face Hub."""

from typing import Annotated

import typer

from rptrain.cli.complete import no_completions
from rptrain.cli.exits import exit_codes
from rptrain.utils.phase_display import PhaseDisplay
from rptrain.utils.signals import PROCESS
from rptrain.utils.text import one_line

Revision = Annotated[str | None, typer.Option(metavar="REV", help="A branch, a tag or a commit; by default main.")]


def download(
    name: Annotated[
        str, typer.Argument(metavar="OWNER/NAME", help="Its name on the hub.", autocompletion=no_completions)
    ],
    revision: Revision = None,
) -> None:
    """Download a model from the Hugging Face Hub.

    It goes into the hub's cache, where model.path = "OWNER/NAME" finds it. An interrupted download continues where it
    stopped when the command is run again. For gated and private models, log in with `hf auth login`, or set HF_TOKEN.
    """
    with exit_codes(), PhaseDisplay() as display:
        with PROCESS.importing():
            from rptrain.hub.model import download as fetch
            from rptrain.models.families.registry import build
            from rptrain.models.locate import download_command, locate

        def tell(said: str) -> None:
            display.note(one_line(said))

        try:
            downloaded = fetch(name, revision, build, tell)
        except KeyboardInterrupt:
            tell("what was downloaded is kept: the same command continues it")
            raise
        print(downloaded.path)
        if downloaded.base is None:
            path = name if locate(name) == downloaded.path else downloaded.path
            tell(f'train it with model.path = "{path}" in a config file; `rptrain plan` shows what that takes')
        else:
            base = f": {download_command(downloaded.base)}" if downloaded.base else ""
            tell(f'an adapter: train it on with lora.adapter = "{downloaded.path}", on its base model{base}')
