"""The lines that a run begins with."""

from dataclasses import replace
from pathlib import Path

import pytest

from rptrain.config.resolve import resolve
from rptrain.runs.folder.run_dir import RunDir
from rptrain.train.job import prepare_job
from rptrain.train.progress import heading

from .. import run_tools as tools

CONFIG = '[model]\npath = "tiny-tasks"\n[[data.train]]\npath = "builtin:random"\n[engine]\ndevices = "cpu:2"\n'


def test_folder_model_method_data_and_plan_have_a_line_each(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(CONFIG + "[train]\nmax_steps = 100\nglobal_batch_size = 4\n")
    job = prepare_job(resolve(tmp_path / "c.toml").config)
    run = RunDir(Path("runs/two\nlines"))
    of_run, of_model, of_method, of_data, of_plan = heading(run, None, job)
    assert of_run == "run    runs/two␊lines, a new run"
    assert of_model.startswith("model  tiny-tasks: 407,424 parameters, 3 layers, bfloat16")
    assert of_method == "train  all weights; trainable: 407 k of 407 k parameters (100%)"
    assert of_data == "data   builtin:random: 256 sequences of 2,048 tokens; 100 steps, 1.6 epochs"
    assert of_plan.startswith("plan   ") and "on 2 CPU workers; estimated: " in of_plan and "tokens/s" in of_plan
    resumed, *_ = heading(run, run.checkpoint_path(40), replace(job, validation=job.batches))
    assert resumed.endswith("resumed from checkpoint-40")


@pytest.mark.parametrize(
    ("parameters", "experts"),
    [
        ("[]", "none in experts (lora.target_parameters adds them); trainable: 448 of "),
        ('["down_proj"]', "in experts on down_proj; trainable: 672 of "),
    ],
    ids=["attention", "experts"],
)
def test_adapters_and_what_experts_get_of_them(parameters: str, experts: str, tmp_path: Path) -> None:
    tools.write_model(tmp_path / "model", **tools.GLM)
    lora = ("lora.r=2", 'lora.target_modules="all-linear"', f"lora.target_parameters={parameters}")
    job = prepare_job(tools.write_config(tmp_path, *lora).config)
    (line,) = (line for line in heading(RunDir(tmp_path), None, job) if line.startswith("train  "))
    assert line.startswith(f"train  adapters of rank 2, {experts}")
