"""`rptrain export` and `rptrain generate`."""

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from textwrap import indent
from typing import Annotated

import typer

from rptrain.checkpoint.export_progress import is_export, loading_code, record
from rptrain.checkpoint.run_states import recorded
from rptrain.checkpoint.serving import serving
from rptrain.cli.complete import RUNS, gguf_types, no_completions, run_names
from rptrain.cli.exits import exit_codes
from rptrain.cli.export_display import ExportDisplay
from rptrain.cli.options import JsonArray, PlacementOption
from rptrain.gguf import kinds
from rptrain.utils.errors import UserError
from rptrain.utils.paths import expanded
from rptrain.utils.phase_display import PhaseDisplay
from rptrain.utils.phases import phase
from rptrain.utils.signals import PROCESS
from rptrain.utils.text import is_terminal, one_line, printable


def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CHECKPOINT",
            help="A run, whose result is exported, or a checkpoint.",
            autocompletion=run_names,
        ),
    ],
    to: Annotated[
        Path,
        typer.Option(
            metavar="DIR|F.gguf",
            help="Folder to write to, created if missing; or a GGUF file for llama.cpp and Ollama.",
            autocompletion=no_completions,
        ),
    ],
    dtype: Annotated[str | None, typer.Option(help="Data type of the weights; by default the run's.")] = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help=f"Type of a GGUF file: {', '.join(kinds.ALL)}. By default {kinds.MODEL}, and {kinds.ADAPTER} for an "
            "adapter.",
            autocompletion=gguf_types,
        ),
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge the adapters into the model's weights.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing folder or GGUF file, unless it is an input.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the progress and the result as JSON, one record per line.")
    ] = False,
) -> None:
    """Export a Hugging Face model, a PEFT adapter or a GGUF file of a run.

    The result of a run is the best state if save.load_best_model_at_end is set, else the newest. On a terminal it asks
    before it replaces an earlier export, and shows the bytes written. The last lines are the code or the commands that
    load the export, and what vLLM needs to serve it if it is an adapter of experts; only its path is on standard
    output. A GGUF file, with a Modelfile beside it, is written by llama.cpp's converter: `rptrain doctor` says whether
    it is found.
    """
    with exit_codes():
        from rptrain.runs.folder.named import named_source

        path, to = named_source(source, RUNS), expanded(to)
        asked = is_terminal(sys.stdin) and is_terminal(sys.stderr) and not (force or as_json)
        if to.suffix.lower() == kinds.SUFFIX:
            _export_gguf(path, to, dtype, quantize, merge=merge, force=force, asked=asked, as_json=as_json)
            return
        if quantize is not None:
            raise UserError(f"--quantize is for GGUF files: name one, such as --to {to.name or 'model'}{kinds.SUFFIX}")
        if asked and is_export(to) and not typer.confirm(f"Replace the export in {printable(str(to))}?", err=True):
            raise typer.Exit(0)
        with ExportDisplay(as_json=as_json) as display:
            with PROCESS.importing():
                from rptrain.checkpoint.export import export as write

            written = write(path, to, dtype, merge=merge, force=force, report=display.report, tell=display.tell)
        code, served = loading_code(written), serving(written)
        note = served.note() if served else ""
        if as_json:
            step, _ = recorded(written)
            facts = served.to_dict() if served else None
            print(record(phase="done", path=str(written), step=step, code=code, vllm=facts, note=note))
        else:
            print(written)
            print(f"Load it with:\n\n{indent(printable(code), '  ')}\n", file=sys.stderr)
            if note:
                print(f"{note}\n", file=sys.stderr)


def _export_gguf(
    source: Path,
    to: Path,
    dtype: str | None,
    quantize: str | None,
    *,
    merge: bool,
    force: bool,
    asked: bool,
    as_json: bool,
) -> None:
    if dtype is not None:
        raise UserError("--dtype is for folders: --quantize names the type of a GGUF file, such as bf16")
    if asked and to.is_file():
        if not typer.confirm(f"Replace {printable(str(to))} and its Modelfile?", err=True):
            raise typer.Exit(0)
        force = True
    with ExportDisplay(as_json=as_json) as display:
        with PROCESS.importing():
            from rptrain.gguf.export import export_gguf

        written = export_gguf(source, to, quantize, merge=merge, force=force, report=display.report, tell=display.tell)
    code = written.commands()
    if as_json:
        print(record(phase="done", path=str(written.file), modelfile=str(written.modelfile), code=code))
    else:
        print(written.file)
        print(f"Load it with:\n\n{indent(printable(code), '  ')}\n", file=sys.stderr)
        if written.note:
            print(one_line(written.note), file=sys.stderr)


def generate(
    source: Annotated[
        str, typer.Argument(metavar="RUN|DIR", help="A run, or the folder of a model.", autocompletion=run_names)
    ],
    prompts: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT]...", help="One prompt or several.")] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be given several times.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The longest answer, in tokens.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0: always the most likely token.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the raw prompt, without the chat template.")] = False,
    placement: PlacementOption = "auto",
    as_json: JsonArray = False,
) -> None:
    """Generate text with a trained model.

    A run answers with its result: the best state if save.load_best_model_at_end is set, else the newest.
    Each of several prompts is printed above its answer.
    """
    with exit_codes():
        said = [*(prompts or ()), *(prompt or ())]
        if not said:
            raise UserError('no prompt: write it after the run, such as rptrain generate runs/my "Who are you?"')
        from rptrain.runs.folder.named import named_source

        path = named_source(source, RUNS)
        with PhaseDisplay(shown=not as_json), phase("preparing the answer", unit=""):
            with PROCESS.importing():
                from rptrain.inference.free_memory import free_memory
                from rptrain.inference.generate import Request, generate_text, stream_text
                from rptrain.runs.folder.listing import training_beside

            memory = free_memory(training_beside(path))
            request = Request(path, said, max_new_tokens, temperature, seed, raw, _tell)
            texts = generate_text(request, memory, placement) if as_json else []
            steps = iter(()) if as_json else stream_text(request, memory, placement)
            steps = chain([*islice(steps, 1)], steps)  # the first one loads the model
        if as_json:
            answers = [{"prompt": each, "text": text} for each, text in zip(said, texts, strict=True)]
            print(json.dumps(answers, indent=2, ensure_ascii=False))
        else:
            _print_streamed(steps, said)


def _tell(said: str) -> None:
    print(one_line(said), file=sys.stderr, flush=True)


def _print_streamed(steps: Iterator[list[str | None]], prompts: Sequence[str]) -> None:
    """Prints the answers one after the other, the first unfinished one as it arrives. Several have titles."""
    shown = printable if is_terminal(sys.stdout) else str
    waiting = [f"> {one_line(prompt)}\n" if len(prompts) > 1 else "" for prompt in prompts]
    current = 0
    for pieces in steps:
        for index, piece in enumerate(pieces):
            waiting[index] += piece or ""
        while current < len(prompts):
            print(shown(waiting[current]), end="", flush=True)
            waiting[current] = ""
            if pieces[current] is not None:
                break
            print()
            current += 1
    for text in waiting[current:]:
        print(shown(text))
