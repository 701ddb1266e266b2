"""`rptrain chat`."""

from typing import Annotated

import typer

from rptrain.cli.complete import RUNS, run_names
from rptrain.cli.exits import exit_codes
from rptrain.cli.options import PlacementOption
from rptrain.inference.settings import MAX_NEW_TOKENS, AnswerSettings
from rptrain.utils.errors import UserError
from rptrain.utils.phase_display import PhaseDisplay
from rptrain.utils.phases import phase


def chat(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CHECKPOINT|DIR",
            help="A run, a checkpoint, or the folder of a model.",
            autocompletion=run_names,
        ),
    ],
    system: Annotated[str, typer.Option(help="The system prompt.")] = "",
    temperature: Annotated[float, typer.Option(min=0, help="0: always the most likely token.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Draw from the most likely tokens that add up to this.")] = 0.95,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The longest answer, in tokens.")] = MAX_NEW_TOKENS,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 0,
    placement: PlacementOption = "auto",
    base: Annotated[bool, typer.Option("--base", help="Show the base model's answers beside the tuned ones.")] = False,
) -> None:
    """Talk to a trained model in this terminal.

    Without a terminal, each line of the input is a message.
    """
    with exit_codes():
        if system != system.encode(errors="replace").decode():
            raise UserError("--system is not UTF-8 text")
        from rptrain.runs.folder.named import named_source

        path = named_source(source, RUNS)
        settings = AnswerSettings(temperature, top_p, max_new_tokens, seed)
        settings.check()
        with PhaseDisplay(), phase("loading the model", unit=""):
            from rptrain.cli.talk import Talk
            from rptrain.inference.free_memory import free_memory
            from rptrain.inference.load import LoadedChat
            from rptrain.runs.folder.listing import training_beside

            loaded = LoadedChat(path, free_memory(training_beside(path)), placement)
            if base:
                loaded.load_base()
        loaded.chat.settings, loaded.chat.system = settings, system
        Talk(loaded).run(base=base)
