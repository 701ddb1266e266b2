"""The memory that a plan says a run takes, against what a run took, by the operating system's count."""

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from inspect import getsource
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rptrain.checkpoint.atomic_dir import SLACK
from rptrain.config.resolve import resolve
from rptrain.data.template import parts_bytes
from rptrain.engine.distributed.sums import BLOCK
from rptrain.engine.footprint import footprint
from rptrain.engine.memory.share import Share
from rptrain.engine.memory.store import ModelStore
from rptrain.machine import hardware as devices
from rptrain.machine.hardware import LATER
from rptrain.models.families import registry
from rptrain.models.locate import PRESETS, locate, read_config
from rptrain.models.transforms.fp8 import with_fp8
from rptrain.models.transforms.freeze import freeze
from rptrain.models.transforms.lora import LoRA, with_lora
from rptrain.models.transforms.quantize import with_base
from rptrain.models.weights.quantized import QUANTIZING
from rptrain.planner.choose import step_layout
from rptrain.planner.memory import (
    CUDA,
    CUDA_EACH,
    TOKENIZERS,
    MemoryPlace,
    least_memory,
    long_text_warning,
    plan_run,
    saves,
    state_parts,
    worker_bytes,
)
from rptrain.preflight.model import training_model
from rptrain.schedule.machine import CARDS, CPU
from rptrain.schedule.plan import Plan
from rptrain.train.run import train
from rptrain.utils.errors import UserError
from rptrain.utils.parallel import most_threads
from rptrain.utils.units import format_bytes

from .. import own_memory
from .. import run_tools as tools
from ..cases import grid
from ..layouts import layout_of

GIB = 1 << 30
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
LARGE = {  # 23 million parameters
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
    "tie_word_embeddings": False,
}
CONFIG = """\
[model]
path = "{folder}/model"
init = "random"
[[data.train]]
path = "builtin:random"
[data]
max_length = 64
[train]
micro_batch_size = 1
global_batch_size = 4
max_steps = 4
[save]
output_dir = "{folder}/runs"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    preset = json.loads((PRESETS / "tiny-tasks" / "config.json").read_text())
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(preset | LARGE))
    (tmp_path / "c.toml").write_text(CONFIG.format(folder=tmp_path))
    return tmp_path


def planned(folder: Path, *overrides: str):
    config = resolve(folder / "c.toml", overrides).config
    spec = registry.build(read_config(locate(config.model.path)))
    hardware = devices.here(config.engine)
    run, memory = plan_run(config, spec, hardware)
    return config, spec, hardware, run, memory


# A run, in a process of its own. What the program takes before it is planned as PSS, which depends on other processes:
# it is left out on both sides. What comes beside it is counted in pages of this process.

MEASURED = """
import json, sys
from pathlib import Path
from rptrain.machine import hardware
from rptrain.config.resolve import resolve
from rptrain.planner.memory import plan_run
from rptrain.preflight.model import training_model
from rptrain.train.run import train

resolved = resolve(sys.argv[1], sys.argv[2:])
_, spec = training_model(resolved.config)
least, program = anonymous_and_files()[0], hardware.program_bytes()
before = sum(anonymous_and_files())
assert least <= program <= before, (least, program, before)
hardware.program_bytes = lambda: program
host = plan_run(resolved.config, spec, hardware.here(resolved.config.engine))[1].host
Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
train(resolved, quiet=True)
peak = kib()["VmHWM"] << 10
parts = {part.name: part.nbytes >> 20 for part in host.parts}
print(json.dumps({"planned": host.total - program, "measured": peak - before, "before": before, "parts": parts}))
"""


def case(*overrides):
    return pytest.param(overrides, id="-".join(text.partition("=")[2].replace(":", "") for text in overrides))


@pytest.mark.sample(3)
@pytest.mark.long
@pytest.mark.parametrize(
    "overrides",
    [
        case("model.dtype=bfloat16", "optim.update=async", "engine.devices=cpu:2"),
        case("model.dtype=bfloat16", "optim.update=sync", "engine.devices=cpu:1", "engine.round_size=2"),
        case("model.dtype=bfloat16", "optim.update=async", "engine.devices=cpu:2", "optim.moments=int8"),
        # short sequences: products in float16 take long
        case("model.dtype=float16", "engine.devices=cpu:2", "train.global_batch_size=2", "data.max_length=16"),
        case("model.dtype=bfloat16", "optim.update=async", "engine.devices=cpu:2", "engine.fp8=true"),
        case("model.dtype=float32", "optim.update=async", "engine.devices=cpu:1"),
        case("model.dtype=float32", "optim.update=sync", "engine.devices=cpu:2"),
    ],
)
def test_a_run_takes_what_was_planned(folder, overrides):
    line = [sys.executable, "-P", "-c", getsource(own_memory) + MEASURED, str(folder / "c.toml"), *overrides]
    done = subprocess.run(line, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "2"})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    limit = 0.05 * (found["before"] + found["measured"])
    assert found["planned"] == pytest.approx(found["measured"], rel=0, abs=limit), found


# What a process grows by at most while it fills buffers that it has: its resident set, files that it maps included.

LOADING = """
import json, os, sys
from dataclasses import replace
from pathlib import Path
import torch
from rptrain.checkpoint.state import load_state, save_state
from rptrain.engine.memory.step_layout import StepLayout
from rptrain.engine.memory.store import ModelStore
from rptrain.models.families import registry
from rptrain.models.locate import read_config
from rptrain.models.transforms.lora import LoRA, with_lora, without_adapters
from rptrain.models.transforms.quantize import with_base
from rptrain.models.weights import pretrained

def growth(load):
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before = kib()["VmRSS"]
    load()
    return kib()["VmHWM"] - before

def load(name):
    pretrained.load(pretrained.check(folder / name, spec), spec, store.view)
    store.loaded()

os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
folder = Path(sys.argv[1])
spec = registry.build(read_config(folder / "model"))
layout = StepLayout(1, 8, 1, 1, torch.bfloat16, asynchronous=True)
store = ModelStore(spec, layout)
for state in store.units:
    for tensor in (*state.params, state.grad, *state.moments.values(), state.remainder):
        tensor.fill_(1)
pretrained.save(folder / "same", spec, store.view, torch.bfloat16)
pretrained.save(folder / "other", spec, store.view, torch.float32)
state = save_state(folder, store.units, step=1, meta={"model_dir": str(folder / "model")})
narrow = ModelStore(with_base(with_lora(spec, LoRA(r=1)), "nf4"), replace(layout, asynchronous=False))
for held in narrow.units:
    held.params[0].fill_(1)

def quantize():
    own = without_adapters(narrow.spec)
    pretrained.load(pretrained.check(folder / "other", own), own, narrow.stored_view)

found = {name: growth(lambda: load(name)) for name in ("same", "other")} | {"nf4": growth(quantize)}
print(json.dumps(found | {"state": growth(lambda: load_state(state, store.units))}))
"""


@pytest.mark.long
def test_loading_takes_nothing_beside_the_buffers_that_were_planned(folder):
    """Of 45, 90, 90 and 360 MiB that are read; code that is first used comes beside, and pieces that are converted."""
    shutil.copyfile(PRESETS / "tiny-tasks" / "tokenizer.json", folder / "model" / "tokenizer.json")
    line = [sys.executable, "-P", "-c", getsource(own_memory) + LOADING, str(folder)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "2"})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert all(kib << 10 < 24 << 20 for kib in found.values()), found


def test_what_threads_take_to_quantize_is_planned(folder):
    config, spec, *_ = planned(folder)
    narrow = with_base(with_lora(spec, LoRA(r=1)), "nf4")
    counted = [
        [part.nbytes for part in plan_run(config, each, devices.here(config.engine))[1].host.parts if part.name == name]
        for each, name in ((narrow, "quantizing"), (spec, "quantizing"))
    ]
    assert counted == [[QUANTIZING * most_threads()], []]


@pytest.mark.parametrize("update", ["sync", "async"])
@pytest.mark.parametrize("gpus", [1, 2])
def test_cuda_takes_of_the_host_what_was_measured(update, gpus):
    """0.3 GiB are of a program that has imported torch for CUDA."""
    result = json.loads((RESULTS / f"qwen3-1.7b-{update}-{gpus}gpu.json").read_text())
    states = result["state_bytes_per_parameter"] * result["parameters"] / GIB + result["activations_gib"]
    planned = states + (CUDA + CUDA_EACH * gpus + sum(LATER.values())) / GIB + 0.3
    assert planned == pytest.approx(result["process_pss_gib"], rel=0.005)


# The parts


@pytest.mark.sample(16)
@pytest.mark.parametrize(
    ("dtype", "moments"),
    [("float64", "fp32"), *product(("bfloat16", "float16", "float32"), ("fp32", "bf16", "int8"))],
)
@pytest.mark.parametrize("update", ["sync", "async"])
@pytest.mark.parametrize("size", [4, 2])
@pytest.mark.parametrize("frozen", [(), ("model.embed_tokens.weight", "*.mlp.*", "model.layers.2.*")])
def test_states_are_the_buffers_of_the_store(folder, dtype, moments, update, size, frozen):
    kind = (f"model.dtype={dtype}", f"optim.update={update}", f"optim.moments={moments}")
    config, spec, *_ = planned(folder, *kind, f"engine.round_size={size}", "engine.devices=cpu:2")
    spec, layout = freeze(spec, frozen), step_layout(config, CPU)
    run, memory = plan_run(config, spec, devices.here(config.engine))
    parts = state_parts(spec, layout)
    assert [part.name == "frozen weights" for part in parts].count(True) == bool(frozen)
    rows = [part for part in memory.host.parts if "embedding" in part.name]
    assert len(rows) == (not frozen)
    assert layout.wide_grad == (size == 2)
    assert sum(part.nbytes for part in parts) == run.store_bytes
    assert run.store_bytes == sum(ModelStore.sizes(spec, layout).values())
    with ModelStore(spec, layout) as store:
        assert store._arena._used == run.store_bytes
        assert store.locking.copied == sum(ModelStore.sizes(spec, layout, copied=True).values())


@pytest.mark.parametrize(
    ("release", "limit", "said"),
    [
        ("6.8.0-87-generic", resource.RLIM_INFINITY, []),
        ("6.8.0-87-generic", 1 << 20, ["`ulimit -l` allows 1.00 MiB"]),
        ("5.15.167.4-microsoft-standard-WSL2", resource.RLIM_INFINITY, [".wslconfig"]),
        ("5.15.167.4-microsoft-standard-WSL2", 1 << 20, ["`ulimit -l` allows 1.00 MiB", ".wslconfig"]),
    ],
    ids=["no-limit", "ulimit", "wsl2", "both"],
)
def test_what_may_keep_memory_from_being_locked(folder, monkeypatch, release, limit, said):
    config, spec, hardware, *_ = planned(folder)
    monkeypatch.setattr(platform, "release", lambda: release)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    cards = devices.planned(CARDS["rtx4090"], 1, None, config.engine)
    for found, expected in ((replace(cards, here=True), said), (cards, []), (hardware, [])):
        run, memory = plan_run(config, spec, found)
        notes = [note for note in memory.host.notes if "page-locks" in note]
        assert len(notes) == bool(expected) and all(text in notes[0] for text in expected)
        copied = sum(ModelStore.sizes(spec, step_layout(config, cards.machine.card), copied=True).values())
        assert not notes or format_bytes(copied + run.boundary_bytes) in notes[0]


def test_one_of_several_processes_has_its_share_of_the_optimizer_state(folder):
    """In bfloat16, async: 4 bytes of weights, 4 of a gradient, and 10 that are divided."""
    config, spec, hardware, alone, _ = planned(folder, "engine.replicas=4", "engine.devices=cpu:1")
    states = []
    for rank in range(4):
        run, memory = plan_run(config, spec, replace(hardware, process=(rank, 4)))
        share = Share(rank, 4, 4)
        assert (run.plan.micro_batches, run.plan.replicas) == (1, 1)
        with ModelStore(spec, layout_of(torch.bfloat16, generations=2, wide_grad=True, share=share)) as store:
            assert store._arena._used == run.store_bytes
        exchanged = [part.nbytes for part in memory.host.parts if part.name == "gradients of other processes"]
        largest = max(part.stop - part.start for part in (share.part(spec, unit) for unit in range(len(spec.units))))
        assert exchanged == [3 * largest * 4]  # one piece, from each of the others
        states.append(run.store_bytes)
    parameters = sum(unit.numel for unit in spec.units)
    assert sum(states) == pytest.approx((4 * (4 + 4) + 10) * parameters, rel=0.01)
    assert alone.store_bytes == pytest.approx((4 + 4 * 4 + 10) * parameters - 3 * 4 * spec.units[0].numel, rel=0.01)


def test_processes_that_round_gradients_take_a_block_more(folder):
    parts = []
    for dtype in ("float32", "bfloat16"):
        options = ("engine.replicas=2", "engine.devices=cpu:1", f"engine.reduce_dtype={dtype}")
        config, spec, hardware, *_ = planned(folder, *options)
        _, memory = plan_run(config, spec, replace(hardware, process=(1, 2), program=0))  # which grows
        parts.append({part.name: part.nbytes for part in memory.host.parts})
    before, after = parts
    assert after == before | {"gradients of other processes": before["gradients of other processes"] + 2 * BLOCK}


def test_processes_without_a_replica(folder):
    config, spec, hardware, *_ = planned(folder, "engine.replicas=2", "engine.devices=cpu:1")
    with pytest.raises(UserError, match=r"engine\.replicas = 2, but 3 processes need .* set engine\.replicas to 3 or"):
        plan_run(config, spec, replace(hardware, process=(0, 3)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("update", ["sync", "async"])
def test_states_of_a_model_in_fp8_are_the_buffers_of_the_store(folder, dtype, update):
    """Of layers in FP8 and a frozen one, and the checkpoints that they make."""
    config, spec, *_ = planned(folder, f"model.dtype={dtype}", f"optim.update={update}", "engine.devices=cpu:2")
    spec, layout = with_fp8(freeze(spec, ("model.layers.2.*",))), step_layout(config, CPU)
    parts = {part.name: part.nbytes for part in state_parts(spec, layout)}
    twice = ", 2 generations" if update == "async" else ""
    wired = [unit.wire_bytes(layout.dtype.itemsize) for unit in spec.units if unit.wired]
    assert len(wired) == 5 and "weights" in parts
    assert parts[f"weights in FP8 for the devices{twice}"] == sum(-(-n // 4096) * 4096 for n in wired) * (
        1 + bool(twice)
    )
    with ModelStore(spec, layout) as store:
        assert store._arena._used == sum(parts.values())


def test_workers_are_counted_with_the_stages_that_come_to_them(folder):
    """Of six stages, two workers get the same three each time, in turn at both ends of the buffer for parameters.

    The accumulators of their two backward stages are always at the same ends.
    """
    _, spec, _, run, _ = planned(folder, "engine.devices=cpu:2", "model.dtype=float32")
    plan = Plan.parse("F0-1 F2-5 FB6-6 B4-5 B2-3 B0-1 | N=2 M=4 MR=4")
    counted = worker_bytes(spec, replace(run, plan=plan, device=footprint(spec, plan.stages, run.layout, 2)))
    block, head = (sum(spec.units[u].numel for u in layer.units) for layer in (spec.stack[0], spec.head))
    params = 2 * max(2 * block, head), 6 * block  # F0-1 FB6-6 B2-3, F2-5 B4-5 B0-1, of which two are together
    sums = head + 2 * block, 4 * block
    for worker, both in zip(counted, zip(params, sums, strict=True), strict=True):
        other = worker - 4 * sum(both)  # rings and work
        assert 0 < other < 4 * block


def test_a_worker_whose_backward_stages_come_in_twos_uses_less_of_their_buffer(folder):
    """Two of them are always at the same ends; three take turns. The parameters fill their buffer both times."""
    _, spec, _, run, _ = planned(folder, "engine.devices=cpu:1", "model.dtype=float32")
    block, head = (sum(spec.units[u].numel for u in layer.units) for layer in (spec.stack[0], spec.head))
    even = replace(run, plan=Plan.parse("F0-1 FB2-6 B1-1 B0-0 | N=1 M=4 MR=4"))
    odd = replace(run, plan=Plan.parse("F0-1 FB2-6 B0-1 | N=1 M=4 MR=4"))
    plans = [replace(one, device=footprint(spec, one.plan.stages, run.layout)) for one in (even, odd)]
    taken = [worker_bytes(spec, of_kind)[0] - of_kind.device.rings for of_kind in plans]
    assert taken[1] - taken[0] == 4 * ((6 * block + head) - (5 * block + head))


@pytest.mark.parametrize("frozen", ["[]", '["*.mlp.*", "model.layers.1.*"]'])
@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_the_disk_holds_what_was_planned(tmp_path, moments, frozen):
    """The files of a run that keeps one checkpoint and writes another, and of its export."""
    tools.write_model(tmp_path / "model")
    _holds_what_was_planned(tmp_path, f"optim.moments={moments}", f"train.freeze={frozen}")


@pytest.mark.parametrize("update", ["async", grid("sync")])
def test_the_disk_holds_the_codes_of_a_generation(tmp_path, update):
    tools.write_model(tmp_path / "model")
    _holds_what_was_planned(tmp_path, "engine.fp8=true", f"optim.update={update}")


@pytest.mark.long
def test_the_disk_holds_the_adapter_of_a_tied_embedding_twice(tmp_path):
    tools.write_model(tmp_path / "model", tie_word_embeddings=True)
    _holds_what_was_planned(tmp_path, "lora.r=2", "lora.modules_to_save=['embed_tokens']")


def test_the_disk_holds_tensors_that_are_copied(tmp_path):
    weights = tools.write_model(tmp_path / "model", **tools.GLM) / "model.safetensors"
    extra = {"model.layers.2.eh_proj.weight": torch.zeros(300, 100), "model.layers.2.steps": torch.zeros(5000).long()}
    save_file(load_file(weights) | extra, weights, {"format": "pt"})
    _holds_what_was_planned(tmp_path)


def _holds_what_was_planned(tmp_path, *changes):
    overrides = ["engine.devices=cpu:2", "save.save_steps=3", "save.save_total_limit=2"]
    resolved = tools.write_config(tmp_path, *overrides, *changes)
    _, spec = training_model(resolved.config)
    disk = plan_run(resolved.config, spec, devices.here(resolved.config.engine))[1].disk
    assert disk is not None and disk.parts[0].name.startswith("2 checkpoints")
    run = train(resolved, quiet=True)
    assert len(run.checkpoints()) == 2
    states = [file for path in run.checkpoints() for file in path.glob("units/*")]
    headers = sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in states)
    assert sum(file.stat().st_size for file in states) - headers == disk.parts[0].nbytes
    weights = sum(file.stat().st_size for file in run.model_path.glob("*.safetensors"))
    assert disk.parts[1].nbytes < weights < disk.parts[1].nbytes + 10_000
    assert disk.parts[2].nbytes == SLACK and disk.limit and disk.limit > 0
    assert disk.source == f"free in {tmp_path}"  # the runs' folder was not there yet


BEST = ("data.val_size=0.3", "train.eval_steps=1", "save.save_steps=1", "save.load_best_model_at_end=true")


@pytest.mark.parametrize(
    ("overrides", "written", "counted"),
    [
        ([], 1, 1),
        (["save.save_steps=2"], 2, 2),
        (["save.save_steps=3"], 2, 2),
        (["save.save_steps=1", "save.save_total_limit=1"], 4, 2),
        (["save.save_steps=1", "save.save_total_limit=9"], 4, 4),
        ([*BEST, "save.save_total_limit=1"], 4, 3),
        ([*BEST, "save.save_total_limit=2"], 4, 3),
        (["save.save_steps=1", "train.max_steps=1000"], 1000, 1000),
    ],
    ids=["last-only", "every-2", "every-3", "limit-1", "limit-9", "best-limit-1", "best-limit-2", "no-limit"],
)
def test_how_many_checkpoints_there_are_at_once(folder, overrides, written, counted):
    config, *_, memory = planned(folder, "engine.devices=cpu:1", *overrides)
    assert saves(config) == written
    assert memory.disk.parts[0].name.startswith("checkpoint" if counted == 1 else f"{counted} checkpoints")


def test_epochs_of_known_and_unknown_data(folder):
    text = (folder / "c.toml").read_text().replace("max_steps = 4\n", "num_epochs = 1.5\n")
    (folder / "c.toml").write_text(text)
    config = resolve(folder / "c.toml", ["save.save_steps=10"]).config
    assert saves(config) == 10  # 256 rows in 64 batches of 4: 96 steps
    (folder / "c.toml").write_text(text.replace("builtin:random", "rows.jsonl"))
    config, *_, memory = planned(folder, "save.save_steps=10", "engine.devices=cpu:1")
    assert saves(config) is None
    assert "not known" in memory.disk.notes[0] and "not counted" in memory.host.notes[0]
    assert "tokenizer" in [part.name for part in memory.host.parts]


def test_the_least_is_no_more_than_a_plan_takes(folder):
    config, spec, _, _, _ = planned(folder, "engine.devices=cpu:1")
    hardware = devices.planned(CARDS["rtx4090"], 2, 64 * GIB, config.engine)
    least, memory = least_memory(config, spec, hardware), plan_run(config, spec, hardware)[1]
    assert memory.disk is None and len(memory.gpus) == 2
    for low, place in zip(least.places, memory.places, strict=True):
        assert low.total <= place.total and low.limit == place.limit
    tight = devices.planned(CARDS["rtx4090"], 2, 64 * GIB, config.engine)
    assert plan_run(config, spec, tight)[1].gpus[0].total <= tight.gpus[0].limit


def test_a_plan_with_little_host_memory_takes_no_more_than_there_is(folder):
    """The limit is for all that the process takes, so the plan gets what the program leaves."""
    config, spec, hardware, _, memory = planned(folder, "engine.devices=cpu:1")
    for limit in (memory.host.total, memory.host.total - 1):
        config = config.model_copy(update={"engine": config.engine.model_copy(update={"host_limit": limit})})
        place = plan_run(config, spec, hardware.limited(config.engine))[1].host
        assert place.limit == limit and place.fits == (place.total <= limit)


def test_a_place():
    place = MemoryPlace("host memory", "host", (), 5, "free")
    assert place.fits and place.missing == 0
    assert json.loads(json.dumps(place.to_dict()))["fits"] is True
    unknown = MemoryPlace("host memory", "host", (), None, "not known")
    assert unknown.fits is None and unknown.missing == 0


# What there is


@pytest.mark.long
def test_a_process_has_memory():
    """One of its own: that of the tests has what they left."""
    code = "from rptrain.machine import hardware; print(hardware.program_bytes())"
    found = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert 5 << 20 < int(found.stdout) < GIB


def test_a_long_sample_is_a_warning_if_it_does_not_fit_while_it_is_tokenized():
    tokens, program = 30_000_000, 500 << 20
    needed = program + TOKENIZERS + parts_bytes(tokens)

    def warning(limit, tokens=tokens):
        return long_text_warning(tokens, MemoryPlace("host memory", "host", (), limit, "engine.host_limit"), program)

    assert not warning(None) and not warning(needed) and warning(needed - 1) and not warning(program, tokens=1000)
    assert f"30,000,000 tokens: with the program, tokenizing it takes about {format_bytes(needed)}" in warning(1 << 30)
    assert "but 1.00 GiB engine.host_limit allows: split this sample" in warning(1 << 30)
