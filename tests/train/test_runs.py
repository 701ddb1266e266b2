"""Whole runs from config to exported model: killed and resumed, on other devices, in other portions, exported."""

import json
import signal
import stat
import time
from collections.abc import Callable
from functools import cache
from itertools import groupby, pairwise, product
from random import Random
from types import SimpleNamespace

import pytest

from rptrain.engine.devices import cpu
from rptrain.engine.devices.base import STREAMS
from rptrain.models.families import registry
from rptrain.models.locate import read_config
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.folder.run_log import FILE
from rptrain.runs.records import events
from rptrain.runs.view.run_view import RunView
from rptrain.schedule.plan import Plan
from rptrain.utils.errors import TrainingError, UserError
from rptrain.utils.replacing import PARTIAL

from .. import run_tools as tools
from ..cases import grid

EVERY_TWO = ("save.save_steps=2", "save.save_total_limit=1")
Undisturbed = Callable[..., SimpleNamespace]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """State and steps of a run that nothing happened to; each is trained once."""

    def outcome(*overrides: str) -> SimpleNamespace:
        folder = tmp_path_factory.mktemp("undisturbed")
        tools.write_model(folder / "model")
        run = tools.train_here(folder, *overrides)
        return SimpleNamespace(state=tools.state(run), steps=tools.steps(run))

    return cache(outcome)


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of several stages: one is what is planned for models as small as these."""
    tools.plan_with(monkeypatch, tools.STAGES)


def check_same(run: RunDir, expected: SimpleNamespace) -> None:
    assert run.finished
    assert tools.steps(run) == expected.steps
    assert tools.state(run) == expected.state


# Killed and resumed


@pytest.mark.sample(1, gate=2)
@pytest.mark.parametrize(("update", "dtype"), [("async", "bfloat16"), ("sync", "float32")])
def test_killed_twice_and_resumed(folder, trainers, undisturbed, update, dtype):
    """The run crosses an epoch, at step 4, and one kill leaves a record half written."""
    kind = (f"optim.update={update}", f"model.dtype={dtype}")
    assert trainers.train(folder, *kind, *EVERY_TWO, event=3) == -signal.SIGKILL
    assert trainers.train(folder, *kind, *EVERY_TWO, event=6) == -signal.SIGKILL
    run = tools.train_here(folder, *kind, *EVERY_TWO)
    assert [event.step for event in tools.events(run, events.Resumed)] == [2, 4]
    repeated = [(event.first, event.last) for event in tools.events(run, events.LossesRepeated)]
    assert repeated == [(5, 5)]  # steps 3 and 6 were not recorded
    check_same(run, undisturbed(*kind))
    losses = [loss for loss, _, _ in tools.steps(run).values()]
    assert len(set(losses)) == 6 and losses[-1] < losses[0]


@pytest.mark.long
@pytest.mark.parametrize("update", ["async", grid("sync")])
def test_killed_twice_and_resumed_in_fp8(folder, trainers, undisturbed, update):
    """Codes of the generation before are in the checkpoint, those of the newest one are made again."""
    kind = (f"optim.update={update}", "model.dtype=bfloat16", "engine.fp8=true")
    assert trainers.train(folder, *kind, *EVERY_TWO, event=3) == -signal.SIGKILL
    assert trainers.train(folder, *kind, *EVERY_TWO, "engine.devices=cpu:1", event=6) == -signal.SIGKILL
    with pytest.raises(UserError, match=r"engine\.fp8 was true, is false"):
        tools.train_here(folder, *kind[:2], *EVERY_TWO)
    run = tools.train_here(folder, *kind, *EVERY_TWO)
    assert [event.step for event in tools.events(run, events.Resumed)] == [2, 4]
    check_same(run, undisturbed(*kind))
    assert tools.steps(run) != undisturbed(*kind[:2]).steps


@pytest.mark.sample(1, gate=2)
@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_killed_and_resumed_with_small_moments(folder, trainers, undisturbed, moments):
    """Rounding goes on with the random numbers that it would have drawn."""
    kind = (f"optim.moments={moments}", "model.dtype=bfloat16")
    assert trainers.train(folder, *kind, *EVERY_TWO, "engine.devices=cpu:1", event=5) == -signal.SIGKILL
    with pytest.raises(UserError, match=f'optim.moments was "{moments}", is "fp32"'):
        tools.train_here(folder, kind[1], *EVERY_TWO)
    run = tools.train_here(folder, *kind, *EVERY_TWO)
    assert [event.step for event in tools.events(run, events.Resumed)] == [4]
    check_same(run, undisturbed(*kind))
    assert tools.steps(run) != undisturbed(kind[1]).steps


@pytest.mark.parametrize("update", ["async", grid("sync")])
def test_killed_twice_and_resumed_in_float16(folder, trainers, undisturbed, update):
    """The loss scale rises until gradients overflow, behind the first checkpoint, and what it was goes on."""
    kind = (f"optim.update={update}", "model.dtype=float16", "optim.loss_scale=262144", "optim.loss_scale_steps=1")
    assert trainers.train(folder, *kind, *EVERY_TWO, event=3) == -signal.SIGKILL
    assert trainers.train(folder, *kind, *EVERY_TWO, "engine.devices=cpu:1", event=6) == -signal.SIGKILL
    run = tools.train_here(folder, *kind, *EVERY_TWO)
    assert [event.step for event in tools.events(run, events.Resumed)] == [2, 4]
    check_same(run, undisturbed(*kind))
    scales = [(event.step, event.scale) for event in tools.events(run, events.LossScale)]
    assert scales[0] == (1, 262144) and len({scale for _, scale in scales}) > 1
    skipped = {event.step for event in tools.events(run, events.Step) if event.skipped}
    assert skipped and 1 not in skipped


@pytest.mark.sample(1, gate=2)
@pytest.mark.parametrize("update", ["async", "sync"])
def test_another_plan_after_the_first_steps_keeps_the_loss_scale(folder, undisturbed, monkeypatch, update):
    """The second engine begins after step 7, and the run ends before plans are compared."""
    kind = (f"optim.update={update}", "model.dtype=float16", "optim.loss_scale=262144", "optim.loss_scale_steps=1")
    kind += ("engine.devices=cpu:1", "train.max_steps=9")
    expected = undisturbed(*kind)
    tools.replan_with(monkeypatch, tools.STAGES)
    run = tools.train_here(folder, *kind)
    check_same(run, expected)
    assert len(tools.events(run, events.Plan)) == 2
    scales = [(event.step, event.scale) for event in tools.events(run, events.LossScale)]
    assert {scale for step, scale in scales if step <= 7} != {262144.0}, "it has changed before"


def test_a_loss_scale_below_1_ends_the_run(folder):
    kind = ("model.dtype=float16", "optim.loss_scale=4", "optim.learning_rate=1e30", "train.max_steps=20")
    with pytest.raises(TrainingError, match=r'step \d+ were not finite in float16.*model.dtype="bfloat16"'):
        tools.train_here(folder, *kind)
    (run,) = (folder / "runs").iterdir()
    scales = [event.scale for event in tools.events(RunDir(run), events.LossScale)]
    assert scales == [4, 2, 1]
    assert "loss scale would fall below 1" in tools.events(RunDir(run), events.Failed)[0].message


@pytest.mark.long
@pytest.mark.parametrize("call", [1, grid(2), 9, grid(16), 17, 18, grid(19), 20, 26])
def test_killed_while_saving(folder, trainers, undisturbed, call):
    """Before its own folder, the first and a middle file is synced, the folders, the renaming; while the old checkpoint
    is deleted.
    """
    assert trainers.train(folder, *EVERY_TWO, save=(4, call)) == -signal.SIGKILL
    run = tools.train_here(folder, *EVERY_TWO)
    assert [event.step for event in tools.events(run, events.Resumed)] == [2 if call <= 17 else 4]
    check_same(run, undisturbed())
    assert [path.name for path in run.checkpoints_path.iterdir()] == ["checkpoint-6"]


def test_taken_back_to_an_older_checkpoint(folder, trainers, undisturbed):
    """A run of its own goes on from there; the one that it came from stays as it is."""
    assert trainers.train(folder, "save.save_steps=2", event=6) == -signal.SIGKILL
    first = RunDir(folder / "runs/run")
    before = {path: path.read_bytes() for path in first.path.rglob("*") if path.is_file()}
    run = tools.train_here(folder, *EVERY_TWO, f"save.resume={first.checkpoint_path(2)}")
    assert run.path.name == "run-2"
    assert [event.step for event in tools.events(run, events.Resumed)] == [2]
    assert tools.state(run) == undisturbed().state
    assert tools.steps(run) == {step: values for step, values in undisturbed().steps.items() if step > 2}
    assert before == {path: path.read_bytes() for path in first.path.rglob("*") if path.is_file()}


def test_killed_before_anything_was_saved(folder, trainers, undisturbed):
    assert trainers.train(folder, event=3) == -signal.SIGKILL
    run = tools.train_here(folder)
    assert run.path.name == "run-2" and not tools.events(run, events.Resumed)
    check_same(run, undisturbed())


def test_killed_after_the_last_save(folder, trainers, undisturbed):
    """All steps are done, and only the export is left."""
    assert trainers.train(folder, *EVERY_TWO, save=(6, 19)) == -signal.SIGKILL
    trained = RunView(folder / "runs/run").trained
    run = tools.train_here(folder, *EVERY_TWO)
    assert [event.step for event in tools.events(run, events.Resumed)] == [6]
    assert [event.trained for event in tools.events(run, events.RunStarted)] == [0.0, trained]
    check_same(run, undisturbed())


# Runs at the start of a process: its run does not end before the signal was sent, however late that is.
HELD = """
import os, time
from rptrain.runs.folder.event_log import EventLog
from rptrain.runs.records.events import Step
write = EventLog.write
def held(log, event):
    write(log, event)
    while isinstance(event, Step) and event.step == 80 and not os.path.exists(os.environ["SENT"]):
        time.sleep(0.01)
EventLog.write = held
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "code", "every"),
    [grid(signal.SIGKILL, -signal.SIGKILL, 10), (signal.SIGINT, 130, 0)],
)
def test_the_command_killed_and_interrupted(folder, undisturbed, monkeypatch, number, code, every):
    """What a shell starts, and then the same again. An interrupt is obeyed with a checkpoint, wherever it comes."""
    (folder / "site").mkdir()
    (folder / "site/sitecustomize.py").write_text(HELD)
    monkeypatch.setenv("PYTHONPATH", str(folder / "site"))
    monkeypatch.setenv("SENT", str(folder / "sent"))
    overrides = ("train.max_steps=100", "optim.lr_scheduler_type=linear", f"save.save_steps={every}")
    tools.write_config(folder)
    command = tools.command("--config", folder / "run.toml", *overrides)
    run = RunDir(folder / "runs/run")
    try:
        tools.wait_for(lambda: run.events_path.exists() and len(tools.steps(run)) >= 13)
        if every:  # a checkpoint is written beside the steps that follow it
            tools.wait_for(lambda: bool(tools.events(run, events.CheckpointSaved)))
        command.send_signal(number)
    finally:
        (folder / "sent").touch()
    _, err = command.communicate(timeout=tools.PATIENCE)
    assert command.returncode == code, err
    if number == signal.SIGINT:
        (saved,) = tools.events(run, events.CheckpointSaved)
        assert 13 <= saved.step == max(tools.steps(run)) < 100
        assert "stopping with a checkpoint" in err and err.endswith("interrupted\n")
    assert not run.finished and not tools.events(run, events.Failed)
    resumed = tools.train_here(folder, *overrides)
    assert resumed.path == run.path and tools.events(run, events.Resumed)
    check_same(resumed, undisturbed(*overrides[:2]))


# What must not matter


@pytest.mark.long
@pytest.mark.parametrize("update", ["async", grid("sync")])
def test_the_number_of_devices_and_of_checkpoints(folder, trainers, undisturbed, staged, update):
    kind = f"optim.update={update}"
    expected = undisturbed(kind)
    for devices, every in ((1, 1), (3, 0), (4, 3)):
        run = tools.train_here(folder, kind, f"engine.devices=cpu:{devices}", f"save.save_steps={every}")
        check_same(run, expected)
        assert len(run.checkpoints()) == {1: 6, 0: 1, 3: 2}[every]
    assert trainers.train(folder, kind, "engine.devices=cpu:1", "save.save_steps=2", event=4) == -signal.SIGKILL
    run = tools.train_here(folder, kind, "engine.devices=cpu:3")
    assert [event.devices for event in tools.events(run, events.RunStarted)] == [
        ("cpu:0",),
        ("cpu:0", "cpu:1", "cpu:2"),
    ]
    check_same(run, expected)


@pytest.mark.parametrize("devices", [grid(1), 2])
@pytest.mark.parametrize("slow", STREAMS)
def test_a_slow_stream(folder, undisturbed, staged, monkeypatch, slow, devices):
    """Whatever is late, nothing is overwritten before it was read, nor read before it is there."""
    begin, random = cpu.CpuStream.__init__, Random(0)

    def hindered(stream, name, aborted, fail, probe):
        late = (lambda where: time.sleep(0.01 * random.random())) if name.endswith(slow) else probe
        begin(stream, name, aborted, fail, late)

    monkeypatch.setattr(cpu.CpuStream, "__init__", hindered)
    check_same(tools.train_here(folder, f"engine.devices=cpu:{devices}"), undisturbed())


def test_rounds_on_any_number_of_devices(folder, staged):
    runs = [tools.train_here(folder, "engine.round_size=2", f"engine.devices=cpu:{count}") for count in (1, 2)]
    assert tools.state(runs[0]) == tools.state(runs[1])
    assert tools.steps(runs[0]) == tools.steps(runs[1])


@pytest.mark.long
def test_replicas_on_any_number_of_devices(folder, trainers, undisturbed, staged):
    """Killed on two devices and resumed on one, with "auto": the run keeps its number of replicas."""
    kind = ("engine.replicas=2", "optim.max_grad_norm=0.5")
    expected = undisturbed(*kind)
    assert expected.state != undisturbed("optim.max_grad_norm=0.5").state
    check_same(tools.train_here(folder, *kind, "engine.devices=cpu:1"), expected)
    assert trainers.train(folder, *kind, *EVERY_TWO, "engine.devices=cpu:2", event=3) == -signal.SIGKILL
    run = tools.train_here(folder, "engine.replicas=auto", kind[1], *EVERY_TWO, "engine.devices=cpu:1")
    assert tools.events(run, events.Resumed) and run.config().replicas == 2
    check_same(run, expected)


def test_another_order_and_other_weights_with_another_seed(folder, undisturbed):
    """The comparisons above can fail."""
    assert tools.state(tools.train_here(folder, "train.seed=1")) != undisturbed().state


@pytest.mark.long
@pytest.mark.parametrize("assistant_only", ["true", "false"])
def test_packing_and_micro_batches_do_not_change_the_loss(folder, assistant_only):
    """One step takes all documents; where they fill fewer rows, the rest of the batch is padding."""
    data = tools.write_chats(folder / "chats.jsonl")
    found = {}
    for packing, size in product(("true", "false"), (1, 4, 16)):
        run = tools.train_here(
            folder,
            data,
            "data.max_length=64",
            f"data.packing={packing}",
            f"data.assistant_only_loss={assistant_only}",
            f"train.micro_batch_size={size}",
            "train.global_batch_size=16",
            "train.max_steps=2",
        )
        found[packing, size] = [value for step in (1, 2) for value in tools.steps(run)[step][:2]]
        supervised = {event.supervised for event in tools.events(run, events.Step)}
        assert supervised == {110 if assistant_only == "true" else 316}
    for portions, values in found.items():
        assert values == pytest.approx(found["false", 1], rel=1e-5), portions


def test_bad_rows_are_recorded(folder):
    data = tools.write_chats(folder / "chats.jsonl")
    rows = (folder / "chats.jsonl").read_text()
    (folder / "chats.jsonl").write_text(rows * 50 + "not JSON\n")
    run = tools.train_here(folder, data, "data.max_length=64", "train.max_steps=1")
    (left_out,) = tools.events(run, events.RowsLeftOut)
    assert (left_out.bad, left_out.total) == (1, 50 * len(rows.splitlines()) + 1)
    assert f"chats.jsonl:{left_out.total}: not valid JSON: Expecting value" in (left_out.sentence() or "")


def test_samples_without_a_supervised_token_are_recorded(folder):
    data = tools.write_chats(folder / "chats.jsonl")
    rows = (folder / "chats.jsonl").read_text()
    (folder / "chats.jsonl").write_text(rows + '{"messages": [{"role": "user", "content": "abc"}]}\n')
    run = tools.train_here(folder, data, "data.max_length=64", "train.max_steps=1")
    (left_out,) = tools.events(run, events.RowsLeftOut)
    total = len(rows.splitlines()) + 1
    place = folder / f"chats.jsonl:{total}"
    assert left_out.sentence() == f"1 of {total} samples have no supervised token and are left out: {place}"


# What is in a run's folder


def test_a_model_that_cannot_be_replaced_is_found_before_a_run_is_resumed(folder):
    run = tools.train_here(folder)
    (run.model_path / "notes.txt").write_text("mine")
    before = run.events_path.read_bytes()
    with pytest.raises(UserError, match=r"it holds notes\.txt"):
        tools.train_here(folder, f"save.resume={run.path}", "train.max_steps=8")
    assert run.events_path.read_bytes() == before


def test_the_folder(folder):
    sizes = ("engine.replan=false", "save.save_steps=3", "log.run_name=größer 漢字", "log.logging_steps=4")
    run = tools.train_here(folder, *sizes)
    assert run.path == folder / "runs/größer 漢字"
    assert {path.name for path in run.path.iterdir()} == {
        "checkpoints",
        "config.toml",
        "control",
        "events.jsonl",
        "lanes.jsonl",
        "model",
        "run.log",
    }
    assert {path.name for path in run.checkpoints_path.iterdir()} == {"checkpoint-3", "checkpoint-6"}
    folders = (run.path, run.checkpoints_path, run.control_path)
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}
    assert {path.name for path in run.model_path.iterdir()} == {
        "chat_template.jinja",
        "complete.json",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert not [path for path in run.path.rglob("*") if path.suffix in (".bin", ".pt", ".pkl", PARTIAL)]

    resolved = tools.write_config(folder, *sizes)
    assert run.config() == resolved.config
    shown = (run.path / FILE).read_text()
    assert all(f"  step {step}/6  loss " in shown for step in (4, 6)) and "step 5/6" not in shown

    records = [json.loads(line) for line in run.events_path.read_bytes().splitlines()]
    begin = ["run_started", "process_started", "plan", "estimated"]
    names = [*begin, "step", "step", "checkpoint_saved", "finished"]
    saved = next(i for i, record in enumerate(records) if record["event"] == "checkpoint_saved")  # training goes on
    assert [record["event"] for record in records[:saved] + records[saved + 1 :]] == names
    assert all(record["schema"] == events.SCHEMA for record in records)
    started, *_ = events.read(run.events_path)
    spec = registry.build(read_config(folder / "model"))
    assert (started.config_hash, started.parameters) == (resolved.config.digest, spec.num_parameters)
    assert list(tools.steps(run)) == [4, 6]
    assert [event.epoch for event in tools.events(run, events.Step)] == [1.0, 1.5]  # of 256 sequences, 64 per step
    assert {event.tokens for event in tools.events(run, events.Step)} == {64 * 16}
    assert {event.supervised for event in tools.events(run, events.Step)} == {64 * 15}


@pytest.mark.parametrize(("devices", "round_size"), [(2, 2), grid(1, 4), grid(3, 4)])
def test_the_trace_shows_what_the_plan_says(folder, staged, devices, round_size):
    sizes = (f"engine.devices=cpu:{devices}", f"engine.round_size={round_size}")
    run = tools.train_here(folder, "engine.trace=true", "engine.replan=false", "save.save_steps=2", *sizes)
    plan = Plan.parse(tools.events(run, events.Plan)[0].lines[0])
    recorded = tools.events(run, events.Slots)
    assert (plan.devices, plan.rounds) == (devices, 4 // round_size)
    assert devices == 1 or len(plan.stages) > 2
    assert [event.step for event in recorded] == [1, 2, 3, 4, 5, 6]
    first = 0  # g0: slots go round the devices, from round to round and from step to step
    for event in recorded:
        expected = plan.slots(event.step - 1)
        assert [slot[:6] for slot in event.slots] == [
            (s.device, s.index, s.stage.kind, s.stage.start, s.stage.stop - 1, s.round) for s in expected
        ]
        assert [slot.device for slot in event.slots] == [(first + i) % plan.devices for i in range(len(expected))]
        first += len(expected)
        assert all(slot.start < slot.end for slot in event.slots)
    for _, slots in groupby(sorted(slot for event in recorded for slot in event.slots), lambda slot: slot.device):
        times = sorted((slot.start, slot.end) for slot in slots)
        assert all(end <= start for (_, end), (start, _) in pairwise(times))
