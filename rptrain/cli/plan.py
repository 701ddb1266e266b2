"""`rptrain plan`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rptrain.cli.complete import config_keys, no_completions
from rptrain.cli.exits import exit_codes
from rptrain.cli.options import ConfigFile, Force
from rptrain.utils.collecting import gc_disabled
from rptrain.utils.phase_display import PhaseDisplay
from rptrain.utils.phases import phase

if TYPE_CHECKING:
    from rptrain.data.preview import Preview
    from rptrain.planner.report import PlanReport


def plan(
    config: ConfigFile,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", help="Override a key, e.g. train.micro_batch_size=2.", autocompletion=config_keys
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw a simulated step.", autocompletion=no_completions)
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the step for chrome://tracing.", autocompletion=no_completions),
    ] = None,
    force: Force = False,
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
        typer.Option(
            metavar="RUN",
            help="Use the measured times of a run, e.g. runs/NAME, in place of estimates.",
            autocompletion=no_completions,
        ),
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Compare with other pipeline schedules.")] = False,
    show_data: Annotated[
        int,
        typer.Option(metavar="N", min=0, max=1_000_000, help="Read the data; show N samples and what is trained on."),
    ] = 0,
) -> None:
    """Show the plan of a config and the memory it needs.

    Says what to change if the config does not fit. Reads no weights, and only the first rows of the data without
    --show-data. Checks what training checks before it starts. With --gpus, --card, --vram, --pcie, --host or a peak
    (--tflops, …) it plans for a hypothetical machine, without these checks. With --nodes and --network it plans for
    several machines and says whether the network slows them down. With --timings, --card is by default the GPU model on
    which the run was measured. Exits with status 2 if the run does not fit or cannot start, or if the times of
    --timings do not apply.
    """
    with exit_codes():
        with gc_disabled(), PhaseDisplay(shown=not as_json), phase("planning", unit=""):
            from rptrain.planner.network import Nodes
            from rptrain.runs.folder.outputs import Output, check
            from rptrain.runs.folder.run_dir import resolve_config
            from rptrain.schedule import picture
            from rptrain.schedule.trace import PRODUCER, mark

            machines = Nodes.of(nodes, network)
            resolved = resolve_config(config, overrides or ())
            drawing = svg and Output("--svg", svg, picture.MARK, force)
            events = trace and Output("--trace", trace, mark(PRODUCER), force)
            check((drawing, events), config, resolved.config)

            from rptrain.machine.flags import MachineFlags
            from rptrain.planner.report import report, write_pictures

            flags = MachineFlags(gpus, card, vram, pcie, host, tflops, tflops_fp16, tflops_fp8)
            found = report(resolved, flags, timings, machines)
        _print_plan(found, as_json=as_json, with_comparison=compare, samples=show_data)
        write_pictures(found, drawing, events)
        if not found.fits:
            raise typer.Exit(2)


def _print_plan(found: "PlanReport", *, as_json: bool, with_comparison: bool, samples: int) -> None:
    from rptrain.planner.compare import compare

    data = _data(found, samples, quiet=as_json) if samples else None
    if as_json:
        comparison = [one.to_dict() for one in compare(found.run)] if with_comparison and found.run else None
        document = {**found.to_dict(), "comparison": comparison, "data": data and data.to_dict()}
        print(json.dumps(document, indent=2))
        return
    from rptrain.planner.text import show, show_comparison
    from rptrain.utils.console import output

    console = output()
    show(found, console)
    if with_comparison:
        show_comparison(compare(found.run) if found.run else (), console)
    if data is not None:
        from rptrain.data.preview import show as show_samples

        show_samples(data, console)


def _data(found: "PlanReport", samples: int, *, quiet: bool) -> "Preview":
    with PhaseDisplay(shown=not quiet):
        return found.data(samples)
