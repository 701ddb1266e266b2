"""The text of `rptrain plan`, for terminals of any width, with and without color."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rptrain.config.schema import Config
from rptrain.machine.hardware import Hardware
from rptrain.models.spec import ModelShape
from rptrain.planner.compare import OURS, ScheduleTime
from rptrain.planner.length import sentences
from rptrain.planner.memory import MemoryPlace
from rptrain.planner.product_types import ProductType, suggested
from rptrain.planner.report import PlanReport
from rptrain.planner.scaling import Scaling
from rptrain.schedule import picture
from rptrain.schedule.coarse import coarse
from rptrain.schedule.plan import Stage
from rptrain.schedule.roofline import Verdict
from rptrain.utils.units import (
    DASH,
    format_bits,
    format_bytes,
    format_percent,
    format_rate,
    format_seconds,
    format_speed,
)

LABEL, SIZE = 33, 12  # minimum widths of a part's name and of its size
BAR = 30  # maximum width of the available memory
COMPARED = (
    "All are simulated with the same layer times. The other schedules update synchronously, recompute every layer "
    "except the head, and keep weights and gradients on the devices. Their copies and updates take no time here. Their "
    "memory does not include optimizer state or workspace, and is not checked against the limit. Schedules that are "
    "not possible here, or that equal another one, are left out."
)
WIDEST = 110  # columns of the drawn schedule


def show(report: PlanReport, console: Console) -> None:
    """Prints the whole report."""
    for line in _head(report):
        console.print(Text(line))
    _section("Plan", _plan(report), console)
    if report.run is not None:
        width = min(console.width, WIDEST) - 2
        shown = coarse(report.run.plan, report.run.costs)
        _print(Text("\n" + picture.text(report.timeline(shown), width, shown.note), no_wrap=True), 2, console)
    if report.length is not None:
        _section("Run", sentences(report.config, report.length), console)
    if report.types:
        _section("Types of products (estimated)", _types(report.types), console)
    if report.scaling is not None:
        show_scaling(report.scaling, report.measured is not None, console)
    _section("Transfers", _roofline(report), console)
    if report.reading is not None:
        style = "yellow" if report.reading.limits else ""
        _print(Text(str(report.reading), style=style), 2, console)
    _section("Memory", (), console)
    for places in _alike(report.memory.places):
        _show_place(places, console)
    console.print()
    for warning in report.warnings:
        console.print(Text(f"Warning: {warning}", style="yellow"))
    for refusal in report.checks.refusals:
        console.print(Text(f"The run cannot start: {refusal.place}: {refusal.text}", style="red"))
    if report.problem:
        console.print(Text(f"No plan fits: {report.problem}", style="red"))
    elif report.checks.refusals and report.memory.fits:
        console.print(Text("Its memory fits."))
    elif not report.fits:
        console.print(Text("It does not fit.", style="red"))
    else:
        unknown = [place.kind for place in report.memory.places if place.fits is None]
        console.print(Text(f"It fits; the limit of {' and '.join(unknown)} is unknown." if unknown else "It fits."))
    if advice := str(report.advice):
        console.print(Text(advice[0].upper() + advice[1:]))


def show_comparison(schedules: Sequence[ScheduleTime], console: Console) -> None:
    """Prints a table of simulated schedules, the fastest first. There are none without a plan."""
    _section("Other schedules", (), console)
    if not schedules:
        _print(Text("unknown without a plan"), 2, console)
        return
    if len(schedules) == 1:
        _print(Text("none: each needs a layer per device"), 2, console)
        return
    ours = next(schedule for schedule in schedules if schedule.schedule == OURS)
    table = Table("", "per step", "relative", "bubble", "stages per device", "device memory", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for schedule in schedules:
        table.add_row(
            schedule.schedule,
            format_seconds(schedule.seconds),
            f"{schedule.seconds / ours.seconds:.2f}",
            format_percent(max(schedule.bubble, 0)),
            f"{schedule.stages_per_device:.3g}",
            format_bytes(schedule.peak),
        )
    _print(table, 2, console)
    _print(Text(COMPARED), 2, console)


def show_scaling(scaling: Scaling, measured: bool, console: Console) -> None:
    """Prints a table of numbers of nodes, and what the network costs."""
    _section("Nodes" if measured else "Nodes (estimated)", (), console)
    table = Table("nodes", "per step", "tokens/s", "efficiency", "host memory of each", box=None, pad_edge=False)
    for column in table.columns:
        column.justify = "right"
    for plan in scaling.plans:
        if plan.seconds_per_step is None or plan.tokens_per_second is None or plan.host_bytes is None:
            table.add_row(str(plan.nodes), *["no plan", DASH, DASH, DASH])
            continue
        memory = format_bytes(plan.host_bytes)
        table.add_row(
            str(plan.nodes),
            format_seconds(plan.seconds_per_step),
            format_speed(plan.tokens_per_second),
            format_percent(scaling.efficiency(plan)),
            memory if plan.fits else f"does not fit: {memory}",
        )
    _print(table, 2, console)
    for line in _network(scaling):
        _print(Text(line), 2, console)


def _network(scaling: Scaling) -> Iterator[str]:
    network = scaling.network
    yield (
        f"Each node sends and receives {format_bytes(scaling.gradients)} of gradients and "
        f"{format_bytes(scaling.weights)} of weights per step: {format_seconds(scaling.exchange_seconds)} at "
        f"{network.network}."
    )
    if scaling.hiding_rate is None:
        return
    least = format_bits(scaling.hiding_rate)
    if scaling.limits:
        longer = (
            f"{format_percent(scaling.loss)} longer than"
            if scaling.loss < 1
            else f"{1 + scaling.loss:.3g} times as long as"
        )
        yield (
            f"The network is the limit: a step takes {longer} with an infinitely fast network. To hide the exchange, "
            f"it needs at least {least}."
        )
    else:
        longer = format_percent(max(scaling.loss, 0))
        yield f"Computation hides the exchange: it makes a step {longer} longer. It needs at least {least}."


def _section(title: str, lines: Iterable[str], console: Console) -> None:
    console.print(Text(f"\n{title}", style="bold"))
    for line in lines:
        _print(Text(line), 2, console)


def _print(content: Text | Table, indent: int, console: Console) -> None:
    console.print(Padding(content, (0, 0, 0, indent), expand=False))


def describe_stages(stages: Sequence[Stage]) -> str:
    """A short form of stages: "F 0-8, fused 9-28, B 0-8 in 3 stages of 3"."""
    texts = []
    for kind, group in groupby(stages, key=lambda stage: stage.kind):
        of_kind = list(group)
        first, last = min(s.start for s in of_kind), max(s.stop for s in of_kind) - 1
        name = "fused" if kind == "FB" else kind
        text = f"{name} {first}" if first == last else f"{name} {first}-{last}"
        if len(of_kind) > 1:
            sizes = sorted({len(stage.layers) for stage in of_kind})
            text += f" in {len(of_kind)} stages of {sizes[0]}" + (f" to {sizes[-1]}" if len(sizes) > 1 else "")
        texts.append(text)
    return ", ".join(texts)


def model_sentence(config: Config, spec: ModelShape) -> str:
    """A model's size, and the types of its weights and products."""
    base = config.adapters and config.adapters.base
    stored = "" if base in (None, "bf16") else f", the base in {base}"
    products = ", products in FP8" if config.engine.fp8 else ""
    kind = f"{config.model.dtype}{products}{stored}"
    return f"{config.model.path}: {spec.num_parameters:,} parameters, {len(spec.stack)} layers, {kind}"


def step_sentence(sizes: dict[str, Any]) -> str:
    """The sizes of a step (`Config.step_sizes`)."""
    rounds = sizes["micro_batches"] // sizes["round_size"]
    of_rounds = f" in {rounds} rounds of {sizes['round_size']}" if rounds > 1 else ""
    replicas = f", {sizes['replicas']} replicas" if sizes["replicas"] > 1 else ""
    return (
        f"A step: {sizes['micro_batches']} micro-batches{of_rounds} of {sizes['micro_batch_size']} × "
        f"{sizes['length']:,} tokens{replicas}, {sizes['update']}"
    )


def _head(report: PlanReport) -> Iterator[str]:
    config, hardware = report.sized, report.hardware
    yield model_sentence(config, report.spec)
    yield step_sentence(config.step_sizes())
    if hardware.devices < report.asked:
        kind = "GPUs" if hardware.gpus else "workers"
        each = " in each replica" if config.replicas > 1 else ""
        yield f"{hardware.devices} of {report.asked} {kind}: a round has {config.round_size} micro-batches{each}"
    if report.measured:
        yield f"Times: measured in {report.measured}"
    machine = hardware.machine
    where = "this machine" if hardware.here else "a hypothetical machine"
    if report.scaling is not None:
        like = "machines like this one" if hardware.here else "hypothetical machines"
        where = f"each of {report.scaling.network.count} {like}"
    if not hardware.gpus:
        yield f"On {machine.devices} CPU worker{'s' if machine.devices > 1 else ''} of {where}"
        return
    card = machine.card
    if report.measured:
        copies = ""
        if report.run is not None and report.run.setting.links is not None:
            links = report.run.setting.links
            copies = f"; copies at {links.up / 1e9:.3g} GB/s to each GPU and {links.down / 1e9:.3g} GB/s from it"
        yield f"On {machine.devices} × {card.name} of {where}{copies}"
        yield from _card_note(hardware)
        return
    peak = f"{card.peak.bf16:g} TFLOP/s"
    if config.engine.fp8 and card.peak.fp8:
        peak += f", {card.peak.fp8:g} in FP8,"
    source = "" if machine.links_measured is None else f", measured by rptrain doctor on {machine.links_measured}"
    yield f"On {machine.devices} × {card.name} of {where}: {peak} and {machine.link / 1e9:.3g} GB/s each way{source}"
    yield from _card_note(hardware)
    rates = f"{card.rates.bf16:.0f} TFLOP/s"
    if config.engine.fp8 and card.rates.fp8:
        rates += f", {card.rates.fp8:.0f} in FP8"
    if config.engine.fp16_accumulation:
        rates += f", {card.rates.fp16:.0f} with sums in float16"
    yield f"Products at {rates}, {card.rates_source}"


def _card_note(hardware: Hardware) -> Iterator[str]:
    """Why a hypothetical machine has its card, if no flag names it."""
    card = hardware.machine.card.name
    if hardware.card_source == "assumed":
        yield f"{card} is assumed: name the GPU model with --card"
    elif hardware.card_source == "--timings":
        yield f"{card} is the GPU model on which the run was measured"


def _plan(report: PlanReport) -> Iterator[str]:
    if report.run is None:
        yield "none"
        return
    found, plan = report.run.estimate, report.run.plan
    yield describe_stages(plan.stages)
    yield str(plan)
    yield (
        f"{format_seconds(found.period)} per step, {format_rate(report.tokens_per_second)}, "
        f"bubble {format_percent(max(found.bubble, 0))}: estimated with the {report.source}"
    )
    if report.past is not None:
        yield f"measured in the run {report.past.run} with these settings: {format_rate(report.past.tokens_per_second)}"


def _types(types: Sequence[ProductType]) -> Iterator[str]:
    present, other = types
    ratio = present.seconds_per_step / other.seconds_per_step
    yield f"{present.name}, as in the config: {format_rate(present.tokens_per_second)}"
    yield f"{other.name}: {format_rate(other.tokens_per_second)}, {ratio:.2f} times as much"
    if suggested(types):
        yield f"{other.setting} would make this run faster."


def _roofline(report: PlanReport) -> Iterator[str]:
    if report.verdict is None:
        yield "unknown without a plan" if report.run is None else "none: CPU workers share the host's memory"
        return
    if report.measured is None:  # otherwise the GPU's peak does not count
        yield f"Computation takes longer than copies above {report.ridge:,.0f} operations per byte (roofline)."
        for block in report.blocks:
            times = f", {block.layers} times" if block.layers > 1 else ""
            yield f"{block.name}{times}: forward {block.forward:,.0f}, backward {block.backward:,.0f}"
    yield verdict_text(report.verdict)


def verdict_text(verdict: Verdict) -> str:
    """The limit of the simulated plan, and its cost."""
    if verdict.limit is None:
        return (
            f"Computation hides transfers and updates: they make a step {format_percent(max(verdict.loss, 0))} longer."
        )
    causes = {
        "up": "Uploads are the limit",
        "down": "Downloads are the limit",
        "optimizer": "The optimizer on the CPU is the limit",
        "network": "The network is the limit",
        "together": "Transfers and the optimizer together are the limit",
    }
    without = "computation alone" if verdict.limit == "together" else "without it"
    if verdict.limit in ("up", "down"):
        without = "with free copies in this direction"
    text = f"{causes[verdict.limit]}: a step takes {format_percent(verdict.loss)} longer than {without}."
    if verdict.stages:
        shown = " ".join(map(str, verdict.stages[:8])) + (" …" if len(verdict.stages) > 8 else "")
        text += f" Stages that copy longer than they compute: {len(verdict.stages)} ({shown})."
    return text


def _alike(places: Sequence[MemoryPlace]) -> list[list[MemoryPlace]]:
    """Groups of places that differ only in name."""
    return [list(group) for _, group in groupby(places, key=lambda p: (p.kind, p.parts, p.limit, p.source, p.notes))]


def _show_place(places: list[MemoryPlace], console: Console) -> None:
    place = places[0]
    name = f"each of {len(places)} GPUs" if len(places) > 1 else place.name
    if place.limit is None:
        text = f"{name}: {format_bytes(place.total)}, limit unknown: {place.source}"
    else:
        verdict = "fits" if place.fits else f"does not fit: {format_bytes(place.missing)} missing"
        text = f"{name}: {format_bytes(place.total)} of {format_bytes(place.limit)} ({place.source}), {verdict}"
    _print(Text(text, style="" if place.fits is not False else "red"), 2, console)
    full = max(place.total, place.limit or 0, 1)
    width = console.width - 4 - SIZE - 2 * 2  # after the indentation and the gaps
    label = min(max(LABEL, *(len(part.name) for part in place.parts)), width)
    bar = min(BAR, width - label)
    table = Table.grid(padding=(0, 2))
    table.add_column(width=label)
    table.add_column(justify="right", width=SIZE)
    table.add_column(width=bar)
    for part in place.parts:
        table.add_row(part.name, format_bytes(part.nbytes), "█" * round(bar * part.nbytes / full))
    _print(table, 4, console)
    for note in place.notes:
        _print(Text(note), 4, console)
