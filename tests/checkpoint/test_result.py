"""The result of a run: the best state where that was asked for, else the newest, in a checkpoint or in `model/`."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from rptrain.checkpoint import result as module
from rptrain.checkpoint.atomic_dir import KIND, MANIFEST, STATE, Damaged, written_aside
from rptrain.checkpoint.export_progress import KIND as EXPORT
from rptrain.checkpoint.result import answer_sources, answering, checkpoint_of, find_result
from rptrain.checkpoint.run_states import checkpoints_by_loss, facts
from rptrain.runs.records.events import BestLoaded, Event, Finished, RunStarted, Step, to_line
from rptrain.utils.errors import UserError

OLD = object()  # an export from before steps were recorded
STARTED = RunStarted("", "", (), "", 0)
Model = tuple[int, float | None] | object | None


def save(run: Path, step: int, loss: float | None = None) -> Path:
    path = run / f"checkpoints/checkpoint-{step}"
    path.parent.mkdir(parents=True, exist_ok=True)
    meta = {} if loss is None else {"validation": {"data": "", "best": loss, "bad": 0, "loss": loss}}
    with written_aside(path, {"kind": KIND, "step": step}, 0) as aside:
        aside.write_json(STATE, {"step": step, "meta": meta, "units": {}})
    return path


def made(run: Path, saved: Mapping[int, float | None], model: Model = None, *, best: bool = False) -> Path:
    """A run with these checkpoints and their losses; `model`: the step and the loss that its manifest records."""
    run.mkdir(exist_ok=True)
    (run / "config.toml").write_text(f"[save]\nload_best_model_at_end = {str(best).lower()}\n")
    for step, loss in saved.items():
        save(run, step, loss)
    if model is not None:
        known = facts(*model) if isinstance(model, tuple) else {}
        with written_aside(run / "model", {"kind": EXPORT, **known}, 0) as aside:
            aside.write_json("config.json", {})
    return run


def said(run: Path, *events: Event) -> None:
    (run / "events.jsonl").write_text("".join(to_line(event) + "\n" for event in events) + '{"schema":1,"event":"fin')


@pytest.mark.parametrize(
    ("saved", "model", "best", "step", "place", "other"),
    [
        pytest.param({4: None, 8: None}, None, False, 8, "checkpoint-8", None, id="training"),
        pytest.param({4: None, 8: None}, (8, None), False, 8, "model", None, id="finished"),
        pytest.param({4: None, 8: None}, (4, None), False, 8, "checkpoint-8", 4, id="extended"),
        pytest.param({4: None}, (8, None), False, 8, "model", None, id="newest-checkpoint-deleted"),
        pytest.param({}, (8, None), False, 8, "model", None, id="checkpoints-deleted"),
        pytest.param({4: None}, OLD, False, 4, "checkpoint-4", "unknown", id="model-of-unknown-step"),
        pytest.param({}, OLD, False, None, "model", None, id="model-of-unknown-step-alone"),
        pytest.param({4: 1.0, 8: 2.0}, None, True, 4, "checkpoint-4", None, id="best-so-far"),
        pytest.param({4: 1.0, 8: 2.0}, (4, 1.0), True, 4, "model", None, id="best-finished"),
        pytest.param({4: 1.0, 8: 2.0}, (4, None), True, 4, "model", None, id="best-finished-loss-in-checkpoint"),
        pytest.param({4: 2.0, 8: 1.0, 9: 3.0}, (4, 2.0), True, 8, "checkpoint-8", 4, id="extended-and-better"),
        pytest.param({4: 1.0, 8: 1.0}, None, True, 4, "checkpoint-4", None, id="equal-losses"),
        pytest.param({8: 2.0}, (4, 1.0), True, 4, "model", None, id="best-checkpoint-deleted"),
        pytest.param({8: 2.0, 9: 3.0}, OLD, True, 8, "checkpoint-8", "unknown", id="old-model-and-best"),
        pytest.param({4: None, 8: None}, (4, None), True, 8, "checkpoint-8", 4, id="no-loss-is-known"),
        pytest.param({4: 1.0, 8: float("nan"), 9: None}, None, True, 4, "checkpoint-4", None, id="no-finite-loss"),
        pytest.param({4: 1.0, 8: 2.0}, (4, 1.0), False, 8, "checkpoint-8", 4, id="best-not-asked-for-any-more"),
    ],
)
def test_which_state_is_the_result(tmp_path, saved, model, best, step, place, other):
    run = made(tmp_path / "run", saved, model, best=best)
    found = find_result(run)
    assert found is not None and found.state.step == step and found.state.answering.name == place
    held = None if found.other is None else "unknown" if found.other.step is None else found.other.step
    assert held == other
    path, sentence = answering(run)
    assert path == found.state.answering and next(iter(answer_sources(run))) == path
    assert (f"model/ holds step {other}" in sentence) is isinstance(other, int)
    assert step is None or sentence.startswith(f"step {step}, the {'lowest' if found.is_best else 'newest'}")
    if step in saved:
        checkpoint = run / f"checkpoints/checkpoint-{step}"
        assert checkpoint_of(run) == checkpoint_of(run / "checkpoints") == (checkpoint, sentence)
        assert checkpoint_of(checkpoint) == (checkpoint, ""), "a checkpoint that is named is taken as it is"
    else:
        with pytest.raises(UserError, match=r"has no checkpoint to export, but .*/model is an export of it"):
            checkpoint_of(run)
        with pytest.raises(UserError, match="model is an export already"):
            checkpoint_of(run / "model")


def test_the_events_tell_the_step_of_a_model_of_an_earlier_version(tmp_path):
    run = made(tmp_path / "run", {4: 1.0, 8: 2.0, 9: None}, OLD)
    best = BestLoaded(4, "", 1.0)
    for events, step, loss in (
        ((STARTED, Finished(8)), 8, None),
        ((STARTED, best, Finished(8)), 4, 1.0),
        ((STARTED, best, Finished(8), STARTED, Step(9, 1.0, 1.0, 1.0, 1, 1, 1.0)), 4, 1.0),
        ((STARTED, best, STARTED, Finished(9)), 9, None),
        ((STARTED, best), None, None),
    ):
        said(run, *events)
        (state,) = [state for state in module.states(run) if state.model]
        assert (state.step, state.loss) == (step, loss), events
    (run / "events.jsonl").rename(tmp_path / "elsewhere")
    (run / "events.jsonl").symlink_to(tmp_path / "elsewhere")
    assert [state.step for state in module.states(run) if state.model] == [None]


def test_what_is_not_complete_does_not_count(tmp_path):
    run = made(tmp_path / "run", {4: 2.0, 8: 1.0}, best=True)
    (run / "checkpoints/checkpoint-9").mkdir()
    (run / "model").mkdir()
    save(run, 12).rename(run / "checkpoints/.checkpoint-12.rptrain-partial")
    assert checkpoint_of(run)[0].name == "checkpoint-8"
    (run / "checkpoints/checkpoint-8").rename(run / "checkpoints/.checkpoint-8.rptrain-replaced")
    assert checkpoint_of(run)[0].name == ".checkpoint-8.rptrain-replaced"
    assert find_result(tmp_path / "nowhere") is None
    for find in (answering, checkpoint_of):
        with pytest.raises(UserError, match="neither"):
            find(tmp_path)


def test_a_result_that_is_unknown_is_refused(tmp_path):
    """Rather than to use another state; a checkpoint that is named is used."""
    run = made(tmp_path / "run", {4: 1.0, 8: 2.0}, best=True)
    state = run / "checkpoints/checkpoint-4" / STATE
    state.write_text(state.read_text().replace("1.0", "3.0"))
    for find in (answering, checkpoint_of):
        with pytest.raises(Damaged, match=f"the result of the run is unknown: .*4/{STATE} is damaged.*name a checkp"):
            find(run)
    assert checkpoint_of(run / "checkpoints/checkpoint-8")[0].name == "checkpoint-8"
    assert [path.name for path in answer_sources(run)] == ["checkpoint-8", "checkpoint-4"]
    assert [path.name for _, path in checkpoints_by_loss(run / "checkpoints")] == ["checkpoint-8"]
    (run / "config.toml").write_text("[save\n")
    with pytest.raises(UserError, match=r"the result of the run is unknown: .*/config\.toml: .*Correct it"):
        answering(run)


def test_damage_outside_of_the_metadata_does_not_matter_for_the_result(tmp_path):
    run = made(tmp_path / "run", {4: 1.0, 8: 2.0}, best=True)
    worst = save(run, 9, 3.0)
    unit = worst / "units/00000-embed.safetensors"
    unit.parent.mkdir()
    manifest = json.loads((worst / MANIFEST).read_text())
    manifest["files"]["units/00000-embed.safetensors"] = {"size": 2, "sha256": ""}
    (worst / MANIFEST).write_text(json.dumps(manifest))
    for content in (None, b"1"):  # missing, and too short
        if content is not None:
            unit.write_bytes(content)
        assert answering(run)[0].name == checkpoint_of(run)[0].name == "checkpoint-4"
        assert [path.name for _, path in checkpoints_by_loss(run / "checkpoints")] == ["checkpoint-4", "checkpoint-8"]
    (worst / STATE).unlink()
    with pytest.raises(Damaged, match=f"the result of the run is unknown: .*9 is damaged: {STATE} is missing"):
        answering(run)


def test_a_checkpoint_that_the_run_deletes_meanwhile_does_not_count(tmp_path, monkeypatch):
    run = made(tmp_path / "run", {4: 1.0, 8: 2.0}, best=True)

    def late(checkpoint: Path) -> float | None:
        shutil.rmtree(run / "checkpoints/checkpoint-4", ignore_errors=True)
        return loss_of(checkpoint)

    loss_of = module.loss_of
    monkeypatch.setattr(module, "loss_of", late)
    assert answering(run)[0].name == "checkpoint-8"


def test_all_that_can_answer(tmp_path):
    run = made(tmp_path / "run", {4: 1.0, 8: 2.0, 10: 0.5}, (8, 2.0), best=True)
    names = {str(path.relative_to(run)): mark for path, mark in answer_sources(run).items()}
    assert list(names.items()) == [
        ("checkpoints/checkpoint-10", "result, step 10"),
        ("model", "step 8"),
        ("checkpoints/checkpoint-8", ""),
        ("checkpoints/checkpoint-4", ""),
    ]


def test_links_that_lead_out_of_the_run_are_left_out_and_not_read(tmp_path):
    run, other = made(tmp_path / "run", {3: None}), made(tmp_path / "other", {4: None}, (9, None))
    (run / "model").symlink_to(other / "model")
    (run / "checkpoints/checkpoint-4").symlink_to(other / "checkpoints/checkpoint-4")
    assert [path.name for path in answer_sources(run)] == ["checkpoint-3"]
    for find in (answering, checkpoint_of):
        with pytest.raises(UserError, match=r"checkpoint-4 leads to .*, outside of "):
            find(run)


@pytest.mark.parametrize("loss", ['"low"', "true", "NaN", "1" + "0" * 400, "1" + "0" * 5000])
def test_other_values_of_a_manifest_count_as_unknown(tmp_path, loss):
    assert facts(None, float("inf")) == {} and facts(0, 1.5) == {"step": 0, "validation_loss": 1.5}
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps({}))
    (tmp_path / "model/complete.json").write_text(f'{{"step": true, "validation_loss": {loss}}}')
    found = find_result(tmp_path)
    assert found is not None and (found.state.step, found.state.loss) == (None, None)


def test_a_loss_that_is_too_large_counts_as_unknown(tmp_path):
    run = made(tmp_path / "run", {4: 1.0, 8: 10**400}, best=True)
    assert answering(run)[0].name == "checkpoint-4" and facts(8, 10**400) == {"step": 8}


def test_a_model_of_a_step_that_was_trained_once_more_is_old(tmp_path: Path):
    """From an earlier checkpoint: a damaged one, or one that was deleted, is saved again."""
    run = made(tmp_path / "run", {4: None, 6: None}, (6, None))
    assert answering(run)[0].name == "model"
    model = (run / "model" / MANIFEST).stat()
    os.utime(run / "checkpoints/checkpoint-6" / MANIFEST, ns=(model.st_atime_ns, model.st_mtime_ns + 1))
    assert answering(run)[0] == checkpoint_of(run)[0] == run / "checkpoints/checkpoint-6"
