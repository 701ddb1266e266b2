"""The validation set, its loss at intervals, and early stopping."""

from contextlib import nullcontext

import pytest

import rptrain.train.run
from rptrain.checkpoint.processes import Processes
from rptrain.data.split import split
from rptrain.inference import samples
from rptrain.runs.records import events
from rptrain.runs.view.run_view import RunView
from rptrain.train.group import Group
from rptrain.train.job import prepare_job
from rptrain.train.validation import EarlyStopping
from rptrain.utils.errors import UserError

from .. import run_tools as tools
from ..cases import grid


def losses(run):
    return {event.step: event.score for event in tools.events(run, events.Evaluation) if event.name == "loss"}


def answered(run, step):
    return [(event.prompt, event.text) for event in tools.events(run, events.Sample) if event.step == step]


@pytest.mark.long
def test_rows_are_held_out_whole_and_none_is_in_both(folder):
    rows = prepare_job(tools.write_config(folder, "data.train.0.path=builtin:tasks").config).sequences
    train, held_out = split(rows, 0.25, 0)
    assert len(held_out) == round(0.25 * len(rows)) and len(train) + len(held_out) == len(rows)
    taken = [part.take(range(len(part))) for part in (train, held_out)]
    seen = {tuple(row) for ids, _ in taken for row in ids.tolist()}
    assert seen == {tuple(row) for row in rows.take(range(len(rows)))[0].tolist()}
    for part, (_, labels) in zip((train, held_out), taken, strict=True):
        assert all(sum(part.documents(row)) == rows.length for row in range(len(part)))
        assert part.supervised.tolist() == (labels != -100).sum(1).tolist()
        assert sum(group.count for group in part.groups) == len(part)
    assert split(rows, 7, 0)[1].content_hash != split(rows, 7, 1)[1].content_hash
    with pytest.raises(UserError, match="holds out"):
        split(rows, len(rows), 0)


def test_a_set_is_not_held_out_as_a_whole(folder):
    """Of 256 rows and one that is taken twice; the seeds hold out that one or not."""
    (folder / "one.jsonl").write_text('{"text": "alone"}')
    sets = f'data.train=[{{path="builtin:random"}}, {{path="{folder}/one.jsonl", weight=2.0}}]'
    cache = f'data.cache_dir="{folder}/kept"'
    rows = prepare_job(tools.write_config(folder, sets, cache).config).sequences
    refused = 0
    for seed in range(8):
        try:
            assert {group.weight for group in split(rows, 0.5, seed)[0].groups} == {1.0, 2.0}
        except UserError as error:
            assert "hold out all 1 sequences of the sets with weight 2: lower it" in str(error)
            refused += 1
    assert 0 < refused < 8


@pytest.mark.parametrize("update", ["async", grid("sync")])
def test_losses_and_answers_at_intervals_change_nothing_and_are_the_same_after_a_resume(folder, update, monkeypatch):
    data = ("data.val_size=0.3", f"optim.update={update}", "save.save_steps=2")
    without = tools.train_here(folder, *data, "log.run_name=without")
    monkeypatch.setattr(samples, "MAX_NEW_TOKENS", 4)
    prompts = ["Spell backwards: abc", "Go on"]
    at_start = ("train.eval_steps=2", "train.eval_on_start=true", f"log.sample_prompts={prompts}")
    run = tools.train_here(folder, *data, *at_start)
    assert list(losses(without)) == [6] and list(losses(run)) == [0, 2, 4, 6]
    first, *_ = (event for event in events.read(run.events_path) if isinstance(event, events.Step | events.Evaluation))
    assert isinstance(first, events.Evaluation)
    assert (
        losses(run)[6] == losses(without)[6]
        and tools.state(run)["model.safetensors"] == tools.state(without)["model.safetensors"]
    )
    answers = {step: answered(run, step) for step in losses(run)}
    texts = tools.generated(run.checkpoint_path(4), prompts, 4, 0.0, 0, False)
    assert answers[4] == list(zip(prompts, texts, strict=True)) and answers[4] != answers[2]
    lines = run.events_path.read_text().splitlines(keepends=True)
    run.events_path.write_text("".join(lines[:-1]))
    (run.checkpoint_path(6) / "complete.json").unlink()
    again = tools.train_here(folder, *data, *at_start, "engine.devices=cpu:1")
    assert again.path == run.path and losses(again)[6] == losses(without)[6]
    assert [event.step for event in tools.events(again, events.Evaluation)] == [0, 2, 4, 6, 6]
    assert answered(again, 6) == 2 * answers[6]


def test_sets_of_their_own(folder):
    run = tools.train_here(folder, 'data.val=[{path="builtin:random"}]', "train.max_steps=2", "train.eval_steps=1")
    assert list(losses(run)) == [1, 2] and losses(run)[1] > 1


def test_held_out_data_that_changed_before_a_resume(folder):
    def write(text):
        (folder / "val.jsonl").write_text(f'{{"text": "{text}"}}\n' * 4)

    write("two and two")
    sets = f'data.val=[{{path="{folder}/val.jsonl"}}]', f'data.cache_dir="{folder}/kept"', "save.save_steps=1"
    run = tools.train_here(folder, *sets, "train.max_steps=1")
    run.events_path.write_text("".join(run.events_path.read_text().splitlines(keepends=True)[:-1]))
    write("two and three")
    with pytest.raises(
        UserError, match=r"validation set differs from the one that \S+checkpoint-1 was evaluated on: restore it"
    ):
        tools.train_here(folder, *sets, "train.max_steps=2")
    write("two and two")
    assert tools.train_here(folder, *sets, "train.max_steps=2").path == run.path


def test_a_run_that_gets_no_better_ends(folder):
    settings = ("data.val_size=0.3", "train.eval_steps=1", "train.early_stopping_patience=2", "train.max_steps=40")
    run = tools.train_here(folder, *settings, "optim.learning_rate=0.5", "optim.warmup_steps=0", "engine.replan=false")
    found = losses(run)
    last = max(found)
    assert last < 40 and run.finished and run.model_path.is_dir()
    assert tools.events(run, events.Finished)[0].step == last == tools.events(run, events.CheckpointSaved)[-1].step
    best = min(found, key=lambda step: found[step])
    assert best <= last - 2 or found[best] == min(list(found.values())[:-2])


def test_early_stopping_counts_from_the_best():
    stopping = EarlyStopping(2)
    assert [stopping.update(loss) for loss in (3.0, 2.0, 2.5, 1.5, 1.5, 1.6)] == [False] * 5 + [True]
    stopping = EarlyStopping(2)
    assert [stopping.update(loss) for loss in (float("nan"), 3.0, 2.0, float("inf"), 1.0)] == [False] * 5
    assert not any(EarlyStopping(None).update(loss) for loss in (1.0, 2.0, 3.0))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("train.eval_steps=2",), "needs a validation set"),
        (("train.eval_on_start=true",), "needs a validation set"),
        (("log.sample_prompts=['a']",), "needs a validation set"),
        (("data.val_size=0.1", f"log.sample_prompts={5 * ['a']}"), "at most 4"),
        (("data.val_size=0.1", "train.early_stopping_patience=2"), "needs train.eval_steps"),
        (("data.val_size=0.1", 'data.val=[{path="builtin:random"}]'), "remove one of them"),
    ],
)
def test_what_does_not_go_together(folder, overrides, message):
    with pytest.raises(UserError, match=message):
        tools.write_config(folder, *overrides)


def test_a_run_that_is_stopped_within_the_measured_steps_ends_there(folder):
    settings = ("data.val_size=0.3", "train.eval_steps=1", "train.early_stopping_patience=1", "train.max_steps=12")
    run = tools.train_here(folder, *settings, "optim.learning_rate=1.0", "optim.warmup_steps=0", "optim.update=sync")
    steps = [event.step for event in tools.events(run, events.Step)]
    last = max(losses(run))
    assert last <= 3 and steps == list(range(1, last + 1)) and run.finished


def test_a_run_that_was_stopped_early_does_not_train_on_when_it_is_resumed(folder):
    """The loss before training is lower than all others, but neither counts for early stopping nor as the best."""
    settings = ("data.val_size=0.3", "train.eval_steps=1", "train.early_stopping_patience=1", "train.max_steps=12")
    settings += ("train.eval_on_start=true",)
    rest = ("optim.learning_rate=5.0", "optim.warmup_steps=0", "optim.update=sync", "engine.replan=false")
    run = tools.train_here(folder, *settings, *rest)
    lines = run.events_path.read_text().splitlines(keepends=True)
    run.events_path.write_text("".join(lines[:-1]))
    before, model = max(losses(run)), tools.state(run)["model.safetensors"]
    best = RunView(run.path).results.best
    assert before > 1 and min(losses(run).values()) == losses(run)[0] and best is not None and best.step > 0
    again = tools.train_here(folder, *settings, *rest)
    assert again.path == run.path and max(event.step for event in tools.events(again, events.Step)) == before
    assert again.finished and tools.state(again)["model.safetensors"] == model


def test_several_processes_take_the_loss_of_the_first_one(folder, monkeypatch):
    """Else they might disagree on whether to stop: other CPUs add in another order."""
    group = Group(main=Processes(0, lambda own: [2.5 if isinstance(own, float) else own]))
    monkeypatch.setattr(rptrain.train.run, "joined", lambda launch, watchdog: nullcontext(group))
    overrides = ("data.val_size=0.3", "train.eval_steps=1", "train.early_stopping_patience=2")
    run = tools.train_here(folder, *overrides)
    assert losses(run) == {1: 2.5, 2: 2.5, 3: 2.5}
