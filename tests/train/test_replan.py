"""Plans that are made again with measured times, and runs that compare the steps of both plans."""

import json
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import rptrain.train.session
from rptrain.config.resolve import resolve
from rptrain.engine.engine import Engine
from rptrain.engine.memory.page_locking import Locking
from rptrain.engine.meter import Measured, Meter
from rptrain.planner import memory
from rptrain.planner.memory import plan_run
from rptrain.planner.timings import FILE
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records import events
from rptrain.schedule.estimate import estimate
from rptrain.schedule.plan import Plan
from rptrain.train.job import Job, prepare_job
from rptrain.train.progress import ProgressDisplay
from rptrain.train.replan import COMPARED, Comparison, is_worthwhile, replan
from rptrain.train.steps import StepTimes
from rptrain.train.trainer import Trainer

from .. import run_tools as tools
from ..cases import grid, long

MEASURED = Measured((0.1, 0.2, 0.0), (0.3, 1 / 3, 0.5), upload=1e9, download=None, update=0.25, steps=2)
CONFIG = '[model]\npath = "tiny-tasks"\n[[data.train]]\npath = "builtin:random"\n[engine]\ndevices = "cpu:2"\n'
ONE = "FB0-3"  # the stage of the first plan
# One device: three steps of warm-up, two that are measured, two that are compared; again three and two; two others.
SMALL = ("train.micro_batch_size=4", "train.global_batch_size=16")
SHORT = (*SMALL, "engine.devices=cpu:1", "train.max_steps=14")
LONG = (*SMALL, "engine.devices=cpu:2", "train.max_steps=18")  # five steps of warm-up
Undisturbed = Callable[..., RunDir]


def prepared(folder: Path, *overrides: str) -> Job:
    (folder / "c.toml").write_text(CONFIG)
    return prepare_job(resolve(folder / "c.toml", overrides).config)


def test_a_plan_is_made_for_the_measured_times(tmp_path: Path) -> None:
    job = prepared(tmp_path)
    job = replace(job, plan=tools.with_stages(job.plan, job.spec, "F0-0 F1-1 FB2-2 B1-1 B0-0"))
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


def test_runs_are_measured_if_that_takes_up_to_half_of_their_steps(tmp_path):
    job = prepared(tmp_path)
    job = replace(job, plan=tools.with_stages(job.plan, job.spec, "FB0-2"))
    assert (job.plan.plan.devices, job.warm_up, job.measuring) == (2, 5, 2)
    needed = 2 * (5 + 2 + COMPARED + 5 + COMPARED)
    assert is_worthwhile(job, needed) and not is_worthwhile(job, needed - 1)


@pytest.mark.parametrize(
    ("first", "new", "slower", "said"),
    [
        (0.5, 0.4, False, "the new plan is 25% faster (400 ms per step, 500 ms with the first plan)"),
        (0.5, 0.5, False, "the new plan is 0.0% faster (500 ms per step, 500 ms with the first plan)"),
        (2.0, 2.5, True, "the new plan is slower (2.50 s per step, 2.00 s with the first plan): using the first plan"),
        (None, 0.4, False, "the new plan is used without a comparison"),
        (0.4, None, False, "the new plan is used without a comparison"),
    ],
)
def test_a_comparison(first, new, slower, said):
    found = Comparison(first, new)
    assert found.slower == slower
    assert (found.gain is None) == (None in (first, new))
    assert found.sentence().startswith(said)


# Runs that plan again


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """A run with the first plan; each is trained once."""

    def outcome(*overrides: str) -> RunDir:
        folder = tmp_path_factory.mktemp("undisturbed")
        tools.write_model(folder / "model")
        with pytest.MonkeyPatch.context() as patch:
            tools.plan_with(patch, ONE)
            return tools.train_here(folder, *overrides, "engine.replan=false")

    return cache(outcome)


def check_same(run: RunDir, expected: RunDir) -> None:
    assert run.path != expected.path and run.finished
    assert tools.steps(run) == tools.steps(expected)
    assert tools.state(run) == tools.state(expected)


def stages(run: RunDir) -> list[str]:
    """The stages of each plan with which the run was trained."""
    assert len(tools.events(run, events.Estimated)) == len(tools.events(run, events.Plan))
    return [event.lines[0].split(" |")[0] for event in tools.events(run, events.Plan)]


@pytest.fixture
def metered(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each engine that a run opens, whether it measures."""
    opened: list[bool] = []
    engine = rptrain.train.session.Engine

    def noted(*arguments, **named):
        opened.append(named["observers"].meter is not None)
        return engine(*arguments, **named)

    monkeypatch.setattr(rptrain.train.session, "Engine", noted)
    return opened


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines that a run prints."""
    found: list[str] = []
    monkeypatch.setattr(ProgressDisplay, "note", lambda progress, text: found.append(text))
    return found


def take(monkeypatch: pytest.MonkeyPatch, first: float, new: float) -> None:
    """Steps take this many seconds with the first plan and with the new one."""
    seconds = iter((first, new))
    monkeypatch.setattr(StepTimes, "median", property(lambda times: next(seconds)))


KINDS = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(("optim.update=async",), id="async"),
        grid(("optim.update=async", "engine.round_size=2"), id="two-rounds"),
        grid(("optim.update=sync",), id="sync"),
    ],
)


@KINDS
def test_a_faster_plan_is_kept_and_changes_no_bit(folder, undisturbed, metered, notes, monkeypatch, kind):
    kind = (*LONG, "model.dtype=bfloat16", *kind)
    expected = undisturbed(*kind)
    metered.clear()
    measured = tools.replan_with(monkeypatch, tools.STAGES)
    take(monkeypatch, 0.5, 0.4)
    run = tools.train_here(folder, *kind, "engine.trace=true", "save.save_steps=3")
    check_same(run, expected)
    assert [times.steps for times in measured] == [2]
    assert metered == [True, False]
    assert stages(run) == [ONE, tools.STAGES]
    assert (run.path / FILE).exists()
    assert "the new plan is 25% faster (400 ms per step, 500 ms with the first plan)" in notes
    check_slots(run)


@KINDS
def test_a_slower_plan_is_left_and_changes_no_bit(folder, undisturbed, metered, notes, monkeypatch, kind):
    kind = (*LONG, "model.dtype=bfloat16", *kind)
    expected = undisturbed(*kind)
    metered.clear()
    tools.replan_with(monkeypatch, tools.STAGES)
    take(monkeypatch, 0.4, 0.5)
    run = tools.train_here(folder, *kind, "engine.trace=true", "save.save_steps=4")
    check_same(run, expected)
    assert metered == [True, False, False]
    assert stages(run) == [ONE, tools.STAGES, ONE]
    assert not (run.path / FILE).exists()
    assert "the new plan is slower (500 ms per step, 400 ms with the first plan): using the first plan again" in notes
    check_slots(run)


def check_slots(run: RunDir) -> None:
    """Each step ran with the stages of its plan. A plan's steps are its warm-up, two that are measured with the first
    plan, and two that are compared.
    """
    plans = [Plan.parse(event.lines[0]) for event in tools.events(run, events.Plan)]
    found = {event.step: event.slots for event in tools.events(run, events.Slots)}
    ends = [plans[0].warm_up + 4, plans[0].warm_up + 4 + plans[1].warm_up + 2][: len(plans) - 1]
    assert ends[-1] < len(found)
    for plan, began, last in zip(plans, [0, *ends], [*ends, len(found)], strict=True):
        for step in range(began + 1, last + 1):
            expected = [(slot.device, slot.index, slot.stage.kind) for slot in plan.slots(step - 1 - began)]
            assert [slot[:3] for slot in found[step]] == expected


def test_plans_that_no_step_compares(folder, undisturbed, monkeypatch, notes):
    """Nothing is known of the new plan, and a resumed run measures again. That memory is not page-locked is said once
    for both engines.
    """
    expected = undisturbed(*SHORT)
    tools.replan_with(monkeypatch, tools.STAGES)
    monkeypatch.setattr(Engine, "_lock", lambda *_: Locking(1 << 30, (range(3 << 28),)))
    run = tools.train_here(folder, *SHORT, "save.save_steps=2")
    (slow,) = tools.events(run, events.MemoryNotLocked)
    assert (slow.locked, slow.copied) == (1 << 28, 1 << 30)
    assert notes.count(slow.sentence()) == 1 and "256 MiB of the 1.00 GiB" in slow.sentence()
    check_same(run, expected)
    assert stages(run) == [ONE, tools.STAGES]
    assert not (run.path / FILE).exists()
    assert any(note.startswith("the new plan is used without a comparison") for note in notes)


@pytest.mark.long
def test_both_plans_are_timed(folder, monkeypatch):
    tools.replan_with(monkeypatch, tools.STAGES)
    timed, of = [], Trainer._time_steps
    monkeypatch.setattr(Trainer, "_time_steps", lambda *arguments: timed.append(of(*arguments)) or timed[-1])
    run = tools.train_here(folder, *SHORT)
    assert len(timed) == 2 and min(timed) > 0
    assert (run.path / FILE).exists() == (timed[1] <= timed[0])
    assert stages(run) == [ONE, tools.STAGES, ONE][: 2 + (timed[1] > timed[0])]


def test_the_same_plan_goes_on_with_the_same_engine(folder, undisturbed, metered, monkeypatch):
    expected = undisturbed(*SHORT)
    metered.clear()
    tools.replan_with(monkeypatch, ONE)
    run = tools.train_here(folder, *SHORT)
    check_same(run, expected)
    assert metered == [True] and stages(run) == [ONE]
    assert (run.path / FILE).exists()


def test_the_times_are_kept_and_a_resumed_run_plans_with_them(folder, metered, monkeypatch):
    measured = tools.replan_with(monkeypatch, tools.STAGES)
    take(monkeypatch, 0.5, 0.5)
    run = tools.train_here(folder, *SHORT)
    assert metered == [True, False]
    settings = (*SHORT[:-1], f"save.resume={run.path}")
    tools.train_here(folder, *settings, "train.max_steps=15")
    assert metered == [True, False, False]
    assert len(measured) == 2 and measured[1] == measured[0]
    assert stages(run) == [ONE, tools.STAGES, tools.STAGES]

    (run.path / FILE).write_text("{}")
    take(monkeypatch, 0.5, 0.5)
    tools.train_here(folder, *settings, "train.max_steps=28")
    assert metered == [True, False, False, True, False]
    kept = json.loads((run.path / FILE).read_text())
    assert (kept["conditions"]["tokens"], kept["conditions"]["layers"]) == (4 * 16, 4)
    assert kept["measured"]["backward"] == list(measured[2].backward) != list(measured[0].backward)


@pytest.mark.parametrize("missing", [False, long(True)], ids=["impossible", "missing"])
def test_missing_and_impossible_times_change_no_plan(folder, metered, monkeypatch, caplog, missing):
    """Times are missing if every measured step was skipped."""
    of = Meter.measured
    monkeypatch.setattr(Meter, "measured", lambda *given: None if missing else replace(of(*given), upload=0.0))
    measured = tools.replan_with(monkeypatch, tools.STAGES)
    run = tools.train_here(folder, *SHORT[:-1])
    assert metered == [True] and not measured
    assert run.finished and not (run.path / FILE).exists()
    assert ("0 is not possible as a time or rate" in caplog.text) == (not missing)


@pytest.mark.parametrize("override", ["engine.replan=false", "train.max_steps=6"])
def test_a_run_that_is_not_measured(folder, metered, override):
    run = tools.train_here(folder, override)
    assert metered == [False]
    assert not (run.path / FILE).exists()


@pytest.mark.parametrize(("call", "step"), [long(1, 6), (2, 11)])
def test_stopped_while_steps_are_compared(folder, undisturbed, metered, monkeypatch, call, step):
    expected = undisturbed(*SHORT)
    metered.clear()
    tools.replan_with(monkeypatch, tools.STAGES)
    calls, of = [], Trainer._time_steps

    def stopping(trainer, engine):
        calls.append(engine.plan)
        if len(calls) == call:
            (trainer._run.control_path / "STOP").touch()
        return of(trainer, engine)

    monkeypatch.setattr(Trainer, "_time_steps", stopping)
    run = tools.train_here(folder, *SHORT)
    assert [event.step for event in tools.events(run, events.Stopped)] == [step]
    assert not run.finished and not (run.path / FILE).exists()
    tools.train_here(folder, *SHORT)
    check_same(run, expected)
    assert metered[:call] == [True, False][:call] and metered[call:][0], "measured again"


@pytest.mark.long
@pytest.mark.parametrize(("killed", "resumed"), [(5, 3), grid(7, 6), grid(9, 6), (12, 9)])
def test_killed_while_plans_are_chosen(folder, trainers, undisturbed, monkeypatch, killed, resumed):
    """While layers are measured, while steps are compared, while the new plan's engine warms up."""
    settings = (*SHORT, "save.save_steps=3")
    assert trainers.train(folder, *settings, event=killed, replan=tools.STAGES) == -signal.SIGKILL
    assert len(tools.events(RunDir(folder / "runs/run"), events.Plan)) == 1 + (killed > 7)
    tools.replan_with(monkeypatch, tools.STAGES)
    run = tools.train_here(folder, *settings)
    assert [event.step for event in tools.events(run, events.Resumed)] == [resumed]
    check_same(run, undisturbed(*SHORT))


@pytest.mark.parametrize("last", [long(6), 11])
def test_early_stopping_while_steps_are_compared(folder, metered, monkeypatch, last):
    tools.replan_with(monkeypatch, tools.STAGES)
    of = Trainer._after_step

    def ending(trainer, engine, step):
        if step == last:
            trainer._last = last
        of(trainer, engine, step)

    monkeypatch.setattr(Trainer, "_after_step", ending)
    run = tools.train_here(folder, *SHORT)
    assert run.finished and max(tools.steps(run)) == last
    assert metered == [True, False][: 1 + (last > 7)]
    assert not (run.path / FILE).exists()
