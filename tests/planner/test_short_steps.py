"""Steps with fewer sequences than the global batch size: their sizes, their estimate, and the plan of a run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rptrain.config.resolve import resolve
from rptrain.config.schema import Config
from rptrain.engine.memory.step_layout import StepLayout
from rptrain.machine.flags import MachineFlags
from rptrain.models.families import registry
from rptrain.models.locate import locate, read_config
from rptrain.planner.choose import RunPlan, make_plan
from rptrain.planner.report import report
from rptrain.planner.short_steps import fitted, tokens_of, with_sequences
from rptrain.schedule.estimate import estimate
from rptrain.schedule.machine import CARDS, Machine
from rptrain.train.job import prepare_job

SPEC = registry.build(read_config(locate("qwen3-1.7b")))


def config(**engine: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": [{"path": "d"}], "max_length": 100},
            "train": {"global_batch_size": 64, "micro_batch_size": 2},
            "engine": engine,
        }
    )


@pytest.mark.parametrize(
    ("sequences", "engine", "sizes"),
    [  # micro-batches, round size
        (None, {}, (32, 32)),
        (64, {}, (32, 32)),
        (63, {}, (32, 32)),
        (19, {}, (10, 10)),
        (19, {"round_size": 32}, (10, 10)),
        (19, {"round_size": 8}, (16, 8)),
        (5, {"round_size": 8}, (16, 8)),  # several rounds stay several
        (5, {"round_size": 1}, (3, 1)),
        (5, {"replicas": 4}, (32, 8)),  # which sequences a replica has does not change
        (5, {"replicas": 4, "round_size": 2}, (8, 2)),
        (19, {"replicas": 4, "round_size": 2}, (16, 2)),
    ],
)
def test_sizes(sequences: int | None, engine: dict[str, Any], sizes: tuple[int, int]) -> None:
    found = fitted(config(**engine), sequences)
    assert (found.train.micro_batches, found.round_size) == sizes
    assert found.replicas == engine.get("replicas", 1)
    whole = 64 if sequences is None or sequences > 63 else sequences + sequences % 2
    assert tokens_of(config(**engine), sequences) == 100 * whole


def planned(micro_batches: int, round_size: int, devices: int = 2, replicas: int = 1) -> RunPlan:
    layout = StepLayout(2, 100, micro_batches, round_size, torch.bfloat16, True, replicas=replicas)
    return make_plan(SPEC, Machine(CARDS["rtx4090"], devices), layout)


def test_the_estimate_is_that_of_the_micro_batches_that_are_computed() -> None:
    whole = planned(32, 32)
    for count in (3, 10, 31):
        found = with_sequences(whole, config(), 2 * count)
        assert found.estimate == estimate(found.costs, found.plan.stages, planned(count, count).setting)
        assert found.estimate.period < whole.estimate.period and found.plan == whole.plan
    for sequences in (None, 64, 63):
        assert with_sequences(whole, config(), sequences) == whole
    rounds, replicas = planned(32, 8), planned(32, 8, devices=4, replicas=4)
    periods = [with_sequences(rounds, config(), n).estimate.period for n in (16, 34, 48, 60)]
    assert periods == sorted(periods) and periods[0] < periods[-1] <= rounds.estimate.period
    assert with_sequences(replicas, config(), 16) == replace(replicas, estimate=replicas.estimate), "a group has all"


def test_plan_and_run_have_the_steps_of_the_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also where a step of the config would not fit in memory."""
    (tmp_path / "rows.jsonl").write_text('{"text": "the cat sat"}\n' * 30)
    file = tmp_path / "run.toml"
    file.write_text(
        '[model]\npath = "tiny-tasks"\n[[data.train]]\npath = "rows.jsonl"\n[data]\nmax_length = 32\npacking = false\n'
        "[train]\nmicro_batch_size = 4\nglobal_batch_size = 40000000\nmax_steps = 2\n"
        '[engine]\ndevices = "cpu:2"\nhost_limit = "2GiB"\n'
        f'[save]\noutput_dir = "{tmp_path / "runs"}"\n'
    )
    resolved = resolve(file, [f"data.cache_dir={tmp_path / 'cache'}", f"data.train.0.path={tmp_path / 'rows.jsonl'}"])
    found = report(resolved, MachineFlags())
    assert found.fits and found.to_dict()["step"]["micro_batches"] == 8
    assert any("an epoch has only 30 sequences, fewer than train.global_batch_size" in text for text in found.warnings)
    assert found.length is not None and found.length.sequences == 60
    job = prepare_job(resolved.config)
    assert "an epoch has only 30 sequences" in caplog.text
    assert job.plan.plan == (found.run and found.run.plan) and job.plan.plan.micro_batches == 8
    assert job.batches.batch(1).tokens == job.sized.tokens == 32 * 32
