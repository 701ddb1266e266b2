"""The text of `rptrain bench`, for terminals of any width, with and without color."""

from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rptrain.bench.floor import Floor
from rptrain.bench.idle import CAUSES
from rptrain.bench.report import Report
from rptrain.planner.text import step_sentence
from rptrain.utils.page_locks import locked_sentence, locking_advice
from rptrain.utils.units import format_bytes, format_rate, format_seconds

LEAST = 0.0005  # fraction of the time; a cause that takes less on every device is not shown
GB = 1e9


def show(report: Report, console: Console) -> None:
    """Prints the whole report."""
    values = report.to_dict()
    for line in _head(values):
        console.print(Text(line))
    _section("Speed", _speed(values), console)
    _section("Devices", (), console)
    console.print(Padding(_devices(values["devices"]), (0, 0, 0, 2), expand=False))
    _section("Transfers and updates", _transfers(values), console)
    _section("Launches", _launches(values), console)
    _section("Memory", _memory(values), console)
    if report.floor is not None:
        _section("Roofline time (--floor)", _floor(values["floor"]), console)
        console.print(Padding(_operations(report.floor), (0, 0, 0, 2), expand=False))


def _section(title: str, lines: Iterable[str], console: Console) -> None:
    console.print(Text(f"\n{title}", style="bold"))
    for line in lines:
        console.print(Padding(Text(line), (0, 0, 0, 2), expand=False))


def _head(values: dict[str, Any]) -> Iterator[str]:
    model, step = values["model"], values["step"]
    base = "" if model["base"] in (None, "bf16") else f", the base in {model['base']}"
    yield f"{model['path']}: {model['parameters']:,} parameters, {model['layers']} layers{base}"
    yield f"{step_sentence(step)}; weights and tokens are random"
    devices = values["machine"]["devices"]
    yield f"On {len(devices)} × {devices[0]['kind']}: {values['plan']['text']}"


def _speed(values: dict[str, Any]) -> Iterator[str]:
    speed, first = values["throughput"], values["first_step"]
    steps = speed["steps"]
    yield f"{format_rate(speed['tokens_per_second'])} in {len(steps)} steps"
    yield (
        f"{format_seconds(speed['seconds_per_step'])} per step, fastest {format_seconds(min(steps))}, slowest "
        f"{format_seconds(max(steps))}; planned {format_seconds(values['plan']['seconds_per_step'])}"
    )
    if speed["skipped"]:
        yield f"{speed['skipped']} steps were skipped because gradients were not finite"
    yield (
        f"{format_seconds(first['seconds'])} to the end of the first step: preparation "
        f"{format_seconds(first['preparing'])}, allocating memory {format_seconds(first['memory'])}, initializing "
        f"weights {format_seconds(first['weights'])}, the step {format_seconds(first['step'])}"
    )


def _devices(devices: list[dict[str, Any]]) -> Table:
    """The fractions of each device's time, by cause, with a row per device."""
    shown = [cause for cause in CAUSES if any(device["idle"][cause] >= LEAST for device in devices)]
    table = Table("", "busy", *shown, box=None, pad_edge=False, show_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for device in devices:
        shares = (device["busy"], *(device["idle"][cause] for cause in shown))
        table.add_row(device["name"], *(f"{share:.1%}" for share in shares))
    return table


def _transfers(values: dict[str, Any]) -> Iterator[str]:
    for name, what in (("upload", "parameter uploads"), ("download", "gradient downloads")):
        rate, nbytes = values["transfers"][name], format_bytes(int(values["transfers"][f"{name}_bytes"]))
        yield f"{what}: none" if rate is None else f"{what}: {nbytes} per step at {rate / GB:,.1f} GB/s"
    if (update := values["optimizer"]) is None:
        yield "updates: none"
        return
    yield (
        f"update: {format_seconds(update['seconds'])}, {update['parameters_per_second'] / GB:,.2f} billion parameters "
        f"per second, {update['bytes_per_second'] / GB:,.1f} GB/s ({update['bytes_per_parameter']:g} bytes each)"
    )


def _launches(values: dict[str, Any]) -> Iterator[str]:
    launches = values["launches"]
    stage = max(launches["stages"], key=lambda of: of["host"] / of["device"])
    yield (
        f"{launches['share']:.1%} of the devices' computation time; the most for {stage['stage']}: "
        f"{format_seconds(stage['host'])} of {format_seconds(stage['device'])} per micro-batch"
    )


def _memory(values: dict[str, Any]) -> Iterator[str]:
    for gpu in values["memory"]["gpus"]:
        yield (
            f"{gpu['device']}: at most {format_bytes(gpu['peak'])}, planned {format_bytes(gpu['planned'])}, limit "
            f"{format_bytes(gpu['limit'])}; PyTorch's allocator {format_bytes(gpu['allocator_peak'])}, planned "
            f"{format_bytes(gpu['allocator_planned'])}; {gpu['driver_allocations']} driver allocations in the "
            "measured steps"
        )
    host = values["memory"]["host"]
    yield (
        f"host: {format_bytes(host['process'])}, including states {format_bytes(host['states'])} "
        f"({host['states_per_parameter']:.1f} bytes per parameter) and activations {format_bytes(host['activations'])}"
    )
    if host["locked_bytes"] < host["copied_bytes"]:
        yield locked_sentence(host["locked_bytes"], host["copied_bytes"], locking_advice())


def _floor(floor: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{floor['achieved']:.1%} of the roofline, {format_rate(floor['tokens_per_second'])} with each layer "
        f"recomputed ({floor['without_recompute']:,.0f} without)"
    )
    yield f"elementwise operations run at the rate of a copy, {floor['copy'] / GB:,.0f} GB/s read and written"


def _operations(floor: Floor) -> Table:
    """The operations of a micro-batch in milliseconds."""
    table = Table("ms per micro-batch", "forward", "backward", box=None, pad_edge=False, show_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for layer in floor.layers:
        times = f", {layer.count} times" if layer.count > 1 else ""
        table.add_row(f"{layer.name}{times}", f"{layer.forward * 1e3:.3f}", f"{layer.backward * 1e3:.3f}")
        for line in layer.lines:
            table.add_row(f"  {line.operation}", f"{line.forward * 1e3:.3f}", f"{line.backward * 1e3:.3f}")
    return table
