"""Event records on disk, and their sentences."""

import json
import math
import os
from dataclasses import MISSING, FrozenInstanceError, fields
from pathlib import Path

import pytest

from rptrain.runs.folder.event_log import EventLog, is_finished
from rptrain.runs.records import events as metrics
from rptrain.runs.records.events import SlotTime, read
from rptrain.runs.records.fields import known_fields
from rptrain.runs.records.timeline import Schedule, SlotSpan, StepTimeline
from rptrain.utils.errors import RunDeleted, UserError

from .. import run_tools as tools

EVENTS = [
    metrics.RunStarted("abc", "0.1.0", ("cpu:0", "cpu:1"), "tiny-tasks", 430_000, 60.5, time=1.0),
    metrics.ProcessStarted(
        7,
        "here",
        "boot/12",
        10,
        1,
        ({"name": "host", "kind": "x", "parts": [["weights", 5]], "limit": None},),
        time=1.5,
    ),
    metrics.Plan(("F1 0-1", "FB 2"), time=2.0),
    metrics.Estimated(
        0.5,
        0.25,
        0.375,
        Schedule(("F0-1", "FB2-2", "B0-1"), 2, 3, StepTimeline(4, 0.5, (0.75, 0.5), ((SlotSpan(0, 0.0, 0.25),), ()))),
        time=2.5,
    ),
    metrics.Step(1, 4.5, 1e-3, 0.75, 1024, 300, 12_345.6, time=3.0),
    metrics.Step(2, None, 1e-3, None, 1024, 300, 12_345.6, skipped=True, time=4.0),
    metrics.Progress(
        2, "training", 60.1, 1e4, 1 << 33, 1 << 34, (0.75, 0.5), (1 << 30, 1 << 31), (310.5, 0.5), time=4.1
    ),
    metrics.LossScale(2, 32768.0, time=4.5),
    metrics.StepSkipped(2, 1, (0,), (3, 4), ("a b", "c"), time=4.6),
    metrics.Slots(2, (SlotTime(0, 1, "FB", 0, 2, 0, 0.5, 0.75),), time=5.0),
    metrics.Evaluation(2, "tasks", 0.5, {"reverse": 0.25, "sort": 0.75}, time=6.0),
    metrics.Sample(2, "2 + 2?", "5", time=6.5),
    metrics.CheckpointSaved(2, "checkpoints/checkpoint-2", 1.5, 0.25, 0.5, time=7.0),
    metrics.SaveFailed(2, "no space", time=7.1),
    metrics.RowsLeftOut(2, 600, ("chats.jsonl:51: not valid JSON",), time=7.1),
    metrics.MemoryNotLocked(1 << 30, 3 << 30, "raise it", time=7.12),
    metrics.RecordsLost(3, "no space", time=7.15),
    metrics.TrackerFailed("wandb", "gone", time=7.16),
    metrics.TelemetryFailed("no driver", time=7.17),
    metrics.Paused(2, time=7.2),
    metrics.Continued(2, time=7.3),
    metrics.Stopped(2, "STOP", time=7.4),
    metrics.Stalled(2, 600.0, "stalled-2.txt", {"optimizer": "grad 3, number 2"}, time=7.45),
    metrics.LossesRepeated(605, 700, 20, time=7.46),
    metrics.LossDiffers(655, 0.5, None, time=7.47),
    metrics.CheckpointDamaged("checkpoints/checkpoint-4", "it differs", time=7.5),
    metrics.MemoryLow(1 << 40, 1 << 30, time=7.6),
    metrics.ProcessSlow(20, "process 1 on there", 1.5, 1.0, time=7.65),
    metrics.Resumed(2, "checkpoints/checkpoint-2", time=8.0),
    metrics.BestLoaded(2, "checkpoints/checkpoint-2", 0.75, time=8.5),
    metrics.Failed("device cuda:0, stage 2: out of memory", time=9.0),
    metrics.Finished(2, time=10.0),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def write(path: Path, *events: metrics.Event) -> None:
    with EventLog(path) as log:
        for event in events:
            log.write(event)


def test_events_come_back_as_they_were(path):
    assert {type(event) for event in EVENTS} == set(metrics.EVENTS.values())
    write(path, *EVENTS)
    assert list(read(path)) == EVENTS
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        assert record["schema"] == 1 and record["event"] in metrics.EVENTS and record["time"] > 0


def test_the_fields_of_schema_1():
    """They are frozen but for additions: any other change of this table is a new schema."""
    assert {name: [field.name for field in fields(kind)[1:]] for name, kind in metrics.EVENTS.items()} == {
        "run_started": ["config_hash", "version", "devices", "model", "parameters", "trained"],
        "process_started": ["pid", "host", "birth", "total_steps", "staleness", "memory", "processes"],
        "plan": ["lines"],
        "estimated": ["step_seconds", "bubble", "floor_seconds", "schedule"],
        "step": [
            "step",
            "loss",
            "learning_rate",
            "grad_norm",
            "tokens",
            "supervised",
            "tokens_per_second",
            "skipped",
            "warm_up",
            "compiled",
            "epoch",
            "skips",
        ],
        "progress": [
            "step",
            "phase",
            "seconds",
            "tokens_per_second",
            "process",
            "free",
            "busy",
            "memory",
            "power",
        ],
        "loss_scale": ["step", "scale"],
        "step_skipped": ["step", "in_a_row", "micro_batches", "rows", "texts"],
        "slots": ["step", "slots"],
        "evaluation": ["step", "name", "score", "tasks"],
        "sample": ["step", "prompt", "text"],
        "checkpoint_saved": ["step", "path", "seconds", "paused", "save_pause_s"],
        "save_failed": ["step", "message"],
        "rows_left_out": ["bad", "total", "first", "problem"],
        "memory_not_locked": ["locked", "copied", "advice"],
        "records_lost": ["count", "message"],
        "tracker_failed": ["name", "message"],
        "telemetry_failed": ["message"],
        "checkpoint_damaged": ["path", "message"],
        "paused": ["step"],
        "stalled": ["step", "seconds", "path", "waiting", "phase"],
        "continued": ["step"],
        "stopped": ["step", "by"],
        "memory_low": ["taken", "free"],
        "process_slow": ["step", "process", "seconds", "median"],
        "resumed": ["step", "path"],
        "losses_repeated": ["first", "last", "count"],
        "loss_differs": ["step", "loss", "recorded"],
        "best_loaded": ["step", "path", "loss"],
        "finished": ["step"],
        "failed": ["message"],
    }
    assert metrics.SCHEMA == 1
    with pytest.raises(FrozenInstanceError):
        EVENTS[-1].step = 3


def test_numbers_that_json_has_not_are_null(path):
    write(path, metrics.Step(1, math.nan, 1e-3, math.inf, 8, 8, 1.0))
    (step,) = read(path)
    assert step.loss is None and step.grad_norm is None
    assert "NaN" not in path.read_text() and "Infinity" not in path.read_text()
    diverged = metrics.from_line(metrics.to_line(metrics.Evaluation(2, metrics.VALIDATION_LOSS, math.nan)))
    assert diverged.score is None and diverged.sentence() == "step 2: validation loss not finite"


def test_scores_as_text():
    assert metrics.describe_score("exact_match", 0.974) == ("exact match", "97.4%")
    assert metrics.describe_score(metrics.VALIDATION_LOSS, 1.31554) == ("validation loss", "1.3155")


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_the_fields_of_a_record_are_checked_and_converted(event):
    kind, record = type(event), json.loads(metrics.to_line(event))
    assert kind(**known_fields(record | {"of_a_later_version": 1}, kind)) == event
    assert all(known_fields({}, kind)[one.name] == one.default for one in fields(kind) if one.default is not MISSING)
    assert not known_fields({}, kind).keys() & {one.name for one in fields(kind) if one.default is MISSING}
    for name in record.keys() - {"schema", "event"}:
        number = type(record[name]) in (int, float)
        for wrong in (True, str(record[name]), 10**400, math.inf) if number else ([None],):
            with pytest.raises(ValueError, match=name):
                known_fields({name: wrong}, kind)


def test_each_record_is_flushed(path):
    log = EventLog(path)
    log.write(EVENTS[0])
    assert list(read(path)) == EVENTS[:1]
    log.close()


@pytest.mark.parametrize("torn", [b'{"schema":1,"event":"st', b"\0" * 10_000, b"{}"], ids=["cut", "zeros", "object"])
def test_a_torn_last_line_is_left_out_and_cut(path, torn):
    write(path, *EVENTS[:2])
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert list(read(path)) == EVENTS[:2]
    write(path, EVENTS[2])
    assert path.read_bytes().startswith(whole)
    assert list(read(path)) == EVENTS[:3]


def test_a_file_that_is_one_torn_line(path):
    path.write_bytes(b"x" * 9000)
    write(path, EVENTS[0])
    assert list(read(path)) == EVENTS[:1]


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "[1]",
        "no json",
        "[" * 100_000,
        '{"schema":1,"event":"finished"}',
        '{"schema":1,"event":"x"}',
        '{"schema":1,"event":"slots","step":1,"slots":null,"time":1}',
        '{"schema":1,"event":"finished","step":%s,"time":1}' % ("9" * 5000),
    ],
    ids=["empty", "list", "text", "deep", "fields-missing", "unknown-event", "null", "digits"],
)
def test_a_line_that_is_no_record_is_named(path, line):
    write(path, EVENTS[0])
    with open(path, "a") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match=r"events\.jsonl:2: not an event record"):
        list(read(path))


def test_a_newer_schema_is_said_to_be_newer(path):
    path.write_text('{"schema":2,"event":"finished","step":1,"time":1.0}\n')
    with pytest.raises(UserError, match="newer rptrain"):
        list(read(path))


def test_what_finds_no_room_is_counted_and_nothing_else_is_lost(path, caplog):
    told = []
    with EventLog(path) as log:
        log.listen(told.append)
        log.write(EVENTS[0])
        with tools.room_for(path.stat().st_size + 20):
            log.write(EVENTS[1])
            assert list(read(path)) == EVENTS[:1] and not path.read_bytes().endswith(b"\n")
            log.write(EVENTS[2])
        log.write(EVENTS[3])
        log.write(EVENTS[4])
        with tools.room_for(path.stat().st_size + 20):
            log.write(EVENTS[5])
    first, lost, *rest = read(path)
    assert first == EVENTS[0] and rest == EVENTS[3:5] and told == EVENTS[:6]
    assert isinstance(lost, metrics.RecordsLost) and (lost.count, lost.message) == (2, "File too large")
    assert [line.split(": ")[-1] for line in caplog.messages] == [
        "File too large. The run continues without records",
        "File too large. The run continues without records",
        f"{path} lacks the last 1 records",
    ]
    write(path, EVENTS[6])
    assert list(read(path)) == [first, lost, *rest, EVENTS[6]]


@pytest.mark.parametrize("again", [False, True])
def test_a_file_that_was_deleted_takes_no_record(path, again, caplog):
    """Nor does another one in its place. The system would take it without an error."""
    told = []
    with EventLog(path) as log:
        log.listen(told.append)
        log.write(EVENTS[0])
        path.unlink()
        if again:
            path.touch()
        for _ in range(2):
            with pytest.raises(RunDeleted, match=f"{path.parent} was deleted .*: nothing more can be saved"):
                log.write(EVENTS[1])
            with pytest.raises(RunDeleted):
                log.check()
    assert told == EVENTS[:1] and not caplog.messages
    assert path.read_bytes() == b"" if again else not path.exists()


def test_one_process_at_a_time(path):
    with EventLog(path), pytest.raises(UserError, match="another process"):
        EventLog(path)
    EventLog(path).close()


def test_is_finished(path):
    write(path, *EVENTS)
    assert is_finished(path)
    write(path, metrics.Resumed(2, "x"))
    assert not is_finished(path)
    write(path, metrics.Slots(2, (SlotTime(0, 1, "FB", 0, 2, 0, 0.5, 0.75),) * 500))
    assert not is_finished(path)
    write(path, metrics.Finished(3))
    assert is_finished(path)
    path.write_bytes(b"")
    assert not is_finished(path)


def test_a_file_that_cannot_be_written(tmp_path):
    with pytest.raises(UserError, match="cannot be written: Is a directory; make it writable, or start a new run"):
        EventLog(tmp_path)


def test_a_file_whose_end_is_not_lines(tmp_path):
    file = tmp_path / "events.jsonl"
    file.write_bytes(b"{}\n")
    os.truncate(file, 20 << 30)
    with pytest.raises(UserError, match=r"events\.jsonl is damaged: its last 256 MiB are not lines; move"):
        EventLog(file)
    os.truncate(file, 1 << 20)
    EventLog(file).close()
    assert file.read_bytes() == b"{}\n", "what a killed process left is cut off"
