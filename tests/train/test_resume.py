"""Runs that earlier versions began, with other hashes of their data in the checkpoints."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rptrain.data.datasets
from rptrain.checkpoint.state import read_state
from rptrain.config.resolve import resolve
from rptrain.data import cache, earlier
from rptrain.data.notes import NOTES, Note
from rptrain.data.sequences import Sequences
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records import events
from rptrain.train import trainer
from rptrain.utils.errors import UserError

from .. import run_tools as tools

SETTINGS = ("train.max_steps=2", "save.save_steps=1", "train.micro_batch_size=4", "train.global_batch_size=8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tools.write_model(tmp_path / "model")
    write(tmp_path / "chats.jsonl", range(40))
    write(tmp_path / "val.jsonl", range(3))
    return tmp_path


def write(file: Path, numbers: Sequence[int]) -> None:
    rows = ([("user", f"{number} + 1"), ("assistant", f"{number + 1}")] for number in numbers)
    said = ([{"role": role, "content": content} for role, content in row] for row in rows)
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in said))


def go(folder: Path, *overrides: str) -> RunDir:
    files = f'data.train=[{{path="{folder}/chats.jsonl"}}]', f'data.cache_dir="{folder}/kept"'
    return tools.train_here(folder, *files, *SETTINGS, *overrides)


def interrupt(run: RunDir) -> None:
    """Leave what the run was after its first step."""
    run.events_path.write_text("".join(run.events_path.read_text().splitlines(keepends=True)[:-1]))
    (run.checkpoint_path(2) / "complete.json").unlink()


@pytest.fixture
def begin_earlier(monkeypatch: pytest.MonkeyPatch):
    """Begins runs whose checkpoints have the metadata that an earlier version wrote."""

    def earlier_hash(sequences: Sequences) -> str:
        files = [earlier._File(one, one.origin) for one in sequences.streams if one.origin]
        return sequences.hash_of([file.computed(earlier.CODE[0]) for file in files])

    def earlier_meta(job: Any, *arguments: Any) -> dict[str, Any]:
        meta = make_meta(job, *arguments)
        assert meta.pop("data_hash") == "arrays"
        meta["data"] = earlier_hash(job.sequences)
        meta["validation"]["data"] = earlier_hash(job.validation.sequences)
        return meta

    def begin(folder: Path, *overrides: str) -> RunDir:
        with monkeypatch.context() as patch:
            patch.setattr(trainer, "checkpoint_meta", earlier_meta)
            run = go(folder, *overrides)
        interrupt(run)
        return run

    make_meta = trainer.checkpoint_meta
    return begin


@pytest.mark.long
def test_a_run_that_an_earlier_version_began(folder, begin_earlier):
    """It ends as one of this version, and its next checkpoint has the hash of this version."""
    held_out = "data.val_size=0.3"
    expected = go(folder, held_out, "log.run_name=undisturbed")
    began = begin_earlier(folder, held_out)
    saved = read_state(began.checkpoint_path(1))["meta"]
    run = go(folder, held_out)
    assert run.path == began.path and [event.step for event in tools.events(run, events.Resumed)] == [1]
    assert tools.steps(run) == tools.steps(expected) and tools.state(run) == tools.state(expected)
    assert read_state(run.checkpoint_path(2))["meta"]["data"] != saved["data"]


@pytest.mark.long
def test_data_that_changed_after_an_earlier_version_began_the_run(folder, begin_earlier, monkeypatch):
    val = f'data.val=[{{path="{folder}/val.jsonl"}}]'
    run = begin_earlier(folder, val)
    write(folder / "chats.jsonl", range(41))
    with pytest.raises(UserError, match=rf"the data differs from \S+ {run.checkpoint_path(1)} .*restore the data"):
        go(folder, val)
    write(folder / "chats.jsonl", range(40))
    write(folder / "val.jsonl", range(4))
    with pytest.raises(UserError, match=r"validation set differs from .*: restore it"):
        go(folder, val)
    prepare = rptrain.data.datasets.prepare

    def noting(*data: Any, **settings: Any) -> Sequences:
        sequences = prepare(*data, **settings)
        return replace(sequences, rows=replace(sequences.rows, notes=Counter({"ignored_key": 3})))

    monkeypatch.setattr(rptrain.data.datasets, "prepare", noting)
    monkeypatch.setitem(NOTES, "ignored_key", Note("{rows}: {details}", rule="keys of messages are read"))
    rule = r"rptrain now reads some rows in another way \(keys of messages are read\)"
    with pytest.raises(UserError, match=f"validation set differs from .*{rule}"):
        go(folder, val)
    write(folder / "chats.jsonl", range(41))
    with pytest.raises(UserError, match=f"the data differs from .*{rule}.*, or start a new run with save.resume=never"):
        go(folder, val)


def test_a_setting_of_the_data_that_changes_its_tokens(folder):
    """It may change as long as the tokens do not."""
    thought = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2", "reasoning": "I add."}]
    with (folder / "chats.jsonl").open("a") as file:
        file.write(json.dumps({"messages": thought}) + "\n")
    run = go(folder, "data.max_bad_rows=1")
    interrupt(run)
    with pytest.raises(UserError, match=r'data\.reasoning was "refuse" and is "drop", .* set it back'):
        go(folder, "data.max_bad_rows=1", "data.reasoning=drop")
    assert go(folder, "data.max_bad_rows=1").path == run.path


@pytest.mark.long
def test_code_and_data_that_changed_after_this_version_began_the_run(folder, monkeypatch):
    """The code does not matter. Of changed data, earlier hashes are not looked for, and no other version is named."""
    run = go(folder)
    interrupt(run)
    monkeypatch.setattr(earlier, "is_content_hash", None)
    monkeypatch.setattr(cache, "code_hash", lambda: "newer")
    write(folder / "chats.jsonl", range(41))
    with pytest.raises(UserError, match=r"restore the data, or start a new run with save\.resume=never"):
        go(folder)
    write(folder / "chats.jsonl", range(40))
    assert [event.step for event in tools.events(go(folder), events.Resumed)] == [1]


def test_a_finished_run_is_extended_by_epochs(folder):
    """It ends as if it had been begun with that number, if the learning rate does not depend on it."""

    def train(epochs: int, *overrides: str) -> RunDir:
        tools.write_config(folder)
        file = folder / "run.toml"
        file.write_text(file.read_text().replace("max_steps = 6\n", "").replace("warmup_steps = 2\n", ""))
        data = f'data.train=[{{path="{folder}/chats.jsonl"}}]', f'data.cache_dir="{folder}/kept"'
        sizes = "data.max_length=64", "train.micro_batch_size=4", "train.global_batch_size=8"
        length = f"train.num_epochs={epochs}", "optim.lr_scheduler_type=constant"
        return tools.train(resolve(file, [*data, *sizes, *length, *overrides]), quiet=True)

    whole, short = train(3, "log.run_name=whole"), train(1)
    extended = train(3, f"save.resume={short.path}")
    assert extended.path == short.path and [event.step for event in tools.events(short, events.Resumed)] == [
        max(tools.steps(whole)) // 3
    ]
    assert tools.steps(short) == tools.steps(whole) and tools.state(short) == tools.state(whole)
    with pytest.raises(UserError, match=r"the config ends training at step .*: increase train\.num_epochs"):
        train(2, f"save.resume={short.path}")
