"""`rptrain plan --timings`: plans with the measured times of a run, and the runs whose times do not apply."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import Result

from rptrain.config.resolve import resolve
from rptrain.engine.meter import Measured
from rptrain.machine.flags import MachineFlags
from rptrain.planner.report import PlanReport, report
from rptrain.planner.timings import FILE, Conditions, Timings
from rptrain.preflight.model import training_model
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records import events

from .. import run_tools as tools

CONFIG = """\
[model]
path = "model"
[[data.train]]
path = "builtin:random"
[data]
max_length = 64
[train]
micro_batch_size = 2
global_batch_size = 16
[save]
resume = "never"
"""
BLOCKS = 8
EVEN = Measured((*(0.01,) * BLOCKS, 0.0), (0.02,) * (BLOCKS + 1), upload=20e9, download=10e9, update=0.005, steps=2)
EVENTS, NO_SIZE = "events.jsonl", "events.jsonl cannot be used: it has no record of the model's size"
RTX_4090, L40S = "NVIDIA GeForce RTX 4090", "NVIDIA L40S"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    write_model("model")
    Path("c.toml").write_text(CONFIG)


def write_model(name: str, **changes: int) -> None:
    sizes = json.loads((tools.PRESET / "config.json").read_text()) | tools.SMALL | {"num_hidden_layers": BLOCKS}
    Path(name).mkdir()
    (Path(name) / "config.json").write_text(json.dumps(sizes | changes))


def measured_run(*overrides: str, measured: Measured = EVEN, devices: Sequence[str] = (RTX_4090,)) -> Path:
    """The folder of a run with these times."""
    resolved = resolve("c.toml", overrides)
    config, run = resolved.config, RunDir.create("runs", "run")
    run.write_config(resolved)
    parameters = training_model(config)[1].num_parameters
    started = events.RunStarted(config.digest, "0", ("cuda:0",), config.model.path, parameters)
    run.events_path.write_text(events.to_line(started) + "\n")
    tokens = config.train.sequences * config.data.max_length
    conditions = Conditions(tuple(devices), tokens, config.data.max_length, config.model.dtype, BLOCKS + 1)
    Timings(conditions, measured).save(run.path)
    return run.path


def planned(folder: Path, *overrides: str, gpus: int = 4, **flags: str) -> PlanReport:
    return report(resolve("c.toml", overrides), MachineFlags(gpus, **flags), folder)


def plan(folder: Path, *arguments: str) -> Result:
    return tools.invoke("plan", "--config", "c.toml", "--timings", folder, *arguments)


def refusal(folder: Path, *arguments: str) -> str:
    result = plan(folder, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    return result.stderr


def test_a_slow_last_layer_moves_the_partition():
    slow = replace(EVEN, backward=(*EVEN.backward[:-1], 0.1))
    even, uneven = planned(measured_run()).run, planned(measured_run(measured=slow)).run
    assert even is not None and uneven is not None
    assert "FB7-8" in str(even.plan) and "FB8-8" in str(uneven.plan), "the head gets a stage of its own"
    assert [cost.backward for cost in uneven.costs] == pytest.approx([0.03] * BLOCKS + [0.1])
    assert sum(cost.update for cost in uneven.costs) == pytest.approx(0.005)
    assert uneven.setting.links is not None
    assert (uneven.setting.links.up, uneven.setting.links.down) == (20e9, 10e9)


def test_the_source_of_the_times_is_named():
    folder = measured_run()
    text = " ".join(plan(folder, "--gpus", "4").stdout.split())
    assert f"Times: measured in {folder} On 4 × RTX 4090 of a hypothetical machine; copies at 20 GB/s to" in text
    assert "and 10 GB/s from it RTX 4090 is the GPU model on which the run was measured" in text
    assert f"estimated with the times measured in {folder}" in text
    assert not any(peaks in text for peaks in ("Products at", "Types of products", "operations per byte"))
    slower = " ".join(plan(folder, "--gpus", "4", "--pcie", "5GB/s").stdout.split())
    assert "copies at 5 GB/s to each GPU and 5 GB/s from it" in slower
    found = json.loads(plan(folder, "--gpus", "4", "--json", "--compare").stdout)
    assert found["plan"]["source"] == f"times measured in {folder}" and found["types"] is None
    times = {one["schedule"]: one["seconds"] for one in found["comparison"]}
    assert times["RoundPipe"] == found["plan"]["seconds_per_step"]
    assert len(times) > 1 and min(times.values()) > 8 * (BLOCKS * 0.03 + 0.02) / 4, "all have the measured times"


def test_more_gpus_are_faster():
    folder = measured_run()
    four, eight = (planned(folder, gpus=count).run for count in (4, 8))
    assert four is not None and eight is not None
    assert 1.5 < four.estimate.period / eight.estimate.period <= 2


def test_a_plan_that_does_not_fit_keeps_the_times():
    folder = measured_run()
    found = planned(folder, host="100MiB")
    assert not found.fits and found.measured == folder


@pytest.mark.parametrize(
    ("run", "changes", "said"),
    [
        ([], ["train.micro_batch_size=4"], "(train.micro_batch_size × data.max_length) was 128, is 256."),
        ([], ["data.max_length=32", "train.micro_batch_size=4"], ": data.max_length was 64, is 32."),
        ([], ["model.dtype=float32"], ': model.dtype was "bfloat16", is "float32".'),
        ([], ["model.path=deep"], ": the number of layers was 9, is 10; the number of parameters"),
        ([], ["model.path=wide"], ": the number of parameters was "),
        ([], ['train.freeze=["model.layers.0.*"]'], ': train.freeze was [], is ["model.layers.0.*"].'),
        ([], ["lora.r=4"], ': train.method was "full", is "lora"; the number of parameters'),
        (["lora.r=4"], ["lora.r=4", "lora.base=nf4"], ': lora.base was "bf16", is "nf4".'),
        ([], ["optim.moments=int8"], ': optim.moments was "fp32", is "int8".'),
        ([], ["engine.optimizer_threads=4"], ": engine.optimizer_threads was not set, is 4."),
        (["lora.r=4"], ["lora.r=4", "model.hold=map"], ': model.hold was "memory", is "map".'),
        (["engine.fp8=true"], [], ": engine.fp8 was true, is false."),
        (
            ["model.dtype=float16"],
            ["model.dtype=float16", "engine.fp16_accumulation=true"],
            ": engine.fp16_accumulation was false, is true.",
        ),
        ([], ["--card", "l40s"], ": the kind of device was RTX 4090, is L40S."),
        ([], ["engine.devices=cpu:2"], f": the kind of device was {RTX_4090}, is "),
        ([], ["--tflops", "100"], "do not change measured times: remove --timings, or"),
    ],
)
def test_times_that_do_not_apply_are_refused(run, changes, said):
    write_model("deep", num_hidden_layers=BLOCKS + 1)
    write_model("wide", intermediate_size=48)
    assert said in refusal(measured_run(*run), *changes)


def test_settings_that_change_no_times_may_differ():
    folder = measured_run("lora.r=4")
    changes = ("lora.r=4", "lora.lora_alpha=16", "optim.update=sync", "optim.learning_rate=1e-3", "engine.round_size=4")
    assert planned(folder, *changes, "train.global_batch_size=32").measured == folder


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("lora.target_modules", ["q_proj", "v_proj"]),
        ("train.freeze", ["model.layers.0.*", "model.layers.1.*"]),
    ],
)
def test_the_order_of_a_list_does_not_matter(key, names):
    folder = measured_run(f"{key}={json.dumps(names)}")
    assert planned(folder, f"{key}={json.dumps(names[::-1])}").measured == folder
    assert f"{key} was {json.dumps(names)}, is" in refusal(folder, f"{key}={json.dumps(names[:1])}")


def test_updates_with_several_rounds_take_longer():
    """They read and write 28 bytes per parameter, and 26 with one round: the gradients are float32 sums."""
    several = "engine.round_size=4"
    one_round, rounds = measured_run(), measured_run(several)
    for folder, changes, seconds in (
        (one_round, [several], 0.005 * 28 / 26),
        (rounds, [], 0.005 * 26 / 28),
        (rounds, ["engine.round_size=2"], 0.005),
    ):
        run = planned(folder, *changes).run
        assert run is not None
        assert sum(cost.update for cost in run.costs) == pytest.approx(seconds)


def test_all_differences_are_named():
    said = refusal(measured_run(), "engine.fp8=true", "optim.moments=bf16", "--card", "h100")
    assert all(name in said for name in ("kind of device", "optim.moments", "engine.fp8"))
    assert said.endswith("train it for 120 steps or more with engine.replan = true\n")


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        (FILE, lambda text: "", "is damaged; name another run"),
        (FILE, lambda text: text.replace("0.005", "-0.005"), "cannot be used: -0.005 is not possible as a time"),
        (FILE, lambda text: text.replace("0.01,", "", 1), "used: there are times of 8 (forward) and 9 (backward)"),
        (FILE, None, "has no measured times (timings.json): name another run"),
        (EVENTS, lambda text: "{}\n", "events.jsonl:1: not an event record; name another run"),
        (EVENTS, lambda text: "", f"{NO_SIZE}; name another run"),
        (EVENTS, None, f"{NO_SIZE}; name another run, or measure this config: train it for 120 steps or more"),
    ],
    ids=["damaged", "negative", "fewer", "missing", "damaged-events", "no-start", "no-events"],
)
def test_times_that_cannot_be_used_are_refused(name, damage, said):
    file = measured_run() / name
    if damage is None:
        file.unlink()
    else:
        file.write_text(damage(file.read_text()))
    assert said in refusal(file.parent)


def test_a_folder_that_is_no_run_is_refused():
    assert "model is not a run: it has no config.toml" in refusal(Path("model"))


@pytest.mark.parametrize(
    ("devices", "arguments", "machine"),
    [
        ([RTX_4090], ["--gpus", "4"], ("RTX 4090", 4)),
        ([L40S], ["--gpus", "4"], ("L40S", 4)),
        ([L40S], ["--gpus", "4", "--card", "l40s", "--host", "64GiB"], ("L40S", 4)),
        ([L40S], [], ("L40S", 1)),
        ([L40S], ["engine.devices=cuda:0,1"], ("L40S", 2)),
    ],
)
def test_the_card_of_the_run_is_planned_for(devices, arguments, machine):
    found = json.loads(plan(measured_run(devices=devices), "--json", *arguments).stdout)["machine"]
    assert (found["card"], found["devices"], found["here"]) == (*machine, False)
    assert found["card_source"] == ("--card" if "--card" in arguments else "--timings")


@pytest.mark.parametrize(
    ("device", "card", "memory"),
    [
        ("NVIDIA A100-PCIE-40GB", "a100", "80.0 GiB of A100"),
        ("NVIDIA GeForce RTX 3090 Ti", "rtx3090", "24.0 GiB of RTX 3090"),
    ],
)
def test_the_memory_of_a_variant_of_a_card_is_asked_for(device, card, memory):
    folder = measured_run(devices=[device])
    assert f"{device}, whose memory may not be the {memory}: add --vram" in refusal(folder)
    assert f"or --card {card} " in refusal(folder, "--gpus", "4")
    places = json.loads(plan(folder, "--json", "--vram", "20GiB").stdout)["memory"]
    (limit,) = (place["limit"] for place in places if place["source"] == "--vram")
    assert 19 << 30 < limit <= 20 << 30
    assert plan(folder, "--card", card).exit_code == 0


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ([L40S, RTX_4090], "the kind of device was L40S and RTX 4090, is RTX 4090."),
        (["NVIDIA RTX A6000"], "the kind of device was NVIDIA RTX A6000, is RTX 4090."),
        (["x86_64"], "the kind of device was x86_64, is RTX 4090."),
    ],
)
def test_devices_without_a_profile_are_not_planned_for(devices, said):
    refused = refusal(measured_run(devices=devices), "--gpus", "4")
    assert said in refused and "RTX 4090 is assumed: name the GPU model with --card" in refused


def test_the_link_that_is_given_counts():
    found = planned(measured_run(), pcie="5GB/s").run
    assert found is not None and found.setting.links is not None
    assert (found.setting.links.up, found.setting.links.down) == (5e9, 5e9)
    assert found.costs[0].forward == 0.01


def test_an_automatic_micro_batch_is_that_of_the_run():
    folder = measured_run()
    assert planned(folder, "train.micro_batch_size=auto").config.train.micro_batch_size == 2
    odd = ("train.micro_batch_size=auto", "train.global_batch_size=15")
    assert "tokens per micro-batch" in refusal(folder, "--gpus", "4", *odd), "2 does not divide it"


def test_an_automatic_round_is_chosen_with_the_times():
    slow_head = replace(EVEN, backward=(*EVEN.backward[:-1], 0.1))
    overrides = ("train.global_batch_size=32", "optim.update=sync", "engine.round_size=auto")
    estimated = report(resolve("c.toml", overrides), MachineFlags(4, card="rtx 4090"))
    assert estimated.config.engine.round_size == 8, "two rounds leave devices idle less"
    found = planned(measured_run(measured=slow_head), *overrides)
    assert found.config.engine.round_size is None, "a second round would wait for the head"
    assert "optim.moments was" in refusal(measured_run(), *overrides, "optim.moments=int8")


def test_the_times_of_a_trained_run(tmp_path):
    (tmp_path / "trained").mkdir()
    tools.write_model(tmp_path / "trained" / "model")
    with pytest.MonkeyPatch.context() as patch:
        tools.replan_with(patch, "FB0-3")
        run = tools.train_here(tmp_path / "trained", "train.max_steps=8")
    config = ("plan", "--config", tmp_path / "trained" / "run.toml", "--timings", run.path)
    result = tools.invoke(*config, "engine.devices=cpu:3", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["plan"]["source"] == f"times measured in {run.path}" and found["machine"]["devices"] == 3
    result = tools.invoke(*config, "train.micro_batch_size=8")
    assert result.exit_code == 2 and "was 256, is 128." in result.stderr
