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
from rptrain.utils.units import format_bytes

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
        _section("Floor", _floor(values["floor"]), console)
        console.print(Padding(_operations(report.floor), (0, 0, 0, 2), expand=False))


def _section(title: str, lines: Iterable[str], console: Console) -> None:
    console.print(Text(f"\n{title}", style="bold"))
    for line in lines:
        console.print(Padding(Text(line), (0, 0, 0, 2), expand=False))


def _head(values: dict[str, Any]) -> Iterator[str]:
    model, step = values["model"], values["step"]
    base = "" if model["base"] in (None, "bf16") else f", the base in {model['base']}"
    yield f"{model['path']}: {model['parameters']:,} parameters, {model['layers']} layers{base}"
    rounds = step["micro_batches"] // step["round_size"]
    of_rounds = f" in {rounds} rounds of {step['round_size']}" if rounds > 1 else ""
    yield (
        f"A step: {step['micro_batches']} micro-batches{of_rounds} of {step['micro_batch_size']} × "
        f"{step['length']:,} tokens, {step['update']}; weights and tokens are random"
    )
    devices = values["machine"]["devices"]
    yield f"On {len(devices)} × {devices[0]['kind']}: {values['plan']['text']}"


def _speed(values: dict[str, Any]) -> Iterator[str]:
    speed, first = values["throughput"], values["first_step"]
    steps = speed["steps"]
    yield f"{speed['tokens_per_second']:,.0f} tokens/s in {len(steps)} steps"
    yield (
        f"{_seconds(speed['seconds_per_step'])} a step, the quickest {_seconds(min(steps))}, the slowest "
        f"{_seconds(max(steps))}; planned {_seconds(values['plan']['seconds_per_step'])}"
    )
    if speed["skipped"]:
        yield f"{speed['skipped']} steps had no finite gradients, and so no update"
    yield (
        f"{_seconds(first['seconds'])} to the end of the first step: preparing {_seconds(first['preparing'])}, taking "
        f"memory {_seconds(first['memory'])}, drawing weights {_seconds(first['weights'])}, "
        f"the step {_seconds(first['step'])}"
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
    for name, what in (("upload", "parameters up"), ("download", "gradients down")):
        rate, nbytes = values["transfers"][name], format_bytes(int(values["transfers"][f"{name}_bytes"]))
        yield f"{what}: none" if rate is None else f"{what}: {nbytes} a step, {rate / GB:,.1f} GB/s while they move"
    if (update := values["optimizer"]) is None:
        yield "updates: none"
        return
    yield (
        f"an update: {_seconds(update['seconds'])}, {update['parameters_per_second'] / GB:,.2f} billion parameters a "
        f"second, {update['bytes_per_second'] / GB:,.1f} GB/s ({update['bytes_per_parameter']:g} bytes each)"
    )


def _launches(values: dict[str, Any]) -> Iterator[str]:
    launches = values["launches"]
    stage = max(launches["stages"], key=lambda of: of["least"] / of["device"])
    yield (
        f"they take at most {launches['share']:.1%} of what the devices compute; the most for {stage['stage']}: "
        f"{_seconds(stage['least'])} for {_seconds(stage['device'])} a micro-batch"
    )


def _memory(values: dict[str, Any]) -> Iterator[str]:
    for gpu in values["memory"]["gpus"]:
        yield (
            f"{gpu['device']}: at most {format_bytes(gpu['peak'])}, planned {format_bytes(gpu['planned'])}, limit "
            f"{format_bytes(gpu['limit'])}; tensors {format_bytes(gpu['allocator_peak'])}, planned "
            f"{format_bytes(gpu['allocator_planned'])}; {gpu['driver_allocations']} allocations by the driver in the "
            "measured steps"
        )
    host = values["memory"]["host"]
    yield (
        f"host: {format_bytes(host['process'])}, of it states {format_bytes(host['states'])} "
        f"({host['states_per_parameter']:.1f} bytes a parameter) and activations {format_bytes(host['activations'])}"
    )
    if values["memory"]["gpus"] and not host["locked"]:
        yield "host memory could not be page-locked: transfers are slower"


def _floor(floor: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{floor['achieved']:.1%} of {floor['tokens_per_second']:,.0f} tokens/s, what the arithmetic allows with each "
        f"layer recomputed ({floor['without_recompute']:,.0f} without)"
    )
    yield f"elementwise operations at the rate of a copy, {floor['copy'] / GB:,.0f} GB/s read and written"


def _operations(floor: Floor) -> Table:
    """The operations of a micro-batch in milliseconds."""
    table = Table("ms a micro-batch", "forward", "backward", box=None, pad_edge=False, show_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for layer in floor.layers:
        times = f", {layer.count} times" if layer.count > 1 else ""
        table.add_row(f"{layer.name}{times}", f"{layer.forward * 1e3:.3f}", f"{layer.backward * 1e3:.3f}")
        for line in layer.lines:
            table.add_row(f"  {line.operation}", f"{line.forward * 1e3:.3f}", f"{line.backward * 1e3:.3f}")
    return table


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
