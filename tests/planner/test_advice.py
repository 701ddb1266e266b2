"""Advice for what does not fit: every line makes it fit when it is typed in."""

from collections import Counter
from dataclasses import replace
from math import inf
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from benchmarks.advice import CONFIG, checked, draw, typed
from rptrain.config.resolve import resolve
from rptrain.config.schema import Config
from rptrain.machine.flags import MachineFlags
from rptrain.machine.hardware import Hardware, planned
from rptrain.planner.advice import Advice, advise, values
from rptrain.planner.changes import ORDER, with_changes
from rptrain.planner.memory import plan_run
from rptrain.planner.report import report
from rptrain.preflight.model import trained_shape
from rptrain.schedule.machine import CARDS
from rptrain.utils.errors import UserError

from .. import run_tools as tools

GIB = 1 << 30


def config_of(*overrides: str) -> Config:
    return resolve(Path("c.toml"), ("data.max_length=2048", "train.global_batch_size=64", *overrides), CONFIG).config


def machine(config: Config, host: float, vram: float = 24, gpus: int = 2, most: float = inf) -> Hardware:
    """A hypothetical machine with this much usable host memory, in GiB."""
    found = planned(replace(CARDS["rtx4090"], vram=int(vram * GIB)), gpus, None, config.engine)
    exists = host if most == inf else most
    return replace(found, host=int(host * GIB), host_most=int(exists * GIB), host_source="--host")


def advice(config: Config, hardware: Hardware) -> Advice:
    """The advice, whose remedies are planned with the changes."""
    spec = trained_shape(config, hardware)
    found = advise(config, spec, hardware, shape_of=trained_shape)
    for remedy in found.remedies:
        changed = with_changes(config, remedy.changes)
        assert changed is not None
        limited = hardware.limited(changed.engine)
        assert plan_run(changed, trained_shape(changed, limited), limited)[1].fits
    return found


def overrides_of(found: Advice) -> list[str]:
    return [" ".join(map(str, remedy.changes)) for remedy in found.remedies]


@pytest.mark.long
def test_a_large_model_on_a_small_host():
    """Of 256 GiB, 244 are usable: even the smallest states of all weights take 246."""
    given, flags = (
        ("model.path=qwen3-32b", "train.micro_batch_size=4"),
        MachineFlags(gpus=4, card="rtx4090", host="256GiB"),
    )
    found = report(resolve(Path("c.toml"), (*given, "train.global_batch_size=64"), CONFIG), flags)
    assert not found.fits and overrides_of(found.advice) == ["train.method=lora"]
    whole, states = found.advice.machines
    assert not whole.changes and values(states.changes) == {"optim.moments": "int8", "optim.update": "sync"}
    assert whole.host and states.host and 256 * GIB < states.host < whole.host
    text = str(found.advice).splitlines()[-1]
    overrides, larger = typed(text, flags)
    config = resolve(Path("c.toml"), (*given, "train.global_batch_size=64", *overrides), CONFIG).config
    assert plan_run(config, trained_shape(config, larger.machine(config)), larger.machine(config))[1].fits


def test_a_quantized_base_that_is_too_large_is_read_from_the_disk_as_it_is_stored():
    given = ("model.path=llama-3.1-8b", "lora.r=8", "lora.base=nf4", "train.global_batch_size=1")
    found = report(resolve(Path("c.toml"), given, CONFIG), MachineFlags(gpus=1, card="rtx4090", host="6GiB"))
    assert not found.fits and overrides_of(found.advice) == ["lora.base=bf16 model.hold=map"]


@pytest.mark.parametrize(("base", "copied"), [("nf4", 3 * 14336 * 4096 + 2 * 5120 * 4096), ("bf16", None)])
def test_answers_to_sample_prompts_need_a_copy_of_the_weights_of_a_layer(base: str, copied: int | None):
    given = ("model.path=llama-3.1-8b", "lora.r=8", f"lora.base={base}", "data.val_size=1", "log.sample_prompts=['a']")
    config = config_of(*given)
    hardware = machine(config, 64)
    _, memory = plan_run(config, trained_shape(config, hardware), hardware)
    found = {part.name: part.nbytes for part in memory.host.parts}.get("answers to sample prompts")
    assert found == (copied and 2 * copied)


def test_a_larger_gpu_has_what_is_missing():
    """Also for its CUDA context."""
    config = config_of()
    small = machine(config, host=24, vram=2)
    found = advise(config, trained_shape(config, small), small, shape_of=trained_shape)
    assert found.machines
    for larger in found.machines:
        assert larger.vram is not None and 2 * GIB + larger.more["GPU memory"] <= larger.vram


@pytest.mark.long
def test_every_line_makes_a_random_config_fit():
    """Of a small model on machines that are smaller still."""
    random, counts = Random(0), Counter[str]()
    for _ in range(16):
        given, flags, nodes = draw(random, ["tiny-tasks"], ["1700MiB", "2GiB", "3GiB"], ["2GiB", "1400MiB"])
        if "data.max_length=131072" in given:
            continue  # takes long
        try:
            found, lines = checked(given, flags, nodes)
        except UserError:  # settings that do not go together
            continue
        counts["fits" if found.fits else "does not"] += 1
        assert found.fits or lines
    assert min(counts["fits"], counts["does not"]) > 2


STATES = ("optim.moments=int8", "optim.update=sync")
ADAPTERS = ("train.method=lora", "lora.base=nf4", "data.max_length=32768", "train.global_batch_size=2")


@pytest.mark.long
@pytest.mark.parametrize(
    ("overrides", "host", "vram", "most", "keys"),
    [
        ((), 24, 24, inf, ["optim.moments"]),
        (("optim.moments=int8",), 20, 24, inf, ["optim.update"]),
        (STATES, 15.5, 24, inf, ["train.global_batch_size"]),
        (("train.micro_batch_size=4",), 800, 5.25, inf, ["train.micro_batch_size"]),
        (
            ("train.micro_batch_size=4", "engine.round_size=8", *STATES),
            15.5,
            24,
            inf,
            ["engine.round_size", "train.global_batch_size"],
        ),
        (("train.micro_batch_size=4", "engine.replicas=2", *STATES), 22, 24, inf, ["engine.replicas"]),
        (("engine.host_limit=2GiB",), 2, 24, 5, ["engine.host_limit", "train.method", "lora.base"]),
        (ADAPTERS, 60, 4, inf, ["data.max_length"]),
    ],
    ids=["states", "sync", "batch", "micro-batches", "rounds", "replicas", "limit", "length"],
)
def test_the_cheapest_changes_come_first(overrides, host, vram, most, keys):
    config = config_of("model.path=qwen3-1.7b", *overrides)
    found = advice(config, machine(config, host, vram, most=most)).remedies
    assert list(values(found[0].changes)) == keys
    places = [max(ORDER.index(change.key) for change in remedy.changes) for remedy in found]
    assert places == sorted(places)


def test_a_disk_that_is_too_small_for_one_checkpoint(tmp_path, monkeypatch):
    tools.write_model(tmp_path / "model")
    tools.write_config(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1 << 20, total=1 << 40))
    found = report(resolve(tmp_path / "run.toml"), MachineFlags()).advice
    assert not found.remedies and list(found.missing) == ["disk space"]
    assert str(found).endswith("more disk space: make room, or set save.output_dir to another disk")
