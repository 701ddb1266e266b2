"""`rptrain bench`: whole runs of a tiny model on CPU workers, what it reports of them, and what it refuses."""

import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest
import torch
from typer.testing import Result

import rptrain.train.replan
from rptrain.bench import floor, memory, report, run, trace
from rptrain.bench.idle import CAUSES, gaps
from rptrain.bench.memory import Peak
from rptrain.bench.report import Report
from rptrain.config.resolve import resolve
from rptrain.machine.hardware import Gpu
from rptrain.planner.choose import LIBRARIES
from rptrain.schedule.plan import Plan
from tests.cases import grid

from .. import run_tools as tools

CONFIG = tools.CONFIG.replace("builtin:random", "{folder}/rows-that-are-not-there.jsonl")
KEYS = {
    "model": {"path", "architecture", "parameters", "layers", "base"},
    "machine": {"devices", "torch", "rptrain"},
    "step": {"micro_batch_size", "length", "micro_batches", "round_size", "replicas", "tokens", "update"},
    "plan": {"text", "seconds_per_step"},
    "throughput": {"seconds_per_step", "steps", "tokens_per_second", "losses", "skipped"},
    "first_step": {"seconds", "preparing", "memory", "weights", "step"},
    "memory": {"gpus", "host"},
    "transfers": {"upload", "download", "upload_bytes", "base_bytes", "download_bytes"},
    "optimizer": {"seconds", "parameters_per_second", "bytes_per_parameter", "bytes_per_second"},
    "launches": {"share", "stages"},
}
STAGES = "F0-0 F1-2 FB3-3 B1-2 B0-0"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a config and a model of which there is no more than its shape."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(
        json.dumps(json.loads((tools.PRESET / "config.json").read_text()) | tools.SMALL)
    )
    (tmp_path / "run.toml").write_text(CONFIG.format(folder=tmp_path), encoding="utf-8")
    return tmp_path


def bench(*arguments: str) -> Result:
    return tools.invoke("bench", "--config", "run.toml", "--warmup", "1", "--steps", "2", *arguments)


def as_json(*arguments: str) -> dict:
    result = bench("--json", *arguments)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return json.loads(result.stdout)


def measured(*overrides: str, steps: int = 2, **options) -> Report:
    return run.bench(resolve("run.toml", overrides), steps=steps, warmup=1, tell=lambda text: None, **options)


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


# What is reported


@pytest.mark.parametrize("update", [grid("sync"), "async"])
def test_everything_is_reported_and_adds_up(folder, update, monkeypatch):
    tools.plan_with(monkeypatch, STAGES)
    before = files(folder)
    found = as_json(f"optim.update={update}", "engine.round_size=2", "eval.questions=5")
    assert files(folder) == before, "nothing is written"
    assert found.keys() == {*KEYS, "devices", "floor"}
    for key, inner in KEYS.items():
        assert found[key].keys() == inner
    assert found["floor"] is None
    assert found["step"] | {"update": update} == found["step"]
    assert (found["step"]["micro_batches"], found["step"]["round_size"], found["step"]["tokens"]) == (4, 2, 64 * 16)
    assert found["plan"]["text"] == f"{STAGES} | N=2 M=4 MR=2"
    speed, first = found["throughput"], found["first_step"]
    assert len(speed["steps"]) == 2 and len(speed["losses"]) == 1 + 2 + 1 and speed["skipped"] == 0
    assert speed["seconds_per_step"] == median(speed["steps"])
    assert speed["tokens_per_second"] == pytest.approx(2 * 64 * 16 / sum(speed["steps"]))
    assert first["seconds"] == pytest.approx(sum(first[part] for part in KEYS["first_step"] - {"seconds"}))
    assert min(first.values()) > 0
    assert found["memory"]["gpus"] == []
    host = found["memory"]["host"]
    assert host["states"] == pytest.approx(host["states_per_parameter"] * found["model"]["parameters"])
    assert host["process"] > host["states"] and not host["locked"]
    assert [device["name"] for device in found["devices"]] == ["cpu:0", "cpu:1"]
    for device in found["devices"]:
        assert tuple(device["idle"]) == CAUSES
        assert device["busy"] + sum(device["idle"].values()) == pytest.approx(1, abs=1e-12)
        assert min(device["idle"].values()) >= 0 and 0 < device["busy"] < 1
        assert device["seconds"] == pytest.approx(sum(speed["steps"]))
        busy = sum(share * seconds for share, seconds in zip(device["busy_steps"], speed["steps"], strict=True))
        assert busy == pytest.approx(device["busy"] * device["seconds"])
    assert found["model"]["base"] is None and found["transfers"].pop("base_bytes") == 0
    assert min(found["transfers"].values()) > 0
    update = found["optimizer"]
    assert update["bytes_per_parameter"] == 2 * (4 + 4 + 4) + 4, "float32: parameter and moments both ways, gradient"
    assert update["parameters_per_second"] == pytest.approx(found["model"]["parameters"] / update["seconds"])
    assert update["bytes_per_second"] == pytest.approx(28 * update["parameters_per_second"])
    stages = found["launches"]["stages"]
    assert {stage["stage"] for stage in stages} == set(STAGES.split())
    assert all(stage["host"] > 0 and stage["device"] > 0 for stage in stages)
    launching, computing = (sum(stage[key] for stage in stages) for key in ("host", "device"))
    assert found["launches"]["share"] == pytest.approx(launching / computing)


def test_the_optimizers_bytes_in_16_bits(monkeypatch):
    found = as_json("model.dtype=bfloat16", "engine.replan=false", "engine.round_size=2")
    assert found["optimizer"]["bytes_per_parameter"] == 2 * (2 + 4 + 4 + 2) + 4, "the gradient is a float32 sum"
    assert 16 < found["memory"]["host"]["states_per_parameter"] < 40  # pages of a tiny model are not full


def test_the_optimizers_bytes_with_small_moments(monkeypatch):
    found = as_json("model.dtype=bfloat16", "engine.replan=false", "optim.moments=int8")
    assert found["optimizer"]["bytes_per_parameter"] == 2 * (2 + 1 + 1 + 2 + 2 * 4 / 128) + 2


def test_an_update_is_of_what_trains():
    update = as_json("train.method=lora", "lora.r=4", "engine.replan=false")["optimizer"]
    widths = {"q": 16 + 16, "k": 16 + 8, "v": 16 + 8, "o": 16 + 16, "gate": 16 + 24, "up": 16 + 24, "down": 24 + 16}
    assert update["parameters_per_second"] * update["seconds"] == pytest.approx(3 * 4 * sum(widths.values()))


def test_the_table_and_the_floor(monkeypatch):
    monkeypatch.setattr(floor, "COPY", 1 << 16)
    monkeypatch.setattr(rptrain.train.replan, "replan", lambda job, times: job.plan)
    for columns in ("80", "120"):
        monkeypatch.setenv("COLUMNS", columns)
        result = bench("--floor")
        assert result.exit_code == 0, result.output
        assert max(map(len, result.stdout.splitlines())) <= int(columns)
    text = " ".join(result.stdout.split())
    for device in ("cpu:0", "cpu:1"):
        shares = re.search(rf"{device}((?: +[0-9.]+%)+)", result.stdout)
        assert shares is not None and 98 < sum(float(share[:-1]) for share in shares[1].split()) < 101
    for part in (
        "A step: 4 micro-batches of 16 × 16 tokens, async; weights and tokens are random",
        "On 2 × ",
        "tokens/s in 2 steps",
        "to the end of the first step: preparation",
        "busy",
        "parameter uploads:",
        "update:",
        "of the devices' computation time; the most for",
        "bytes per parameter) and activations",
        "of the roofline",
        "layers.0, 3 times",
    ):
        assert part in text
    assert result.stderr.splitlines() == [
        "planning", "measuring the roofline time", "allocating memory",
        *(f"step {step} of 7 to plan with" for step in range(1, 8)),
        *(f"step {step} of 4" for step in (1, 2, 3, 4)),
    ]  # fmt: skip


def test_the_floor_is_that_of_all_devices(monkeypatch):
    monkeypatch.setattr(floor, "COPY", 1 << 16)
    threads = []
    real = floor.floor
    monkeypatch.setattr(
        floor, "floor", lambda *sizes: (threads.append((torch.get_num_threads(), *sizes[1:])), real(*sizes))[1]
    )
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    found = measured("engine.replan=false", with_floor=True)
    assert threads == [(1, 16, 16, torch.float32, torch.device("cpu"))] and torch.get_num_threads() == 2
    torch.set_num_threads(before)
    values = found.to_dict()["floor"]
    assert found.floor is not None
    assert values["tokens_per_second"] == 2 * found.floor.tokens_per_second()
    assert values["without_recompute"] == 2 * found.floor.tokens_per_second(recompute=False)
    assert values["achieved"] == found.tokens_per_second / values["tokens_per_second"]
    assert [(layer["name"], layer["count"], layer["recomputed"]) for layer in values["layers"]] == [
        ("layers.0", 3, True),
        ("head", 1, False),
    ]
    assert values["layers"][0]["operations"][0].keys() == {"name", "forward", "backward"}


@pytest.mark.parametrize(
    ("first", "new", "plan", "said"),
    [
        (0.5, 0.4, "FB0-3", "the new plan is 25% faster (400 ms per step, 500 ms with the first plan)"),
        (
            0.4,
            0.5,
            STAGES,
            "the new plan is slower (500 ms per step, 400 ms with the first plan): using the first plan",
        ),
    ],
    ids=["faster", "slower"],
)
def test_it_measures_the_plan_that_training_would_use(monkeypatch, first, new, plan, said):
    calls, told, seconds, time_steps = [], [], iter((first, new)), run._time_steps

    def replan(job, times):
        calls.append(times)
        return tools.with_stages(job.plan, job.spec, "FB0-3")

    def timed(*arguments):
        assert time_steps(*arguments) > 0
        return next(seconds)

    monkeypatch.setattr(rptrain.train.replan, "replan", replan)
    monkeypatch.setattr(run, "_time_steps", timed)
    monkeypatch.setattr(run, "COMPARED", 2)
    tools.plan_with(monkeypatch, STAGES)
    sizes = ("engine.devices=cpu:1", "train.micro_batch_size=4", "train.global_batch_size=16")
    assert measured(*sizes, "engine.replan=false").to_dict()["plan"]["text"].startswith(STAGES)
    assert calls == []
    found = run.bench(resolve("run.toml", sizes), steps=2, warmup=1, tell=told.append)
    assert len(calls) == 1 and calls[0].steps == 4, "two for the head, two for the blocks"
    assert found.to_dict()["plan"]["text"].startswith(f"{plan} |")
    assert {name.split()[0] for lane in found.lanes for name, *_ in lane.issuing} == {*plan.split()}
    of_plans = [text.partition(" of ")[2] for text in told if text.startswith("step 1 ")]
    assert of_plans == [
        "7 to plan with",
        "2 with the first plan",
        "3 to warm up the new plan",
        "2 with the new plan",
        "4",
    ]
    assert any(text.startswith(said) for text in told)


def test_the_way_to_the_first_step_is_that_of_the_first_engine(monkeypatch):
    opened, open_engine = [], run.open_engine

    def noted(job, store, optimizer, observers):
        opened.append(observers.trace)
        return open_engine(job, store, optimizer, observers)

    def clock():  # long after, from the second engine on
        return time.perf_counter() + 1e6 * (len(opened) > 1)

    monkeypatch.setattr(rptrain.train.replan, "replan", lambda job, times: job.plan)
    monkeypatch.setattr(run, "open_engine", noted)
    monkeypatch.setattr(run, "time", SimpleNamespace(perf_counter=clock))
    assert measured().startup.seconds < 1e6
    assert opened == [False, True]


def test_auto_values_are_resolved():
    step = as_json("train.micro_batch_size=auto", "engine.replan=false")["step"]
    assert step["micro_batch_size"] * step["micro_batches"] == 64


def test_a_gpu_is_reported_with_what_was_planned_for_it(monkeypatch):
    found = measured("engine.replan=false")
    gpu = Gpu("cuda:0", context=500, tensor_bytes=7000, source="engine.vram_limit", most=9000)
    hardware = replace(found.job.hardware, gpus=(gpu,))
    monkeypatch.setattr(report, "device_kind", lambda name: f"kind of {name}")
    found = replace(
        found,
        job=replace(found.job, hardware=hardware),
        peaks=(Peak(6000, 5000),),
        allocations=(3,),
        measured=None,
        losses=(float("nan"), 1.5),
    )
    values = found.to_dict()
    tensors = found.job.plan.device.total
    assert values["memory"]["gpus"] == [
        {
            "device": "cuda:0",
            "peak": 6000,
            "planned": tensors + LIBRARIES + 500,
            "limit": 7500,
            "allocator_peak": 5000,
            "allocator_planned": tensors,
            "driver_allocations": 3,
        }
    ]
    assert values["machine"]["devices"] == [{"name": "cuda:0", "kind": "kind of cuda:0"}]
    assert values["throughput"]["losses"] == [None, 1.5]
    assert values["transfers"]["upload"] is values["transfers"]["download"] is values["optimizer"] is None


def test_uploads_of_a_quantized_base_are_counted(monkeypatch):
    """A stage's parameters go up once a round, as planned; of the frozen layers all but norms in the format."""
    tools.plan_with(monkeypatch, STAGES)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 64}
    Path("model/config.json").write_text(json.dumps(json.loads(Path("model/config.json").read_text()) | sizes))
    bytes_of = {}
    for base in ("bf16", "nf4"):
        settings = ("model.dtype=bfloat16", "train.method=lora", f"lora.base={base}", "engine.round_size=2")
        found = measured(*settings, "engine.replan=false")
        costs, layers = found.job.plan.costs, [layer for stage in found.job.plan.plan.stages for layer in stage.layers]
        assert found.copied.upload_bytes == 2 * sum(costs[layer].params for layer in layers)
        bytes_of[base] = found.copied.base_bytes
    matrices = 2 * 64 * 128 + 2 * 64 * 64 + 3 * 64 * 128  # of each of three layers, which go up twice in two rounds
    assert [bytes_of[base] for base in ("bf16", "nf4")] == [
        2 * 6 * (each * matrices + 2 * 4 * 128)
        for each in (2, 0.5625)  # four norms, padded
    ]
    assert "the base in nf4" in bench("train.method=lora", "lora.base=nf4").output


def test_the_peak_is_the_most_that_was_ever_used(monkeypatch):
    free = iter([70, 20, 90])
    monkeypatch.setattr(memory, "PAUSE", 100)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (next(free), 100))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda index: None)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda index: 40 + index)
    with memory.Sampler(["cuda:1"]) as sampler:
        sampler._look()
        sampler._look()
        assert sampler.peaks() == [Peak(80, 41)]
    with memory.Sampler(["cpu:0", "cpu:1"]) as sampler:
        assert sampler.peaks() == []


# The trace


def test_the_trace_file_has_a_lane_for_each_thing(folder, monkeypatch):
    tools.plan_with(monkeypatch, STAGES)
    found = as_json("--trace", "steps.json")
    events = json.loads((folder / "steps.json").read_text())["traceEvents"]
    names = {
        (e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["name"] in ("process_name", "thread_name")
    }
    slices = [event for event in events if event["ph"] == "X"]
    assert [names[process, None] for process in range(3)] == ["cpu:0", "cpu:1", "host"]
    for process in range(2):
        lanes = {name for (of, thread), name in names.items() if of == process and thread is not None}
        assert lanes == {*trace.LANES} - {"optimizer"}
    assert {name for (of, thread), name in names.items() if of == 2 and thread is not None} == {"optimizer"}
    window = sum(found["throughput"]["steps"]) * 1e6
    assert all(e["ts"] < window and e["ts"] + e["dur"] > 0 and e["dur"] >= 0 for e in slices)
    for process, device in enumerate(found["devices"]):
        idle = [e for e in slices if e["pid"] == process and names[process, e["tid"]] == "idle"]
        for cause, share in device["idle"].items():
            assert sum(e["dur"] for e in idle if e["name"] == cause) == pytest.approx(share * window, abs=1e-3)
    computed = {e["name"] for e in slices if names[e["pid"], e["tid"]] == "compute"}
    assert {f"{stage} m{m}" for stage in STAGES.split() for m in range(4)} <= computed
    assert "B1-2 zeroing" in computed
    moved = [e["args"]["bytes"] for e in slices if names[e["pid"], e["tid"]] == "gradient download"]
    assert moved and min(moved) > 0


def test_idle_time_lies_between_the_computations():
    found = measured("engine.replan=false")
    for lane in found.lanes:
        for gap in gaps(lane.computations, lane.host, found.window):
            assert not any(c.start < gap.end and gap.start < c.end for c in lane.computations)


# What is refused, and what stays as it is


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "0"], "'--steps'"),
        (["--warmup", "0"], "'--warmup'"),
        (["--steps", "many"], "'--steps'"),
        (["--floors"], "--floors"),
        (["train.sed=3"], "did you mean `train.seed`?"),
        (["--trace", "nowhere/steps.json"], "does not exist: create it"),
        (["--trace", "model"], "model is not a regular file: name another file"),
        (["--trace", "/dev/full"], "/dev/full is not a regular file: name another file"),
        (["--trace", "/proc/a.json"], "/proc/a.json cannot be written: No such file or directory: name another file"),
        (["--trace", "a" * 300], "cannot be written: File name too long: name another file"),
        (["--trace", "a/" * 3000], "does not exist: create it"),
        (["model.path=nothing-here"], "nothing-here"),
        (["engine.devices=cuda:9"], "cuda:9"),
        (["engine.host_limit=1KiB"], "1.00 KiB engine.host_limit allows"),
    ],
)
def test_what_is_wrong_ends_with_2_before_memory_is_taken(arguments, said, monkeypatch):
    monkeypatch.setattr(run, "open_store", None)
    result = bench(*arguments)
    assert result.exit_code == 2 and said in " ".join(result.stderr.split()), result.stderr
    assert result.stdout == ""


HEAVY = """
import sys
from rptrain import cli
sys.argv = ["rptrain", "bench", "--config", "run.toml", *sys.argv[1:]]
try:
    cli.main()
except SystemExit as exit:
    print(exit.code, [name for name in ("torch", "numpy", "transformers") if name in sys.modules])
"""


@pytest.mark.parametrize("arguments", [["train.sed=3"], ["--trace", "nowhere/steps.json"], ["--steps", "0"]])
def test_mistakes_are_told_before_anything_heavy_is_imported(arguments):
    done = subprocess.run(
        [sys.executable, "-c", HEAVY, *arguments], capture_output=True, text=True, timeout=tools.PATIENCE
    )
    assert done.stdout == "2 []\n", done.stderr


def test_nothing_is_asked_of_the_disk(monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(total=1, free=0))
    assert tools.invoke("--config", "run.toml", "data.train.0.path=builtin:random").exit_code == 2
    assert bench("engine.replan=false").exit_code == 0


def test_training_afterwards_is_what_it_was(folder, tmp_path_factory):
    tools.write_model(folder / "other")
    settings = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.get_rng_state().tolist()
    model = f"model.path={folder}/other"
    untouched = tools.state(tools.train_here(folder, model, "log.run_name=before"))
    left = files(folder / "runs")
    (folder / "run.toml").write_text(CONFIG.format(folder=folder), encoding="utf-8")
    assert bench(model, "log.run_name=before").exit_code == 0
    assert files(folder / "runs") == left, "no run is begun, and none gone on with"
    assert settings == (
        torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.get_rng_state().tolist(),
    )  # fmt: skip
    assert tools.state(tools.train_here(folder, model, "log.run_name=after")) == untouched


@pytest.mark.long
def test_ctrl_c_ends_it_with_130(folder):
    """Also where it was begun with Ctrl-C ignored, as by a shell that puts it behind without job control."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = tools.command("bench", "--config", "run.toml", "--steps", "100000")
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step 9 of 10000"):
            break
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=tools.PATIENCE)
    assert process.returncode == 130 and said.splitlines()[-1] == "interrupted"


def test_a_plan_for_more_devices_than_stages_is_measured_too():
    found = measured("engine.devices=cpu:3", "engine.replan=false", steps=3)
    assert Plan.parse(found.to_dict()["plan"]["text"]).devices == 3
    assert all(used.busy > 0 for used in found.usages)
