"""Folders of runs that `runs` lists and `attach` opens."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.bad_inputs.case import RUNS, Case, Edit, Outcome
from benchmarks.bad_inputs.edits import (
    appended,
    deleted,
    directory,
    fifo,
    link,
    made,
    moved,
    sparse,
    text,
)

AREA = "runs"
EVENTS, LANES = "runs/x/events.jsonl", "runs/x/lanes.jsonl"
AS_JSON = (*RUNS, "--json")
FINISHED = '{"schema":1,"event":"finished","time":1.0,"step":6}\n'
RESUMED = '{"schema":1,"event":"resumed","time":1.0,"step":0,"checkpoint":"x"}\n'


def records(change: Callable[[dict[str, Any]], object]) -> Edit:
    """Changes each record of the run's events in place."""

    def edit(folder: Path) -> None:
        lines = []
        for line in (folder / EVENTS).read_text().splitlines():
            record = json.loads(line)
            change(record)
            lines.append(json.dumps(record) + "\n")
        (folder / EVENTS).write_text("".join(lines))

    return edit


def field(key: str, value: object) -> Edit:
    """Sets a field in every record that has it."""
    return records(lambda record: record.update({key: value} if key in record else {}))


def every_field(value: object, *kept: str) -> Edit:
    """Sets all fields but those named."""
    return records(lambda record: record.update({key: value for key in record if key not in kept}))


def raw_field(key: str, text: str) -> Edit:
    """Sets a field to text that json would not write, such as a number of many digits."""

    def edit(folder: Path) -> None:
        field(key, "PLACE")(folder)
        file = folder / EVENTS
        file.write_text(file.read_text().replace('"PLACE"', text))

    return edit


def alternating_times(folder: Path) -> None:
    times = iter([1e300, -1.0, 0.0, 1e12] * 10)
    records(lambda record: record.update(time=next(times)))(folder)


def many(folder: Path) -> None:
    """3,000 runs that share the text of one."""
    config, events = (folder / "runs/x/config.toml").read_bytes(), (folder / EVENTS).read_bytes()
    for number in range(3000):
        run = folder / f"runs/run-{number}"
        run.mkdir()
        (run / "config.toml").write_bytes(config)
        (run / "events.jsonl").write_bytes(events)


LISTED: tuple[tuple[int, str, tuple[Edit, ...]], ...] = (
    (325, "events empty", (text(EVENTS, ""),)),
    (326, "events missing", (deleted(EVENTS),)),
    (327, "events of bytes", (text(EVENTS, bytes(range(256)) * 20),)),
    (328, "events of null characters", (text(EVENTS, b"\0" * 5000),)),
    (329, "events that are a folder", (directory(EVENTS),)),
    (330, "events that are a pipe", (fifo(EVENTS),)),
    (331, "lanes that are a pipe", (fifo(LANES),)),
    (332, "events that link to a device", (link(EVENTS, "/dev/zero"),)),
    (333, "events that link outside", (link(EVENTS, "../../../outside/secret.txt"),)),
    (334, "fields of null", (every_field(None),)),
    (335, "fields of null but the kind", (every_field(None, "event", "schema"),)),
    (336, "fields of text", (every_field("x", "event", "schema"),)),
    (337, "fields of lists", (every_field([], "event", "schema"),)),
    (338, "deep line", (appended(EVENTS, "[" * 100_000 + "\n" + '{"a":' * 100_000 + "\n"),)),
    (339, "times of 1e300", (field("time", 1e300),)),
    (340, "times of -1e300", (field("time", -1e300),)),
    (341, "times beyond the calendar", (field("time", 999_999_999_999),)),
    (342, "times of zero", (field("time", 0),)),
    (343, "times in no order", (alternating_times,)),
    (344, "steps of 10**18", (field("step", 10**18),)),
    (345, "negative steps", (field("step", -5),)),
    (346, "loss of 1e308", (field("loss", 1e308),)),
    (347, "undefined loss", (field("loss", float("nan")),)),
    (348, "infinite loss", (field("loss", float("inf")),)),
    (349, "negative total of steps", (field("total_steps", -1),)),
    (350, "no steps in total", (field("total_steps", 0),)),
    (351, "number of 4,000 digits", (raw_field("step", "9" * 4000),)),
    (352, "number of 10,000 digits", (raw_field("step", "9" * 10_000),)),
    (353, "negative process", (field("pid", -1),)),
    (354, "process 0", (field("pid", 0),)),
    (355, "process 2**62", (field("pid", 2**62),)),
    (356, "odd birth of a process", (field("birth", "\x1b[31m/x"),)),
    (357, "host with a null character", (field("host", "a\0b"),)),
    (358, "records of a later version", (field("schema", 99),)),
    (359, "records of unknown kinds", (field("event", "party"),)),
    (360, "kinds in a list", (field("event", ["step"]),)),
    (361, "model with an escape sequence", (field("model", "\x1b[31mred\x07\x9b2J"),)),
    (362, "line of 200 MB", (made(EVENTS, lambda: b'{"event": "step", "x": "' + b"x" * 200_000_000 + b'"}\n'),)),
    (363, "events of 12 GiB", (sparse(EVENTS),)),
    (364, "two ends", (appended(EVENTS, FINISHED * 2),)),
    (365, "resumed at step 0", (appended(EVENTS, RESUMED),)),
    (369, "run name with a line end", (moved("runs/x", "runs/a\nb"),)),
    (368, "run name that is not UTF-8", (moved("runs/x", "runs/a\udcff"),)),
    (375, "config that is a pipe", (fifo("runs/x/config.toml"),)),
    (376, "run that links to itself", (link("runs/loop", "loop"),)),
    (377, "3,000 runs", (many,)),
)
FOLDERS: tuple[tuple[int, str, str, Outcome], ...] = (
    (370, "folder of runs that is a file", "data.jsonl", "either"),
    (371, "folder of runs that is missing", "nope", "either"),
    (372, "folder of runs of 5,000 characters", "x" * 5000, "either"),
    (373, "folder of runs that is /proc", "/proc", "either"),
    (374, "folder of runs that is a pipe", "f", "either"),
)


def cases() -> Iterator[Case]:
    yield Case(321, AREA, "unchanged", RUNS, "taken")
    attach = ("attach", "runs/x")
    yield Case(324, AREA, "attach without a terminal", attach, "either", fresh=True)
    for number, name, edits in LISTED:
        yield Case(number, AREA, name, RUNS, "either", edits)
    yield Case(366, AREA, "times of 1e300, as JSON", AS_JSON, "either", (field("time", 1e300),))
    undecodable = moved("runs/x", "runs/a\udcff")
    yield Case(367, AREA, "run name that is not UTF-8, as JSON", AS_JSON, "either", (undecodable,))
    for number, name, folder, expected in FOLDERS:
        yield Case(number, AREA, name, (*RUNS, "--runs", folder), expected, (fifo("f"),))
    for number, name, folder in (
        (378, "attach to nothing", "nope"),
        (379, "attach to a file", "data.jsonl"),
        (380, "attach to a model", "model"),
    ):
        yield Case(number, AREA, name, ("attach", folder), names=folder)
