"""The command line. Heavy modules are imported after the config has been checked."""

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from rptrain import __version__
from rptrain.runs.signals import INTERRUPTED, PROCESS
from rptrain.utils.errors import TrainingError, UserError, describe, explained
from rptrain.utils.native_watchdog import NativeWatchdog
from rptrain.utils.paths import expanded
from rptrain.utils.text import as_message

if TYPE_CHECKING:
    from rptrain.planner.report import PlanReport

# Raised for wrong arguments; by which package depends on the version of typer, which exports a subclass only.
UsageError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError")
_GLOBAL_OPTIONS = ("--help", "--version", "--keys")


class Commands(TyperGroup):
    """The commands. What is wrong with arguments is shown as a message, because it quotes them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _usage_messages():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _usage_messages():
            return super().invoke(ctx)


@contextmanager
def _usage_messages() -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise UsageError(as_message(error.format_message()), error.ctx) from None


class MessageFormatter(logging.Formatter):
    """Warnings as messages."""

    def format(self, record: logging.LogRecord) -> str:
        return as_message(super().format(record))


app = typer.Typer(
    cls=Commands,
    help="Fine-tunes language models that are larger than the GPUs they train on.\n\n"
    "rptrain, with nothing after it, opens the interface.\n\n"
    "rptrain --config FILE [key=value …] trains as the file says; it is short for rptrain train.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    given = arguments(sys.argv[1:])
    if given and given[0] != "attach":  # the interface handles signals itself
        PROCESS.install(NativeWatchdog.load())
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal that cannot show a letter does not end a run
            stream.reconfigure(errors="backslashreplace")
    assert logging.lastResort is not None  # shows warnings on stderr, also above the bar of progress
    logging.lastResort.setFormatter(MessageFormatter())
    try:
        app(given)
    finally:
        PROCESS.close()


def arguments(given: list[str]) -> list[str]:
    """The arguments, with the command `train` added if no command is named."""
    first = given[0] if given else ""
    if (first.startswith("-") and first not in _GLOBAL_OPTIONS) or "=" in first:
        return ["train", *given]
    return given


@contextmanager
def exit_codes() -> Iterator[None]:
    """Exit with 2 for errors of the user, among them files that cannot be read, with 130 for an interrupt, and with 1
    for a run that diverged, a disk that fails or a library that exits. Any other error exits with 1 and shows its
    traceback.
    """
    PROCESS.begin()
    try:
        yield
    except BrokenPipeError:  # the reader closed the pipe: typer exits silently
        raise
    except (UserError, TrainingError, OSError) as error:
        shown = explained(error) if isinstance(error, OSError) else error
        print(shown, file=sys.stderr)
        raise typer.Exit(2 if isinstance(shown, UserError) else 1) from None
    except SystemExit as error:
        if not isinstance(error.__context__, BrokenPipeError):  # rich exits when the pipe is closed
            print(describe(error, with_type=True), file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        PROCESS.close()
        print("interrupted", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None


def _existing(path: Path) -> Path:
    """The path with the home directory in place of "~". Raises UserError if nothing is there."""
    path = expanded(path)
    if not path.exists():
        raise UserError(f"{path} does not exist: name a run, a checkpoint or a model directory")
    return path


def _keep_allocator_tidy() -> None:
    """Set before torch is imported: slots are large and live long, and memory between them would be lost."""
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"rptrain {__version__}")
        raise typer.Exit


def _show_keys(wanted: bool) -> None:
    if wanted:
        from rptrain.config.reference import text

        print(text())
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
    show_keys: Annotated[
        bool, typer.Option("--keys", callback=_show_keys, is_eager=True, help="List the keys of a config.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        with exit_codes():
            from rptrain.tui.start import open_interface

            open_interface()


@app.command()
def train(
    config: Annotated[Path, typer.Option(help="The run's TOML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Override a key, e.g. train.max_steps=20.")
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
            _keep_allocator_tidy()
            with PROCESS.importing():
                from rptrain.train.trainer import train as run
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


@app.command()
def plan(
    config: Annotated[Path, typer.Option(help="The run's TOML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Override a key, e.g. train.micro_batch_size=2.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw a simulated step.")] = None,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the step for chrome://tracing.")] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Replace a file that this command did not write. Inputs and run files are refused."
        ),
    ] = False,
    gpus: Annotated[int | None, typer.Option(help="Plan for N hypothetical GPUs.")] = None,
    card: Annotated[str | None, typer.Option(help="GPU model; rtx4090 by default.")] = None,
    vram: Annotated[str | None, typer.Option(help="Memory of each GPU, e.g. 24GiB.")] = None,
    pcie: Annotated[str | None, typer.Option(help="Rate of each PCIe link, one way, e.g. 25GB/s.")] = None,
    host: Annotated[str | None, typer.Option(help="Host memory, e.g. 800GiB.")] = None,
    tflops: Annotated[
        float | None,
        typer.Option(help="Data sheet peak of each GPU in bfloat16, in TFLOP/s, e.g. 165; scales the others."),
    ] = None,
    tflops_fp16: Annotated[
        float | None, typer.Option(help="Peak in float16 with float16 sums, in TFLOP/s, e.g. 330.")
    ] = None,
    tflops_fp8: Annotated[
        float | None, typer.Option(help="Peak in FP8 with float32 sums, in TFLOP/s, e.g. 330.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="Plan for N such machines that train one model.")] = None,
    network: Annotated[
        str | None, typer.Option(help="Network between the machines, one way, e.g. 10GbE, 25Gb/s or 1.2GB/s.")
    ] = None,
    timings: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Use the measured times of a run, e.g. runs/NAME, in place of estimates."),
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Compare with other pipeline schedules.")] = False,
    show_data: Annotated[
        int,
        typer.Option(metavar="N", min=0, max=1_000_000, help="Read the data; show N samples and what is trained on."),
    ] = 0,
) -> None:
    """Show the plan of a config, the memory it needs, and what to change if it does not fit.

    Reads no weights, and the data only with --show-data. With --gpus, --card, --vram, --pcie, --host or a peak
    (--tflops, …) it plans for a hypothetical machine. With --nodes and --network it plans for several machines and
    says whether the network slows them down. With --timings, --card is by default the GPU model on which the
    run was measured. Exits with status 2 if the run does not fit, or if the times of --timings do not apply.
    """
    with exit_codes():
        from rptrain.planner.network import Nodes
        from rptrain.runs.outputs import Output, check
        from rptrain.runs.run_dir import resolve_config
        from rptrain.schedule import picture
        from rptrain.schedule.trace import PRODUCER, mark

        machines = Nodes.of(nodes, network)
        resolved = resolve_config(config, overrides or ())
        drawing = svg and Output("--svg", svg, picture.MARK, force)
        events = trace and Output("--trace", trace, mark(PRODUCER), force)
        check((drawing, events), config, resolved.config)

        from rptrain.planner.machine_flags import MachineFlags
        from rptrain.planner.report import report, write_pictures

        flags = MachineFlags(gpus, card, vram, pcie, host, tflops, tflops_fp16, tflops_fp8)
        found = report(resolved, flags, timings, machines)
        _print_plan(found, as_json=as_json, with_comparison=compare, samples=show_data)
        write_pictures(found, drawing, events)
        if not found.fits:
            raise typer.Exit(2)


def _print_plan(found: "PlanReport", *, as_json: bool, with_comparison: bool, samples: int) -> None:
    from rptrain.planner.compare import compare

    data = found.data(samples) if samples else None
    if as_json:
        comparison = [one.to_dict() for one in compare(found.run)] if with_comparison and found.run else None
        document = {**found.to_dict(), "comparison": comparison, "data": data and data.to_dict()}
        print(json.dumps(document, indent=2))
        return
    from rich.console import Console

    from rptrain.planner.text import show, show_comparison

    console = Console(highlight=False)
    show(found, console)
    if with_comparison:
        show_comparison(compare(found.run) if found.run else (), console)
    if data is not None:
        from rptrain.data.preview import show as show_samples

        show_samples(data, console)


@app.command()
def bench(
    config: Annotated[Path, typer.Option(help="The run's TOML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Override a key, e.g. engine.devices=cuda:0.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure.")] = 4,
    warmup: Annotated[
        int | None,
        typer.Option(min=1, help="Steps before; by default until timings are stable."),
    ] = None,
    floor: Annotated[bool, typer.Option("--floor", help="Also time the arithmetic alone, and compare.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of progress.")] = False,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the steps for chrome://tracing.")] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Replace a file that this command did not write. Inputs and run files are refused."
        ),
    ] = False,
) -> None:
    """Measure how fast a config trains on this machine, and where the time goes.

    Trains for some steps with random weights and tokens. Reads no weights and no data, and saves nothing.
    """
    with exit_codes():
        from rptrain.bench.trace import PRODUCER, document
        from rptrain.runs.outputs import Output, check
        from rptrain.runs.run_dir import resolve_config
        from rptrain.schedule.trace import mark

        resolved = resolve_config(config, overrides or ())
        events = trace and Output("--trace", trace, mark(PRODUCER), force)
        _keep_allocator_tidy()
        check((events,), config, resolved.config)
        with PROCESS.importing():
            from rptrain.bench.run import bench as run

        tell = (lambda text: None) if as_json else partial(print, file=sys.stderr)
        measured = run(resolved, steps=steps, warmup=warmup, with_floor=floor, tell=tell)
        if as_json:
            print(json.dumps(measured.to_dict(), indent=2))
        else:
            from rich.console import Console

            from rptrain.bench.show import show

            show(measured, Console(highlight=False))
        if events is not None:
            events.write(json.dumps(document(measured.lanes, measured.updates, measured.window)))


RunsFolder = Annotated[Path, typer.Option("--runs", metavar="DIR", file_okay=False, help="The folder of runs.")]


@app.command()
def runs(
    folder: RunsFolder = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
) -> None:
    """List past and present runs: state, last loss, time and size."""
    with exit_codes():
        from rptrain.runs.listing import show, summaries

        found = summaries(folder)
        if as_json:
            print(json.dumps([run.to_dict() for run in found], indent=2))
        elif found:
            from rich.console import Console

            show(found, Console(highlight=False))
        else:
            print(f"no runs in {folder}")


@app.command()
def attach(run: Annotated[Path, typer.Argument(metavar="RUN", exists=True, file_okay=False)]) -> None:
    """Watch a run in the terminal interface, or replay a finished run. Leaving it does not stop the run."""
    with exit_codes():
        if not (run / "config.toml").is_file():
            raise UserError(f"{run} is not a run: it has no config.toml; `rptrain runs` lists the runs")
        from rptrain.tui.start import open_interface

        open_interface(run)


@app.command()
def doctor(
    folder: RunsFolder = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
) -> None:
    """Check this machine: GPUs, their links and rates, memory, compiler and disk.

    The rates of products are kept, and later plans use them.
    """
    with exit_codes():
        from rptrain.doctor.checks import lines
        from rptrain.doctor.examine import examine

        found = examine(folder)
        if as_json:
            print(json.dumps([finding.to_dict() for finding in found], indent=2))
        else:
            print("\n".join(lines(found)))


@app.command()
def export(
    source: Annotated[Path, typer.Argument(metavar="RUN|CHECKPOINT")],
    to: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write to; created if missing.")],
    dtype: Annotated[str | None, typer.Option(help="Data type of the weights; by default the run's.")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge the adapters into the model's weights.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing folder, unless it is an input.")] = False,
) -> None:
    """Export a Hugging Face model or a PEFT adapter from a run's last checkpoint, or from a checkpoint."""
    with exit_codes():
        source, to = _existing(source), expanded(to)
        with PROCESS.importing():
            from rptrain.checkpoint.export import export as write

        print(write(source, to, dtype, merge=merge, force=force))


@app.command()
def generate(
    source: Annotated[Path, typer.Argument(metavar="RUN|DIR")],
    prompt: Annotated[list[str], typer.Option(help="The prompt; may be given several times.")],
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0: always the most likely token.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1)] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the raw prompt, without the chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
) -> None:
    """Generate text with a trained model."""
    with exit_codes():
        source = _existing(source)
        with PROCESS.importing():
            from rptrain.inference.generate import generate_text

        texts = generate_text(source, prompt, max_new_tokens, temperature, seed, raw)
        if as_json:
            answers = [{"prompt": said, "text": text} for said, text in zip(prompt, texts, strict=True)]
            print(json.dumps(answers, indent=2, ensure_ascii=False))
        else:
            print("\n".join(texts))
