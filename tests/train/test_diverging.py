"""A run that diverges ends with 1 and says so, and leaves no model."""

import math

import pytest

from rptrain.engine.stage_pass import StagePass
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.folder.run_log import FILE
from rptrain.runs.records import events
from rptrain.train.job import prepare_job

from .. import run_tools as tools


@pytest.mark.sample(3, gate=6)
@pytest.mark.parametrize("update", ["async", "sync"])
@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (1, "model has diverged: model.embed_tokens.weight contains NaN or infinite values"),
        (6, "the loss of the last step is nan: the model has diverged"),
        (40, "the gradients of the last 8 steps, up to step "),
    ],
)
def test_a_run_that_diverges_ends(steps, message, update, tmp_path):
    """However few steps are left by then."""
    tools.write_model(tmp_path / "model")
    tools.write_config(tmp_path)
    settings = (
        "optim.learning_rate=1e38",
        "optim.warmup_steps=0",
        "optim.max_skipped_steps=8",
        f"train.max_steps={steps}",
        f"optim.update={update}",
    )
    result = tools.invoke("--config", tmp_path / "run.toml", *settings)
    assert result.exit_code == 1, result.output
    assert message in result.stderr and "with a lower optim.learning_rate" in result.stderr
    (path,) = (tmp_path / "runs").iterdir()
    run = RunDir(path)
    assert not list(path.glob("model*"))
    assert isinstance(list(events.read(run.events_path))[-1], events.Failed)
    assert result.stderr.splitlines()[-1] in (path / FILE).read_text().splitlines()[-1]


@pytest.mark.parametrize("steps", [2, 40])
def test_a_loss_that_was_never_finite_is_no_divergence(steps, tmp_path, monkeypatch):
    head = StagePass._head

    def spoiled(work, scale, loss):
        head(work, scale, loss)
        loss.fill_(math.nan)
        work._dy.fill_(math.nan)

    monkeypatch.setattr(StagePass, "_head", spoiled)
    tools.write_model(tmp_path / "model")
    tools.write_config(tmp_path)
    settings = ("optim.max_skipped_steps=3", f"train.max_steps={steps}")
    result = tools.invoke("--config", tmp_path / "run.toml", *settings)
    assert result.exit_code == 1, result.output
    assert f"before any update. Check the weights in {tmp_path}/model and the data" in result.stderr
    assert "learning_rate" not in result.stderr


@pytest.mark.long
@pytest.mark.parametrize("rows", ["tasks", "random"])
def test_the_rows_of_a_step_that_is_skipped_are_named(rows, tmp_path, monkeypatch, capsys):
    """The loss of micro-batch 2 of steps 3 and 5 is NaN: the run continues, and says where that was. Two in a row would
    end it, and step 4 lies between them.
    """
    head, calls = StagePass._head, []

    def spoiled(work, scale, loss):
        head(work, scale, loss)
        calls.append(None)
        if len(calls) in (2 * 4 + 2 + 1, 4 * 4 + 2 + 1):
            loss.fill_(math.nan)
            work._dy.fill_(math.nan)

    monkeypatch.setattr(StagePass, "_head", spoiled)
    tools.write_model(tmp_path / "model")
    settings = (f"data.train.0.path=builtin:{rows}", "engine.devices=cpu:1", "optim.max_skipped_steps=2")
    resolved = tools.write_config(tmp_path, *settings)
    run = tools.train(resolved)
    skipped, later = tools.events(run, events.StepSkipped)
    batches = prepare_job(resolved.config).batches
    expected = batches.taken(2)[2 * 16 : 3 * 16].tolist()
    assert (skipped.step, skipped.in_a_row, skipped.micro_batches) == (3, 1, (2,))
    assert (later.step, later.in_a_row, later.micro_batches) == (5, 1, (2,))
    assert list(skipped.rows) == expected and len(skipped.texts) == (16 if rows == "tasks" else 0)
    assert all("<" in text for text in skipped.texts)
    said = " ".join(capsys.readouterr().out.split())
    assert f"step 3: skipped, the loss is NaN in packed sequences {expected[0]}, {expected[1]}, " in said
    assert run.finished and [event.step for event in tools.events(run, events.Step) if event.skipped] == [3, 5]
