"""Measured times: on disk, where they hold, and in runs that plan again with them."""

import json
import logging
import math
from dataclasses import replace
from pathlib import Path

import pytest

import rptrain.train.setup
import rptrain.train.trainer
from rptrain.config.resolve import resolve
from rptrain.engine.meter import Measured, Meter
from rptrain.planner import memory
from rptrain.planner.memory import plan_run
from rptrain.planner.timings import FILE, Conditions, Timings, load
from rptrain.runs import events
from rptrain.runs.run_dir import RunDir
from rptrain.schedule.estimate import estimate
from rptrain.schedule.plan import Plan
from rptrain.train.job import Job, prepare_job, replan

from .. import run_tools as tools
from ..cases import long

CONDITIONS = Conditions(("a GPU",), tokens=64, length=32, dtype="bfloat16", layers=3)
MEASURED = Measured((0.1, 0.2, 0.0), (0.3, 1 / 3, 0.5), upload=1e9, download=None, update=0.25, steps=2)
CONFIG = '[model]\npath = "tiny-tasks"\n[[data.train]]\npath = "builtin:random"\n[engine]\ndevices = "cpu:2"\n'


def test_what_was_saved_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load(tmp_path, CONDITIONS) is None
    assert Timings(CONDITIONS, replace(MEASURED, steps=1)).save(tmp_path)
    assert Timings(CONDITIONS, MEASURED).save(tmp_path)
    assert load(tmp_path, CONDITIONS) == MEASURED
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert not caplog.records


def test_an_update_without_time_and_an_unwritable_folder_do_not_hinder_plans(tmp_path, caplog):
    assert Timings(CONDITIONS, replace(MEASURED, update=0.0)).save(tmp_path)
    assert not caplog.records
    assert Timings(CONDITIONS, MEASURED).save(tmp_path / "missing")
    assert "cannot be written" in caplog.text


def test_the_format_of_the_file_stays(tmp_path: Path) -> None:
    """A run of an earlier version is not measured again."""
    (tmp_path / FILE).write_text(
        """{"conditions": {"devices": ["a GPU"], "tokens": 64, "length": 32, "dtype": "bfloat16", "layers": 3},
        "measured": {"forward": [0.1, 0.2, 0.0], "backward": [0.3, 0.3333333333333333, 0.5], "upload": 1e9,
        "download": null, "update": 0.25, "steps": 2}}"""
    )
    assert load(tmp_path, CONDITIONS) == MEASURED


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"devices": ("a GPU", "b")}, "the kind of device was a GPU, is a GPU and b;"),
        ({"tokens": 32}, "tokens per micro-batch (train.micro_batch_size × data.max_length) was 64, is 32;"),
        ({"length": 64}, "data.max_length was 32, is 64;"),
        ({"dtype": "float32"}, 'model.dtype was "bfloat16", is "float32";'),
        ({"layers": 4}, "the number of layers was 3, is 4;"),
    ],
)
def test_times_of_other_conditions_are_not_used(tmp_path, caplog, change, said):
    Timings(CONDITIONS, MEASURED).save(tmp_path)
    assert load(tmp_path, replace(CONDITIONS, **change)) is None
    assert f"does not apply: {said} the layers are measured again" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        {"forward": (0.1, math.nan, 0.0)},
        {"forward": (0.0, 0.2, 0.0)},
        {"forward": (0.1, 0.0)},
        {"forward": ()},
        {"backward": (0.3, 0.3, 0.0)},
        {"backward": (0.3, -0.3, 0.5)},
        {"upload": math.inf},
        {"upload": 5e-324},
        {"backward": (0.3, 1e308, 0.5)},
        {"update": -0.25},
    ],
)
def test_impossible_times_are_not_stored(tmp_path, caplog, change):
    Timings(CONDITIONS, MEASURED).save(tmp_path)
    before = (tmp_path / FILE).read_bytes()
    assert not Timings(CONDITIONS, replace(MEASURED, **change)).save(tmp_path)
    assert "the measured times are not stored" in caplog.text
    assert (tmp_path / FILE).read_bytes() == before


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace('"steps"', '"stops"'),
        lambda text: text.replace("0.25", '"0.25"'),
        lambda text: text.replace("0.2,", ""),
        lambda text: text.replace("0.2,", "NaN,"),
        lambda text: text.replace("0.25", "-0.25"),
        lambda text: text.replace("1000000000.0", "0.0"),
        lambda text: text.replace("0.2,", "0.0,"),
        lambda text: text.replace("a GPU", "a \udcff"),
    ],
    ids=["cut", "empty", "list", "key", "text", "shorter", "nan", "negative", "zero", "zero-time", "surrogate"],
)
def test_a_broken_file_is_not_used(tmp_path, caplog, damage):
    Timings(CONDITIONS, MEASURED).save(tmp_path)
    whole = (tmp_path / FILE).read_text()
    (tmp_path / FILE).write_text(damage(whole), errors="surrogateescape")
    assert (tmp_path / FILE).read_text(errors="surrogateescape") != whole
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path, CONDITIONS) is None
    assert FILE in caplog.text and "measured again" in caplog.text


def prepared(folder: Path, *overrides: str) -> Job:
    (folder / "c.toml").write_text(CONFIG)
    return prepare_job(resolve(folder / "c.toml", overrides).config)


def test_the_conditions_of_a_job(tmp_path: Path) -> None:
    job = prepared(tmp_path, "train.micro_batch_size=2", "data.max_length=16", "model.dtype=float32")
    found = Conditions.of(job.config, job.spec, job.hardware)
    assert (found.tokens, found.length, found.dtype) == (32, 16, "float32")
    assert found.layers == len(job.spec.layers) + 1
    assert len(found.devices) == 1, "two workers of one kind"


def test_a_plan_is_made_for_the_measured_times(tmp_path: Path) -> None:
    job = prepared(tmp_path)
    job = replace(job, plan=tools.with_stages(job.plan, "F0-0 F1-1 FB2-2 B1-1 B0-0"))
    count = len(job.spec.stack)
    forward = (*(0.5 + i for i in range(count - 1)), 0.0)
    measured = Measured(forward, tuple(2.5 + i for i in range(count)), 5e9, 4e9, 0.25, 2)
    plan = replan(job, measured)
    assert plan.plan != job.plan.plan
    assert tuple(cost.forward for cost in plan.costs[:-1]) == forward[:-1]
    assert [cost.backward for cost in plan.costs] == [a + b for a, b in zip(forward, measured.backward, strict=True)]
    assert plan.setting.links is not None
    assert (plan.setting.links.up, plan.setting.links.down) == (5e9, 4e9)


def test_a_plan_that_gains_next_to_nothing_is_not_taken(tmp_path, monkeypatch):
    job = prepared(tmp_path)
    for gain, taken in ((0.001, False), (0.02, True)):
        quicker = replace(job.plan.estimate, period=job.plan.estimate.period * (1 - gain))
        other = replace(job.plan, estimate=quicker)
        monkeypatch.setattr(memory, "make_plan", lambda *arguments, other=other, **named: other)
        found = replan(job, MEASURED)
        assert (found is other) == taken
        if not taken:  # its own stages, but the time that they take as measured
            assert found.plan is job.plan.plan and found.costs is other.costs
            assert found.estimate == estimate(other.costs, job.plan.plan.stages, other.setting)


def test_a_plan_that_the_host_has_no_room_for_is_not_taken(tmp_path, monkeypatch, caplog):
    job = prepared(tmp_path)
    room = plan_run(job.config, job.spec, job.hardware)[1].host.total + 1000
    quicker = replace(job.plan.estimate, period=0.0)
    other = replace(job.plan, estimate=quicker, boundary_bytes=job.plan.boundary_bytes + 1000)
    monkeypatch.setattr(memory, "make_plan", lambda *arguments, **named: other)
    job = replace(job, hardware=replace(job.hardware, host=room))
    assert replan(job, MEASURED) is other
    assert not caplog.records
    other = replace(other, boundary_bytes=other.boundary_bytes + 1)
    assert replan(job, MEASURED).plan is job.plan.plan
    assert "host memory" in caplog.text


# Runs that plan again


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tools.write_model(tmp_path / "model")
    return tmp_path


def check_same(run: RunDir, expected: RunDir) -> None:
    assert run.path != expected.path and run.finished
    assert tools.steps(run) == tools.steps(expected)
    assert tools.state(run) == tools.state(expected)


@pytest.fixture
def metered(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each engine that a run opens, whether it measures."""
    opened: list[bool] = []
    engine = rptrain.train.setup.Engine

    def noted(*arguments, **named):
        opened.append(named["meter"] is not None)
        return engine(*arguments, **named)

    monkeypatch.setattr(rptrain.train.setup, "Engine", noted)
    return opened


@pytest.fixture
def other_plan(monkeypatch: pytest.MonkeyPatch) -> list[Measured]:
    """Measured times give these stages, whatever they are, and estimates one; what was planned with."""
    calls: list[Measured] = []

    def replan(job, measured):
        calls.append(measured)
        return tools.with_stages(job.plan, tools.STAGES)

    tools.plan_with(monkeypatch, "FB0-3")
    monkeypatch.setattr(rptrain.train.trainer, "replan", replan)
    return calls


@pytest.mark.parametrize("update", ["async", long("sync")])
@pytest.mark.parametrize("rounds", [(), ("engine.round_size=2",)], ids=["one-round", "two-rounds"])
def test_another_plan_after_the_first_steps_changes_no_bit(folder, metered, other_plan, update, rounds):
    kind = (f"optim.update={update}", "model.dtype=bfloat16", *rounds)
    expected = tools.train_here(folder, *kind, "engine.replan=false")
    metered.clear()
    run = tools.train_here(folder, *kind, "engine.trace=true", "save.save_steps=2")
    check_same(run, expected)
    (measured,) = other_plan
    assert measured.steps == 2
    assert metered == [True, False]
    first, second = (Plan.parse(event.lines[0]) for event in tools.events(run, events.Plan))
    assert (len(first.stages), len(second.stages)) == (1, 5)
    for event in tools.events(run, events.Slots):
        expected_slots = first.slots(event.step - 1) if event.step <= 3 else second.slots(event.step - 4)
        assert [slot[:3] for slot in event.slots] == [(s.device, s.index, s.stage.kind) for s in expected_slots]
    assert [event.step for event in tools.events(run, events.Slots)] == [1, 2, 3, 4, 5, 6]


def test_the_same_plan_goes_on_with_the_same_engine(folder, metered, monkeypatch):
    expected = tools.train_here(folder, "engine.replan=false")
    metered.clear()
    monkeypatch.setattr(rptrain.train.trainer, "replan", lambda job, measured: job.plan)
    run = tools.train_here(folder)
    check_same(run, expected)
    assert metered == [True]
    assert len(tools.events(run, events.Plan)) == 1


def test_the_times_are_kept_and_a_resumed_run_plans_with_them(folder, metered, other_plan):
    run = tools.train_here(folder)
    assert metered == [True, False]
    resume = f"save.resume={run.path}"
    tools.train_here(folder, "train.max_steps=12", resume)
    assert metered == [True, False, False]
    assert len(other_plan) == 2 and other_plan[1] == other_plan[0]
    plans = [Plan.parse(event.lines[0]) for event in tools.events(run, events.Plan)]
    assert [len(plan.stages) for plan in plans] == [1, 5, 5]

    (run.path / FILE).write_text("{}")
    tools.train_here(folder, "train.max_steps=18", resume)
    assert metered == [True, False, False, True, False]
    kept = json.loads((run.path / FILE).read_text())
    assert (kept["conditions"]["tokens"], kept["conditions"]["layers"]) == (16 * 16, 4)
    assert kept["measured"]["backward"] == list(other_plan[2].backward) != list(other_plan[0].backward)


def test_impossible_times_change_no_plan(folder, metered, other_plan, monkeypatch, caplog):
    measured = Meter.measured
    monkeypatch.setattr(Meter, "measured", lambda *given: replace(measured(*given), upload=0.0))
    run = tools.train_here(folder)
    assert metered == [True] and not other_plan
    assert not (run.path / FILE).exists() and "0 is not possible as a time or rate" in caplog.text


@pytest.mark.parametrize("override", ["engine.replan=false", "train.max_steps=4"])
def test_a_run_that_is_not_measured(folder, metered, override):
    run = tools.train_here(folder, override)
    assert metered == [False]
    assert not (run.path / FILE).exists()
