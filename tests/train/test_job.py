"""What is found out before a run takes memory."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rptrain.config.resolve import resolve
from rptrain.planner.memory import MemoryPlace, plan_run, with_saved
from rptrain.runs.folder.event_log import EventLog
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records import events
from rptrain.train.job import prepare_job
from rptrain.utils.errors import TrainingError, UserError

from .. import run_tools as tools

CONFIG = '[model]\npath = "tiny-tasks"\n[[data.train]]\npath = "builtin:random"\n[engine]\ndevices = "cpu:2"\n'


def test_the_memory_of_workers_on_the_cpu_is_host_memory(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(CONFIG)
    config = resolve(tmp_path / "c.toml").config
    job = prepare_job(config)
    host = plan_run(config, job.spec, job.hardware)[1].host
    assert host.total > job.plan.store_bytes + job.plan.boundary_bytes + job.hardware.program
    assert any(part.name == "memory of 2 CPU workers" and part.nbytes for part in host.parts)
    prepare_job(config, replace(job.hardware, host=host.total))
    with pytest.raises(UserError, match="host memory"):
        prepare_job(config, replace(job.hardware, host=host.total - 1))


def test_a_run_and_its_plan_say_that_the_routers_loss_differs_from_transformers(tmp_path, caplog) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    routed = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], **experts}
    tools.write_model(tmp_path / "model", **routed, output_router_logits=True)
    prepare_job(tools.write_config(tmp_path).config)
    planned = tools.invoke("plan", "--config", str(tmp_path / "run.toml"), "--json")
    (found,) = (text for text in json.loads(planned.stdout)["warnings"] if "auxiliary loss" in text)
    assert caplog.messages.count(found) == 1 and "router_aux_loss_coef 0.001" in found


def test_the_checkpoints_of_a_run_that_goes_on_are_no_longer_missing(tmp_path, monkeypatch) -> None:
    """But for one, which is written while the others stay."""
    tools.write_model(tmp_path / "model")
    keep = ("save.save_steps=1", "save.save_total_limit=2")
    config = tools.write_config(tmp_path, *keep).config
    run = tools.train_here(tmp_path, *keep)
    first, last = run.checkpoints()
    job = prepare_job(config)

    def disk(checkpoint: Path) -> MemoryPlace:
        found = plan_run(config, job.spec, with_saved(job.hardware, (run, checkpoint)))[1].disk
        assert found is not None
        return found

    one = disk(last).parts[0].nbytes // 3
    rest = sum(part.nbytes for part in disk(last).parts[1:])
    for free, fits in ((one + rest, True), (one + rest - 1, False)):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: SimpleNamespace(free=free, total=1 << 40))
        assert disk(last).fits == fits
        assert disk(first).missing == 2 * one + (not fits), "a new run begins there"


def test_what_a_run_on_a_full_disk_is_advised(tmp_path, monkeypatch) -> None:
    """A resumed run keeps its folder, and neither it nor a new run can keep less than one checkpoint."""
    tools.write_model(tmp_path / "model")
    run = tools.train_here(tmp_path, "train.max_steps=4", "save.save_steps=1", "save.save_total_limit=2")

    more = ("train.max_steps=8", "save.save_steps=1")
    config = tools.write_config(tmp_path, *more, "save.save_total_limit=2").config
    job = prepare_job(config)
    disk = plan_run(config, job.spec, job.hardware)[1].disk
    assert disk is not None
    one, rest = disk.parts[0].nbytes // 3, sum(part.nbytes for part in disk.parts[1:])

    def refusal(free: int, *overrides: str) -> str:
        monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free, total=1 << 40))
        with pytest.raises(UserError) as refused:
            tools.train_here(tmp_path, *more, *overrides)
        return str(refused.value)

    resumed = f"save.resume={run.path}"
    text = refusal(0, resumed, "save.save_total_limit=1")
    assert re.search(r"is free in .*: make room\nit needs \d+\.\d MiB more disk space$", text)
    text = refusal(one + rest - 1, resumed, "save.save_total_limit=2")
    assert text.endswith(": make room\nit needs 1 B more disk space"), "other moments would change the numbers"
    text = refusal(0, "save.resume=never")
    assert re.search(r": make room, or set save.output_dir to another disk\nit needs \d+\.\d MiB more", text)


# What `rptrain plan` says, and what training does


def exit_codes(*overrides: str) -> tuple[int, int]:
    plan, trained = (tools.invoke(*command, "--config", "run.toml", *overrides) for command in (("plan",), ()))
    return plan.exit_code, trained.exit_code


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A run that begins, and ends where it would take memory."""

    def taken(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    tools.write_model(tmp_path / "model")
    tools.write_config(tmp_path)
    monkeypatch.setattr("rptrain.train.session.ModelStore", taken)


@pytest.mark.parametrize("kind", [(), ("train.micro_batch_size=auto", "engine.round_size=auto")])
def test_planning_and_training_agree_on_what_fits(small, monkeypatch, kind):
    monkeypatch.setattr("rptrain.machine.hardware.program_bytes", lambda: 200 << 20)
    limited = f"engine.host_limit={1 << 40}"
    result = tools.invoke("plan", "--config", "run.toml", "--json", limited, *kind)
    total = json.loads(result.stdout)["memory"][0]["total"]
    found = [exit_codes(f"engine.host_limit={total + more}", *kind) for more in (-(8 << 20), -1, 0, 8 << 20)]
    fitting = 0, 130
    assert found[0] == (2, 2) and found[-2:] == [fitting, fitting]
    assert found[1] in ([(2, 2)] if not kind else [(2, 2), fitting])


def test_training_gives_the_advice_of_the_plan(small, monkeypatch):
    """And no other: where the weights alone do not fit, shorter sequences do not help."""
    monkeypatch.setattr("rptrain.machine.hardware.program_bytes", lambda: 200 << 20)
    total = json.loads(tools.invoke("plan", "--config", "run.toml", "--json").stdout)["memory"][0]["total"]
    found = []
    for limit in (total - (1 << 10), 1):
        command = "--config", "run.toml", f"engine.host_limit={limit}"
        said = tools.invoke(*command).stderr
        assert re.search(r"(?m)engine\.host_limit allows$", said)
        _, advice = said.split("what makes it fit:\n")
        assert "".join(advice.split()) in "".join(tools.invoke("plan", *command).stdout.split())
        found.append(re.findall(r"- ([\w.]+)=", advice))
    assert "train.method" in found[0] and found[1] == ["engine.host_limit"]


def test_a_disk_too_small_is_found_by_both_before_anything_is_loaded(small, monkeypatch):
    usage = SimpleNamespace(free=64 << 20, total=1 << 40)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    assert exit_codes() == (2, 2)
    said = tools.invoke("--config", "run.toml").stderr
    assert "of disk space for checkpoints and the exported model, but 64.0 MiB is free in " in said
    usage.free = 80 << 20
    assert exit_codes() == (0, 130)


def test_a_run_that_was_cut_off_waits_for_memory_that_shrank(tmp_path, monkeypatch):
    """Refused before anything is loaded, with the run as it was; with the memory back it comes to the same numbers."""
    tools.write_model(tmp_path / "model")
    expected = tools.state(tools.train_here(tmp_path, "log.run_name=whole"))
    write = EventLog.write

    def fails(log: EventLog, event: events.Event) -> None:
        if isinstance(event, events.Step) and event.step == 5:
            raise OSError("planted")
        write(log, event)

    often = "save.save_steps=2"
    with monkeypatch.context() as patch, pytest.raises(TrainingError, match="planted"):
        patch.setattr(EventLog, "write", fails)
        tools.train_here(tmp_path, often)
    run = RunDir(tmp_path / "runs/run")
    before = run.events_path.read_bytes(), run.checkpoints()
    with monkeypatch.context() as patch:
        patch.setattr("rptrain.machine.hardware.available_bytes", lambda: 1 << 20)
        patch.setattr("rptrain.train.session.ModelStore", None)
        for name in ("run", "another"):
            with pytest.raises(UserError, match=r"of host memory for .*, but .* is free"):
                tools.train_here(tmp_path, often, f"log.run_name={name}")
    assert (run.events_path.read_bytes(), run.checkpoints()) == before and not (tmp_path / "runs/another").exists()
    again = tools.train_here(tmp_path, often)
    assert [event.step for event in tools.events(again, events.Resumed)] == [4] and tools.state(again) == expected
