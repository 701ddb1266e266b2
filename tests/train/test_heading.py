"""The four lines that a run begins with."""

from dataclasses import replace
from pathlib import Path

from rptrain.config.resolve import resolve
from rptrain.runs.folder.run_dir import RunDir
from rptrain.train.job import prepare_job
from rptrain.train.progress import heading

CONFIG = '[model]\npath = "tiny-tasks"\n[[data.train]]\npath = "builtin:random"\n[engine]\ndevices = "cpu:2"\n'


def test_folder_model_data_and_plan_have_a_line_each(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(CONFIG + "[train]\nmax_steps = 100\nglobal_batch_size = 4\n")
    job = prepare_job(resolve(tmp_path / "c.toml").config)
    run = RunDir(Path("runs/two\nlines"))
    of_run, of_model, of_data, of_plan = heading(run, None, job)
    assert of_run == "run    runs/two␊lines, a new run"
    assert of_model.startswith("model  tiny-tasks: 407,424 parameters, 3 layers, bfloat16, all weights trained")
    assert of_data == "data   builtin:random: 256 sequences of 2,048 tokens; 100 steps, 1.6 epochs"
    assert of_plan.startswith("plan   ") and "on 2 CPU workers; estimated: " in of_plan and "tokens/s" in of_plan
    resumed, *_ = heading(run, run.checkpoint_path(40), replace(job, validation=job.batches))
    assert resumed.endswith("resumed from checkpoint-40")
