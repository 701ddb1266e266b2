"""The checkpoint with the lowest validation loss is kept, and the model is exported from it."""

from pathlib import Path

import pytest

from rptrain.checkpoint.export import export
from rptrain.checkpoint.run_states import checkpoints_by_loss, recorded
from rptrain.runs.folder.event_log import EventLog
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records import events
from rptrain.runs.view.run_view import RunView
from rptrain.train import validation
from rptrain.train.trainer import Trainer
from rptrain.utils.errors import TrainingError, UserError

from .. import run_tools as tools

BEST = ("data.val_size=0.3", "train.eval_steps=2", "save.save_steps=2", "save.load_best_model_at_end=true")
LOSSES = {2: 3.0, 4: 1.5, 6: 1.0, 8: 2.0, 10: 1.0, 12: 2.5}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a model; the losses are those above, whatever it does."""
    tools.write_model(tmp_path / "model")
    validate = Trainer._validate

    def scripted(trainer, engine, step):
        monkeypatch.setattr(validation, "loss", lambda *_: LOSSES[step])
        return validate(trainer, engine, step)

    monkeypatch.setattr(Trainer, "_validate", scripted)
    return tmp_path


def trained(folder: Path, limit: int, *overrides: str) -> RunDir:
    return tools.train_here(folder, *BEST, f"save.save_total_limit={limit}", "train.max_steps=12", *overrides)


def is_of(run: RunDir, step: int, folder: Path) -> None:
    """The model, and what was told of it."""
    best = RunDir(run.path).checkpoint_path(step)
    (told,) = tools.events(run, events.BestLoaded)
    assert (told.step, told.path, told.loss) == (step, str(best), LOSSES[step])
    again = export(best, folder / "again", "float32")
    assert (again / "model.safetensors").read_bytes() == (run.model_path / "model.safetensors").read_bytes()
    result = export(run.path, folder / "result", "float32")
    assert (again / "model.safetensors").read_bytes() == (result / "model.safetensors").read_bytes()
    assert {recorded(path) for path in (again, result, run.model_path)} == {(step, LOSSES[step])}
    last = export(run.checkpoint_path(12), folder / "last", "float32")
    assert (last / "model.safetensors").read_bytes() != (run.model_path / "model.safetensors").read_bytes()


@pytest.mark.sample(1, gate=2)
@pytest.mark.parametrize(("limit", "kept"), [(1, (6, 12)), (3, (6, 10, 12))])
def test_it_stays_and_the_model_is_made_of_it(folder, limit, kept):
    run = trained(folder, limit, "eval.questions=1")
    asked = [event.step for event in tools.events(run, events.Evaluation) if event.name == "exact_match"]
    assert asked == [0, 6], "the model that answers is that of the best step"
    assert [path.name for path in run.checkpoints()] == [f"checkpoint-{step}" for step in kept]
    is_of(run, 6, folder)
    assert run.finished and any("the model is that of step 6" in line.text for line in RunView(run.path).log)


def test_also_of_a_run_that_was_cut_off_behind_it(folder, monkeypatch):
    write = EventLog.write

    def fails(log: EventLog, event: events.Event) -> None:
        if isinstance(event, events.Step) and event.step == 9:
            raise OSError("planted")
        write(log, event)

    with monkeypatch.context() as patch, pytest.raises(TrainingError, match="planted"):
        patch.setattr(EventLog, "write", fails)
        trained(folder, 1)
    run = trained(folder, 1)
    assert [event.step for event in tools.events(run, events.Resumed)] == [8]
    is_of(run, 6, folder)


def test_one_that_is_damaged_is_set_aside_and_the_next_is_taken(folder, monkeypatch):
    finish = Trainer._train

    def damage(trainer):
        finish(trainer)
        for file in (folder / "runs/run/checkpoints/checkpoint-6/units").iterdir():
            file.write_bytes(b"\0" * file.stat().st_size)

    monkeypatch.setattr(Trainer, "_train", damage)
    run = trained(folder, 3)
    assert [event.path for event in tools.events(run, events.CheckpointDamaged)] == [str(run.checkpoint_path(6))]
    is_of(run, 10, folder)


def test_the_last_one_needs_no_loading(tmp_path):
    tools.write_model(tmp_path / "model")
    run = tools.train_here(tmp_path, *BEST)
    losses = {event.step: event.score for event in tools.events(run, events.Evaluation)}
    (told,) = tools.events(run, events.BestLoaded)
    assert losses[told.step] == told.loss == min(losses.values()) == checkpoints_by_loss(run.checkpoints_path)[0][0]
    state = tools.state(tools.train_here(tmp_path, *BEST[:-1], f"train.max_steps={told.step}", "log.run_name=to"))
    assert told.step == 6 and state == tools.state(run)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (BEST[2:], "needs a validation set"),
        ((BEST[0], *BEST[2:]), "every checkpoint must be evaluated"),
        ((*BEST, "save.save_steps=3"), "every checkpoint must be evaluated"),
    ],
    ids=["no-validation-set", "no-eval-steps", "saves-between-evaluations"],
)
def test_what_does_not_go_together(tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        tools.write_config(tmp_path, *overrides)
