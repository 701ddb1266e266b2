"""`rptrain plan`: what it shows of plans that fit and that do not, its advice, its flags, its JSON and its pictures."""

import fcntl
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from rptrain.cli.commands import app
from rptrain.config.resolve import resolve
from rptrain.config.schema import Config
from rptrain.engine.meter import Measured
from rptrain.machine.flags import MachineFlags
from rptrain.machine.hardware import Hardware, planned
from rptrain.models.families import registry
from rptrain.models.locate import locate, presets, read_config
from rptrain.planner.advice import advise, values
from rptrain.planner.changes import ORDER, with_changes, with_value
from rptrain.planner.memory import least_memory, plan_run
from rptrain.planner.report import report
from rptrain.planner.text import describe_stages, verdict_text
from rptrain.planner.timings import Conditions, Timings
from rptrain.preflight.model import trained_shape
from rptrain.schedule.machine import CARDS, MeasuredRates, Rates
from rptrain.schedule.plan import Plan, Stage
from rptrain.schedule.roofline import Verdict
from rptrain.train.run import train

from .. import run_tools as tools

GIB = 1 << 30
CONFIG = """\
[model]
path = "{model}"
[[data.train]]
path = "rows-that-are-not-there.jsonl"
[data]
max_length = 2048
[train]
micro_batch_size = 4
global_batch_size = 64
max_steps = 10
[optim]
update = "async"
"""
SERVER = ["--gpus", "8", "--card", "rtx4090", "--host", "800GiB"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write("qwen3-1.7b")
    return tmp_path


HERE = ["engine.devices=cpu:2", "data.train.0.path=builtin:random"]  # a plan for this machine, with data


def write(model: str) -> None:
    Path("c.toml").write_text(CONFIG.format(model=model))


def run(*arguments: str, columns: int = 100) -> Result:
    return CliRunner().invoke(app, ["plan", "--config", "c.toml", *arguments], env={"COLUMNS": str(columns)})


def as_json(*arguments: str) -> tuple[dict, int]:
    result = run("--json", *arguments)
    assert result.exit_code in (0, 2), result.output
    return json.loads(result.stdout), result.exit_code


# What is shown


def test_a_large_machine_and_what_is_said_of_it():
    result = run(*SERVER)
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    for part in (
        "qwen3-1.7b: 1,720,574,976 parameters, 29 layers, bfloat16",
        "A step: 16 micro-batches of 4 × 2,048 tokens, async",
        "On 8 × RTX 4090 of a hypothetical machine: 165 TFLOP/s and 25 GB/s each way",
        "Products at 158 TFLOP/s, estimated: 0.96 of the data sheet's peak",
        "estimated with the profile of RTX 4090",
        "layers.0, 28 times: forward",
        "Computation hides transfers and updates",
        "of 749 GiB (--host), fits",
        "each of 8 GPUs:",
        "It fits.",
    ):
        assert part in text
    assert "\x1b" not in result.stdout


@pytest.mark.sample(1, gate=2)
@pytest.mark.parametrize("columns", [80, 120])
def test_lines_are_no_wider_than_the_terminal(columns):
    for arguments in (SERVER, ["--gpus", "2", "--host", "20GiB", "--vram", "8GiB"]):
        lines = run(*arguments, columns=columns).stdout.splitlines()
        assert len(lines) > 20 and max(map(len, lines)) <= columns


def test_what_is_taken_stands_beside_its_name():
    """In a narrow terminal the name is what wraps."""
    write("gpt-oss-20b")
    for columns, name in ((80, "frozen weights, matrices in mxfp4 and nf4"), (46, "frozen weights, matrices")):
        lines = run("--gpus", "1", "train.method=lora", "lora.base=nf4", columns=columns)
        (line,) = (line for line in lines.stdout.splitlines() if "frozen weights" in line)
        assert re.fullmatch(f"    {name}  +[0-9.]+ GiB[ █]*", line), line


def test_a_small_machine_ends_with_2_and_advice():
    result = run("--gpus", "8", "--host", "33GiB")
    text = " ".join(result.stdout.split())
    assert result.exit_code == 2
    assert "does not fit" in result.stdout and "It does not fit.\nWhat makes it fit:\n" in result.stdout
    assert "- optim.update=sync (exact updates, GPUs wait for the optimizer; saves" in text
    assert "F0-" in result.stdout  # the plan is shown all the same


def test_without_a_plan_the_reason_is_shown():
    result = run("--gpus", "8", "--host", "800GiB", "--vram", "5.25GiB")
    text = " ".join(result.stdout.split())
    assert result.exit_code == 2 and "No plan fits: --vram leaves" in text
    assert "- train.micro_batch_size=2 (same up to rounding, smaller products; saves" in text


@pytest.mark.sample(1, gate=3)
@pytest.mark.parametrize(
    ("arguments", "source"),
    [
        (["--vram", "2GiB"], "--vram"),
        (["engine.vram_limit=2GiB"], "engine.vram_limit"),
        (["train.micro_batch_size=64", "data.max_length=4096"], "RTX 4090"),
    ],
)
def test_the_reason_names_what_sets_the_limit(arguments, source):
    problem = as_json("--gpus", "8", *arguments)[0]["problem"]
    assert problem.startswith(f"{source} leaves ")


def test_what_is_missing_where_nothing_helps():
    result = run("--gpus", "8", "--host", "1GiB")
    text = " ".join(result.stdout.split())
    assert result.exit_code == 2
    assert "No settings make it fit: it needs" in text and "GiB more host memory - --host" in text


def test_host_memory_that_is_not_known_is_not_judged():
    found, code = as_json("--gpus", "8")
    assert code == 0 and found["fits"]
    host = found["memory"][0]
    assert (host["kind"], host["fits"], host["limit"]) == ("host memory", None, None)
    assert "the limit of host memory is unknown" in run("--gpus", "8").stdout


def test_this_machine_without_a_gpu():
    write("tiny-tasks")
    found, code = as_json(*HERE)
    assert code == 0 and found["machine"]["here"] and not found["machine"]["gpus"]
    assert found["roofline"] is None and found["machine"]["rates"] is None and found["types"] is None
    assert [place["kind"] for place in found["memory"]] == ["host memory", "disk space"]
    shown = run(*HERE)
    assert shown.exit_code == 0 and "memory of 2 CPU workers" in shown.stdout


def test_a_gpu_that_is_not_here_is_no_end():
    result = run("engine.devices=cuda:7")
    assert result.exit_code == 2 and "--gpus 8 --card rtx4090` plans for another machine" in result.stderr


def test_stages_in_short():
    def short(text: str) -> str:
        return describe_stages(Plan.parse(f"{text} | N=1 M=1 MR=1").stages)

    assert short("F0-8 FB9-28 B6-8 B3-5 B0-2") == "F 0-8, fused 9-28, B 0-8 in 3 stages of 3"
    assert short("F0-1 F2-4 FB5-5 B1-4 B0-0") == "F 0-4 in 2 stages of 2 to 3, fused 5, B 0-4 in 2 stages of 1 to 4"
    assert short("FB0-3") == "fused 0-3"


def test_verdicts_in_words():
    stages = tuple(Stage("B", i, i + 1) for i in range(10))
    hidden = verdict_text(Verdict(1, 1, None, -1e-9, ()))
    assert hidden == "Computation hides transfers and updates: they make a step 0.0% longer."
    up = verdict_text(Verdict(3, 2, "up", 0.5, stages))
    assert up.startswith("Uploads are the limit: a step takes 50% longer than with free copies in this direction.")
    assert "10 (B0-0 B1-1 B2-2 B3-3 B4-4 B5-5 B6-6 B7-7 …)" in up
    assert "optimizer on the CPU is the limit: a step takes 20%" in verdict_text(Verdict(3, 2, "optimizer", 0.2, ()))


def test_other_schedules_are_compared():
    text = run(*SERVER, "--compare").stdout
    rows = dict(re.findall(r"^  (RoundPipe|GPipe|1F1B|Interleaved 1F1B|Looped BFS) +(\S+) m?s", text, re.MULTILINE))
    assert len(rows) == 4
    assert "Looped BFS" not in rows, "with one stage per device it is GPipe"
    found, _ = as_json(*SERVER, "--compare")
    times = [schedule["seconds"] for schedule in found["comparison"]]
    assert times == sorted(times), "the fastest first"
    ours, *others = found["comparison"]
    assert ours["schedule"] == "RoundPipe" and ours["seconds"] == found["plan"]["seconds_per_step"]
    assert all(ours["seconds"] < other["seconds"] and ours["bubble"] < other["bubble"] for other in others)
    assert as_json(*SERVER)[0]["comparison"] is None


def test_schedules_that_need_a_layer_per_device_are_left_out():
    write("tiny-tasks")
    assert "none: each needs a layer per device" in run("--gpus", "8", "--compare").stdout
    nothing_fits = run("--gpus", "1", "--vram", "1200MiB", "--compare")
    assert "unknown without a plan" in nothing_fits.stdout.partition("Other schedules")[2]


# Advice


@pytest.mark.sample(2, gate=5)
@pytest.mark.parametrize(
    ("arguments", "overrides", "keys"),
    [
        (
            ["--gpus", "8", "--host", "32GiB"],
            [],
            ["optim.update", "optim.moments", "train.global_batch_size"],
        ),
        (["--gpus", "1", "--host", "12GiB"], ["model.path=llama-3.1-8b", "train.method=lora"], ["model.hold"]),
        (["--gpus", "8", "--host", "800GiB", "--vram", "5.25GiB"], [], ["train.micro_batch_size"]),
        (["--gpus", "8", "--host", "800GiB", "--vram", "24GiB"], ["engine.vram_limit=5GiB"], ["engine.vram_limit"]),
        (["--gpus", "8", "--host", "800GiB"], ["engine.host_limit=30GiB"], ["engine.host_limit"]),
    ],
)
def test_advice_applied_to_the_config_makes_it_fit(arguments, overrides, keys):
    before, code = as_json(*arguments, *overrides)
    assert code == 2
    for key in keys:
        remedy = next(r for r in before["advice"]["remedies"] if key in r["changes"])
        after, code = as_json(*arguments, *overrides, f"{key}={remedy['changes'][key]}")
        assert code == 0 and after["fits"] and not after["advice"]["missing"]
        for kind in before["advice"]["missing"]:
            totals = [max(p["total"] for p in found["memory"] if p["kind"] == kind) for found in (before, after)]
            assert remedy["saves"][kind] == pytest.approx(totals[0] - totals[1], abs=64 << 20)  # this process grows


def hardware(config: Config, host: int, vram: int = 24 * GIB, gpus: int = 8) -> Hardware:
    """A machine with this much usable host memory."""
    return replace(planned(replace(CARDS["rtx4090"], vram=vram), gpus, None, config.engine), host=host, host_most=host)


def spec_of(name: str):
    return registry.build(read_config(locate(name)))


def test_the_largest_value_that_fits_is_given():
    config, spec = resolve("c.toml").config, spec_of("qwen3-1.7b")
    machine = hardware(config, 30 * GIB)
    for remedy in advise(config, spec, machine).remedies:
        (change,) = remedy.changes
        if change.key == "train.global_batch_size":
            larger = with_value(config, change.key, 2 * change.value)
            assert larger is not None and not plan_run(larger, spec, machine)[1].fits


@pytest.mark.long
def test_a_value_is_given_where_there_is_a_plan_for_it_and_not_before():
    """Half the rows would do if the activations of few stages were all; GPUs so small need more stages."""
    config, spec = resolve("c.toml", ["optim.moments=int8", "optim.update=sync"]).config, spec_of("qwen3-1.7b")
    machine = hardware(config, 18 * GIB, vram=6 * GIB + GIB // 4, gpus=2)
    half, quarter = (with_value(config, "train.global_batch_size", rows) for rows in (32, 16))
    assert half and least_memory(half, spec, machine).fits and not plan_run(half, spec, machine)[1].fits
    assert quarter and plan_run(quarter, spec, machine)[1].fits
    changes = [remedy.changes[0] for remedy in advise(config, spec, machine).remedies]
    assert [change.value for change in changes if change.key == "train.global_batch_size"] == [16]


def test_two_changes_where_no_single_one_does():
    config, spec = resolve("c.toml").config, spec_of("qwen3-1.7b")
    machine = hardware(config, 20 * GIB)
    (remedy,) = advise(config, spec, machine).remedies
    assert list(map(str, remedy.changes)) == ["optim.moments=int8", "optim.update=sync"]
    for change in remedy.changes:
        alone = with_changes(config, [change])
        assert alone is not None and not plan_run(alone, spec, machine)[1].fits
    together = with_changes(config, remedy.changes)
    assert together is not None and plan_run(together, spec, machine)[1].fits


def test_what_costs_less_is_given_first():
    found = advise(resolve("c.toml").config, spec_of("qwen3-1.7b"), hardware(resolve("c.toml").config, 30 * GIB))
    keys = [ORDER.index(remedy.changes[0].key) for remedy in found.remedies]
    assert len(keys) > 2 and keys == sorted(keys)


@pytest.mark.parametrize(("replicas", "fewer"), [(8, [4]), (4, [])])
def test_each_of_several_processes_keeps_a_replica(replicas, fewer):
    config = with_value(resolve("c.toml").config, "engine.replicas", replicas)
    assert config is not None
    machine = replace(hardware(config, 20 * GIB), process=(0, 4))
    changes = [
        change for remedy in advise(config, spec_of("qwen3-1.7b"), machine).remedies for change in remedy.changes
    ]
    assert changes and [change.value for change in changes if change.key == "engine.replicas"] == fewer


@pytest.mark.long
def test_adapters_are_proposed_for_a_preset_only_where_they_are_not_refused():
    """Training here would refuse adapters on random weights; on another machine a preset stands for its weights.

    Adapters would fit on both.
    """
    small = ("train.micro_batch_size=1", "train.global_batch_size=1", "data.max_length=64")
    here = (*HERE, "engine.devices=cpu:1", "engine.host_limit=12GiB")  # one device: few plans to try
    for machine, proposed in ((("--gpus", "1", "--host", "12GiB"), True), (here, False)):
        report = as_json(*machine, *small)[0]
        changed = {key for remedy in report["advice"]["remedies"] for key in remedy["changes"]}
        assert report["advice"]["missing"] and ("train.method" in changed) == proposed


def test_adapters_and_a_base_of_4_bits_are_proposed():
    config = resolve("c.toml").config
    for host, expected in ((20, {"train.method": "lora"}), (6, {"train.method": "lora", "lora.base": "nf4"})):
        machine = hardware(config, host * GIB)
        found = advise(config, spec_of("qwen3-1.7b"), machine, shape_of=trained_shape).remedies
        (method,) = (one.changes for one in found if "train.method" in values(one.changes))
        assert values(method) == expected
        changed = with_changes(config, method)
        assert changed is not None and plan_run(changed, trained_shape(changed, machine), machine)[1].fits


def test_nothing_is_said_of_what_fits():
    config = resolve("c.toml").config
    found = advise(config, spec_of("qwen3-1.7b"), hardware(config, 800 * GIB))
    assert (found.remedies, found.missing, str(found)) == ((), {}, "")


def test_a_full_disk(monkeypatch):
    write("tiny-tasks")
    overrides = [*HERE, "save.save_steps=1"]
    disk = as_json(*overrides)[0]["memory"][-1]
    one = disk["parts"][0]["nbytes"] // 10
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=disk["total"] - 6 * one, total=1 << 40))
    before, code = as_json(*overrides)
    assert code == 2 and before["advice"]["missing"] == {"disk space": 6 * one}
    (remedy, *_) = before["advice"]["remedies"]
    assert remedy["changes"] == {"save.save_total_limit": 3}  # and one that is written: 4 of 10
    assert as_json(*overrides, "save.save_total_limit=3")[1] == 0


def test_training_gives_the_same_advice_before_anything_is_loaded(tmp_path, monkeypatch):
    tools.write_model(tmp_path / "model")
    tools.write_config(tmp_path)

    def taken(*arguments: object, **named: object) -> None:
        raise AssertionError("memory was taken for a run that cannot be")

    monkeypatch.setattr("rptrain.train.session.ModelStore", taken)
    low = "engine.host_limit=10000"
    result = tools.invoke("--config", "run.toml", low)
    first, *rest = result.stderr.splitlines()
    assert result.exit_code == 2 and "engine.host_limit allows" in first
    assert rest == ["what makes it fit:", *[line for line in rest if line.startswith("- ")]]
    (raised,) = (line.removeprefix("- ").split()[0] for line in rest if line.startswith("- engine.host_limit="))
    assert tools.invoke("plan", "--config", "run.toml", low, raised).exit_code == 0


# Flags


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--gpus", "0"], "--gpus must be from 1 to 1024, not 0"),
        (["--gpus", "1000000000"], "--gpus must be from 1 to 1024, not 1000000000"),
        (["--card", ""], "--card must be one of rtx3090, rtx4090, rtx5090, l40s, a100, a800, h100, h200, not ''"),
        (["--vram", "24"], "--vram must be a size such as 24GiB, not '24'"),
        (["--vram", "0GiB"], "--vram must be a size such as 24GiB, not '0GiB'"),
        (["--pcie", "fast"], "--pcie must be a size such as 25GB/s, not 'fast'"),
        (["--host", "much"], "--host must be a size such as 800GiB, not 'much'"),
        (["--tflops", "-1"], "--tflops must be a number such as 165, not -1"),
        (["--tflops", "nan"], "--tflops must be a number such as 165, not nan"),
        (["--tflops", "inf"], "--tflops must be a number such as 165, not inf"),
        (["--tflops-fp16", "0"], "--tflops-fp16 must be a number such as 330, not 0"),
        (["--tflops-fp8", "1e9"], "--tflops-fp8 must be a number such as 330, not 1e+09"),
        (["--card", "rtx409"], "not 'rtx409'; did you mean rtx4090?"),
        (["--card", "x"], "--card must be one of rtx3090, rtx4090, rtx5090, l40s, a100, a800, h100, h200, not 'x'\n"),
        (["--gpus", "two"], "Invalid value for '--gpus'"),
        (["--gpus", "4", "engine.devices=cuda:0,1"], '--gpus 4 is not the 2 of engine.devices = "cuda:0,1": leave it'),
        (["--card", "h100", "engine.devices=cpu:2"], 'engine.devices = "cpu:2" is workers on the CPU: engine.devices='),
    ],
)
def test_bad_flags_end_with_2(flags, said):
    result = run(*flags)
    assert (result.exit_code, result.stdout) == (2, "") and said in result.stderr


def test_all_bad_flags_are_named_at_once():
    assert len(run("--gpus", "0", "--vram", "24", "--pcie", "fast", "--card", "x").stderr.splitlines()) == 4


def test_flags_stand_for_the_cards_figures():
    found = as_json("--gpus", "3", "--card", "RTX 5090", "--pcie", "10GB/s", "--tflops", "100", "--vram", "20GiB")[0]
    assert found["machine"] == {
        "here": False, "card": "RTX 5090", "tflops": 100.0, "link": 10**10, "devices": 3, "gpus": True,
        "asked": 3, "card_source": "--card",
        "rates": {"bf16": pytest.approx(108), "fp16": pytest.approx(0.8 * 419 / 2.09),
                  "fp8": pytest.approx(0.8 * 419 / 2.09),
                  "source": "estimated: 1.08 of the data sheet's peak, 0.80 in FP8, 0.80 with sums in float16"},
    }  # fmt: skip
    given = as_json("--card", "l40s", "--tflops-fp16", "700", "--tflops-fp8", "600")[0]["machine"]
    assert given["rates"] | {"bf16": 0.8 * 362, "fp16": 560, "fp8": 480} == given["rates"]
    assert found["memory"][1]["limit"] == 20 * GIB - (256 << 20)


@pytest.mark.long
def test_a_card_that_no_flag_names_is_said_to_be_assumed():
    assumed, shown = as_json("--gpus", "4")[0]["machine"], run("--gpus", "4", columns=200).stdout
    assert (assumed["card"], assumed["card_source"]) == ("RTX 4090", "assumed")
    assert "RTX 4090 is assumed: name the GPU model with --card" in shown.splitlines()
    assert "assumed" not in run("--gpus", "4", "--card", "rtx4090", columns=200).stdout
    write("tiny-tasks")  # which fits here: advice would be searched for the larger one
    assert as_json(*HERE)[0]["machine"]["card_source"] == "this machine"


def test_mistakes_in_the_config_are_named_as_in_training():
    result = run(*SERVER, "train.sed=3")
    assert (result.exit_code, result.stdout) == (2, "") and "did you mean `train.seed`?" in result.stderr
    assert run(*SERVER, "model.path=nowhere").exit_code == 2
    assert CliRunner().invoke(app, ["plan"]).exit_code == 2


def test_fewer_micro_batches_than_devices_use_fewer():
    found = as_json(*SERVER, "train.micro_batch_size=16")[0]
    assert "4 of 8 GPUs: a round has 4 micro-batches" in run(*SERVER, "train.micro_batch_size=16").stdout
    assert "GPUs: a round" not in run(*SERVER).stdout
    assert (found["machine"]["devices"], found["machine"]["asked"]) == (4, 8) and found["plan"]["text"].endswith(
        "N=4 M=4 MR=4"
    )


# Types of products


@pytest.mark.parametrize(
    ("arguments", "names", "suggested"),
    [
        ([], ["bfloat16", "FP8 in the blocks"], {"engine.fp8": True}),
        (["engine.fp8=true"], ["FP8 in the blocks", "bfloat16"], None),
        (
            ["--card", "rtx3090", "model.dtype=float16"],
            ["float16 with float32 sums", "float16 with float16 sums"],
            {"engine.fp16_accumulation": True},
        ),
        (
            ["--card", "a100", "model.dtype=float16"],
            ["float16 with float32 sums", "float16 with float16 sums"],
            None,
        ),
    ],
)
def test_the_other_type_of_products_is_estimated(arguments, names, suggested):
    found = as_json(*SERVER, *arguments)[0]
    present, other = found["types"]["estimates"]
    assert [present["name"], other["name"]] == names and found["types"]["suggested"] == suggested
    assert present["seconds_per_step"] == found["plan"]["seconds_per_step"]
    assert present["tokens_per_second"] == pytest.approx(found["step"]["tokens"] / present["seconds_per_step"])
    overrides = [f"{key}={str(value).lower()}" for key, value in other["settings"].items()]
    whole = as_json(*SERVER, *[one for one in arguments if not one.startswith("engine.")], *overrides)[0]["plan"]
    assert 1 <= other["seconds_per_step"] / whole["seconds_per_step"] < 1.03, "its search is short"


def test_a_faster_type_is_suggested():
    text = " ".join(run(*SERVER).stdout.split())
    assert "Types of products (estimated) bfloat16, as in the config: 6" in text
    assert re.search(r"FP8 in the blocks: \d{2,3},\d{3} tokens/s, 1\.[4-8]\d times as much", text)
    assert "engine.fp8 = true would make this run faster." in text
    text = " ".join(run(*SERVER, "engine.fp8=true").stdout.split())
    assert "Products at 158 TFLOP/s, 284 in FP8, estimated" in text
    assert "bfloat16: 6" in text and "would make" not in text


def test_measured_rates_are_named(monkeypatch):
    measured = MeasuredRates(Rates(150.4, 290, 260), "2026-11-24")
    monkeypatch.setitem(CARDS, "rtx4090", replace(CARDS["rtx4090"], measured=measured))
    before = as_json(*SERVER)[0]
    assert before["machine"]["rates"] == {
        "bf16": 150.4, "fp16": 290, "fp8": 260, "source": "measured by rptrain doctor on 2026-11-24",
    }  # fmt: skip
    assert before["machine"]["tflops"] == 165
    text = " ".join(run(*SERVER).stdout.split())
    assert "165 TFLOP/s and 25 GB/s each way Products at 150 TFLOP/s, measured by rptrain doctor on 2026-11-24" in text
    text = " ".join(run(*SERVER, "model.dtype=float16", "engine.fp16_accumulation=true").stdout.split())
    assert "Products at 150 TFLOP/s, 290 with sums in float16, measured" in text


@pytest.mark.sample(2, gate=4)
@pytest.mark.parametrize(
    "arguments",
    [
        ["--card", "rtx3090"],
        ["model.dtype=float32"],
        ["model.path={folder}/odd"],
        ["--gpus", "1", "--vram", "2800MiB", "model.path=mistral-7b", "train.micro_batch_size=1", "lora.r=8"],
    ],
    ids=["card", "dtype", "sizes", "memory"],
)
def test_a_type_that_cannot_be_used_is_left_out(folder, arguments):
    """The card has no FP8; its rate in float32 is unknown; no size is a multiple of 16; the codes of a frozen
    base do not fit."""
    config = read_config(locate("qwen3-1.7b"))
    (folder / "odd").mkdir()
    sizes = {"hidden_size": 2044, "num_attention_heads": 7, "num_key_value_heads": 7, "head_dim": 2}
    (folder / "odd" / "config.json").write_text(json.dumps(config | sizes | {"intermediate_size": 6140}))
    arguments = [one.format(folder=folder) for one in arguments]
    found = as_json(*SERVER, *arguments)[0]
    assert found["plan"] and found["types"] is None
    assert "Types of products" not in run(*SERVER, *arguments).stdout


# JSON and pictures

KEYS = {
    "": [
        "fits",
        "problem",
        "refusals",
        "warnings",
        "data_warnings",
        "model",
        "machine",
        "step",
        "plan",
        "length",
        "types",
        "roofline",
        "reading",
        "scaling",
        "memory",
        "advice",
        "comparison",
        "data",
    ],
    "model": ["path", "architecture", "parameters", "layers", "base"],
    "machine": ["here", "card", "tflops", "link", "devices", "gpus", "asked", "card_source", "rates"],
    "step": ["micro_batch_size", "length", "micro_batches", "round_size", "replicas", "tokens", "update"],
    "plan": ["text", "stages", "seconds_per_step", "tokens_per_second", "bubble", "source", "past"],
    "types": ["estimates", "suggested"],
    "roofline": ["ridge", "blocks", "limit", "loss", "stages"],
    "scaling": [
        "network",
        "rate",
        "plans",
        "gradient_bytes",
        "weight_bytes",
        "exchange_seconds",
        "limits",
        "loss",
        "hiding_rate",
    ],
    "advice": ["remedies", "missing", "machines"],
}


def test_json_has_the_documented_keys():
    found, _ = as_json("--gpus", "8", "--host", "30GiB")
    assert found["types"] is None, "nothing is compared with a run that does not fit"
    found["types"] = as_json(*SERVER)[0]["types"]
    assert found["scaling"] is None
    found["scaling"] = as_json(*SERVER, "--nodes", "2", "--network", "10GbE", "engine.replicas=2")[0]["scaling"]
    for name, keys in KEYS.items():
        assert list(found[name] if name else found) == keys
    for place in found["memory"]:
        assert list(place) == ["kind", "name", "parts", "limit", "source", "notes", "total", "fits"]
        assert place["total"] == sum(part["nbytes"] for part in place["parts"])
    plan = Plan.parse(found["plan"]["text"])
    assert [(s["kind"], s["first"], s["last"] + 1) for s in found["plan"]["stages"]] == [
        (stage.kind, stage.start, stage.stop) for stage in plan.stages
    ]
    seconds, tokens = found["plan"]["seconds_per_step"], found["step"]["tokens"]
    assert found["plan"]["tokens_per_second"] == pytest.approx(tokens / seconds)


def test_json_without_a_plan():
    found, code = as_json("--gpus", "8", "--host", "800GiB", "--vram", "2GiB")
    assert code == 2 and found["plan"] is None and found["roofline"] is None
    assert "even as its own stage" in found["problem"] and found["advice"]["missing"]["GPU memory"] > 0


def test_the_experts_of_a_model_are_another_kind_of_block():
    write("gpt-oss-20b")
    windowed, whole = as_json(*SERVER)[0]["roofline"]["blocks"]
    assert (windowed["layers"], whole["layers"]) == (12, 12) and windowed["forward"] < whole["forward"]


def test_a_base_in_4_bits_has_more_operations_a_byte():
    wide, narrow = (
        as_json(*SERVER, "train.method=lora", f"lora.base={base}")[0]["roofline"]["blocks"][0]["forward"]
        for base in ("bf16", "nf4")
    )
    assert 1 < narrow / wide < 2 / 0.5625


def test_pictures(folder):
    result = run(*SERVER, "--svg", "step.svg", "--trace", "step.json")
    assert result.exit_code == 0
    assert (folder / "step.svg").read_text().startswith("<svg ")
    assert json.loads((folder / "step.json").read_text())["traceEvents"]
    missing = run(*SERVER, "--svg", "nowhere/step.svg")
    assert missing.exit_code == 2 and "--svg: the folder" in missing.stderr
    none = run("--gpus", "8", "--vram", "2GiB", "--svg", "none.svg")
    assert none.exit_code == 2 and "there is no plan to draw" in none.stderr


# "auto", and times that were measured


def test_a_plan_that_was_found_for_auto_is_not_searched_again(monkeypatch: pytest.MonkeyPatch):
    flags = (*SERVER, "engine.round_size=auto")
    found = as_json(*flags, "train.micro_batch_size=auto")[0]
    step = found["step"]
    numbers = f"train.micro_batch_size={step['micro_batch_size']}", f"engine.round_size={step['round_size']}"
    assert as_json(*SERVER, *numbers)[0] == found
    monkeypatch.setattr("rptrain.planner.report.plan_run", None)  # a call fails
    assert as_json(*flags, "train.micro_batch_size=auto")[0] == found


def test_auto_is_settled_by_the_planner():
    step = as_json(*SERVER, "train.micro_batch_size=auto", "engine.round_size=auto")[0]["step"]
    assert step["micro_batch_size"] * step["micro_batches"] == 64
    assert step["micro_batches"] % step["round_size"] == 0


@pytest.mark.long
def test_auto_finds_what_the_host_has_room_for():
    """The quickest choice by far has too many activations for it."""
    write("llama-3.1-8b")
    arguments = ("--gpus", "8", "--card", "rtx4090", "train.micro_batch_size=auto", "engine.round_size=auto")
    quickest, code = as_json(*arguments)
    assert code == 0 and quickest["memory"][0]["total"] > 133 * GIB
    found, code = as_json(*arguments, "--host", "142GiB")  # 133 GiB are left for a run
    assert code == 0 and found["fits"] and found["memory"][0]["total"] <= 133 * GIB


def test_auto_where_the_host_is_too_small():
    found, code = as_json("--gpus", "8", "--host", "20GiB", "train.micro_batch_size=auto", "engine.round_size=auto")
    assert code == 2 and found["plan"] and found["advice"]["missing"]["host memory"] > 0


def test_auto_where_nothing_fits():
    found, code = as_json("--gpus", "8", "--vram", "2GiB", "train.micro_batch_size=auto", "engine.round_size=auto")
    assert code == 2 and found["problem"] and found["step"]["micro_batch_size"] == 1


def test_the_times_of_a_run_that_would_go_on_are_taken(tmp_path):
    tools.write_model(tmp_path / "model")
    resolved = tools.write_config(tmp_path, "train.max_steps=4", "save.save_steps=2")
    folder = train(resolved, quiet=True)
    folder.events_path.write_text("")  # it was cut off
    before = report(resolve(tmp_path / "run.toml"), MachineFlags())
    assert before.source == "profile of CPU"
    spec = before.spec
    layers = len(spec.stack)
    measured = Measured((0.5,) * layers, (1.0,) * layers, None, None, 0.0, 3)
    Timings(Conditions.of(before.config, spec, before.hardware), measured).save(folder.path)
    after = report(resolve(tmp_path / "run.toml"), MachineFlags())
    assert after.source == f"times measured in {folder.path}"
    assert after.run is not None and after.run.estimate.period >= 2


# As a shell sees it

LOADED = """
import os, sys
from rptrain import cli

def end(code, end=os._exit):
    heavy = "transformers", "tokenizers", "safetensors", "torch._inductor", "triton"
    print([name for name in heavy if name in sys.modules], file=sys.stderr, flush=True)
    end(code)

os._exit = end
cli.main()
"""


def test_nothing_heavy_is_loaded_and_no_color_is_shown():
    line = [sys.executable, "-P", "-c", LOADED, "plan", "--config", "c.toml", "--gpus", "2", "--host", "20GiB"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "[]\n")
    assert "does not fit" in done.stdout and "\x1b" not in done.stdout


def test_all_output_is_written_before_the_process_ends():
    """Also where a pipe takes less at once, and in files."""
    files = ["--svg", "step.svg", "--trace", "step.json"]
    line = [sys.executable, "-P", "-m", "rptrain", "plan", "--config", "c.toml", "--json", "--compare", *files, *SERVER]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)
        text = process.stdout.read()
    assert process.returncode == 0 and len(text) > 4096 and json.loads(text)["comparison"]
    assert Path("step.svg").read_text().endswith("</svg>\n") and json.loads(Path("step.json").read_text())


@pytest.mark.parametrize(("card", "half_sums"), [("rtx4090", True), ("l40s", False)])
def test_geforce_cards_are_planned_with_sums_in_float16(card, half_sums):
    write("qwen3-1.7b")
    found = report(resolve("c.toml", ["engine.fp8=true"]), MachineFlags(card=card))
    assert {layer.half_sums for layer in found.spec.stack} == {half_sums}


@pytest.mark.long
@pytest.mark.sample(12)
@pytest.mark.parametrize("preset", presets())
@pytest.mark.parametrize("card", CARDS)
def test_every_preset_on_every_card(card, preset):
    write(preset)
    few = ["train.micro_batch_size=1", "train.global_batch_size=4"]
    found = report(resolve("c.toml", few), MachineFlags(gpus=2, card=card, host="2000GiB"))
    assert (found.run is None) == (found.problem is not None)
    assert json.dumps(found.to_dict())
