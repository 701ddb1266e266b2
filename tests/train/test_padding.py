"""Runs of models with a padding token: the setting is recorded, and texts that have the token are warned of."""

import json
from pathlib import Path

import pytest

from rptrain.checkpoint.state import read_state
from rptrain.data import padding
from rptrain.models.families import registry
from rptrain.models.transforms.freeze import freeze
from rptrain.models.transforms.lora import LoRA, with_lora
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records import events
from rptrain.train.job import prepare_job
from rptrain.utils.errors import UserError

from .. import run_tools as tools

PAD, EOS = 5, 1  # of the model
END, USER = 2, 4  # of the template
LORA = ("lora.r=2", "lora.lora_alpha=4")
SAID = "gets no gradient where it is an input"
CHAT = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}


def go(folder: Path, steps: int, *overrides: str) -> RunDir:
    return tools.train_here(
        folder, f"train.max_steps={steps}", "train.micro_batch_size=4", "train.global_batch_size=8", *overrides
    )


def checkpoint_of(run: RunDir, step: int) -> dict[str, bytes]:
    units = run.checkpoint_path(step) / "units"
    return {file.name: file.read_bytes() for file in units.iterdir()}


@pytest.mark.parametrize("earlier", [False, True], ids=["this-version", "earlier-version"])
def test_a_resumed_run_keeps_the_gradient_that_it_began_with(earlier, tmp_path, monkeypatch):
    """Random tokens contain the padding token."""
    tools.write_model(tmp_path / "model", pad_token_id=PAD)
    with monkeypatch.context() as patch:
        if earlier:
            patch.setattr("rptrain.models.families.config._read_padding_row", lambda *_: None)
        whole = go(tmp_path, 4, "log.run_name=whole")
        run = go(tmp_path, 2)
    assert read_state(run.checkpoint_path(2))["meta"].get("padding_row") == (None if earlier else PAD)
    go(tmp_path, 4, f"save.resume={run.path}")
    assert tools.events(run, events.Resumed)
    assert checkpoint_of(run, 4) == checkpoint_of(whole, 4)
    assert read_state(run.checkpoint_path(4))["meta"].get("padding_row") == (None if earlier else PAD)
    other = go(tmp_path, 4, "log.run_name=new")
    assert (checkpoint_of(other, 4) == checkpoint_of(whole, 4)) != earlier


@pytest.mark.sample(2, gate=3)
@pytest.mark.parametrize(
    ("pad", "overrides", "reason"),
    [(END, (), "is also an EOS token"), (USER, (), "occurs in the training data"), (END, LORA, "")],
    ids=["end-of-turn", "in-texts", "lora"],
)
def test_texts_that_have_the_padding_token(pad, overrides, reason, tmp_path, caplog):
    """The plan and the run say the same."""
    tools.write_model(tmp_path / "model", pad_token_id=pad, eos_token_id=EOS, tie_word_embeddings=False)
    (tmp_path / "chats.jsonl").write_text(json.dumps(CHAT))
    settings = (f"data.train.0.path={tmp_path}/chats.jsonl", "data.max_length=64", *overrides)
    resolved = tools.write_config(tmp_path, *settings)
    planned = tools.invoke("plan", "--config", str(tmp_path / "run.toml"), "--json", *settings)
    in_plan = [warning for warning in json.loads(planned.stdout)["data_warnings"] if SAID in warning]
    prepare_job(resolved.config)
    in_log = [record.getMessage() for record in caplog.records if SAID in record.getMessage()]
    assert in_plan == in_log and len(in_log) == bool(reason)
    assert all(reason in message and f"pad_token_id {pad} (" in message for message in in_log)


def test_which_padding_tokens_matter():
    random = registry.build(json.loads((tools.PRESET / "config.json").read_text()) | {"pad_token_id": PAD})
    saved = with_lora(random, LoRA(r=2, modules_to_save=("embed_tokens",)))
    specs = (random, saved, with_lora(random, LoRA(r=2)), freeze(random, ["model.embed_tokens.weight"]))
    assert [padding.trained_without(spec) for spec in specs] == [PAD, PAD, None, None]
    assert padding.warning(None, {PAD}, [], None) == padding.warning(PAD, {EOS}, [], None) == ""
    assert "is also an EOS token" in padding.warning(EOS, {EOS}, [], None)


def test_a_padding_token_outside_of_the_vocabulary(tmp_path, monkeypatch):
    """transformers cannot load such a model. A run that began before this was checked can be resumed."""
    model = tools.write_model(tmp_path / "model")
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    with monkeypatch.context() as patch:
        patch.setattr(padding, "check", lambda *_: None)
        patch.setattr("rptrain.models.families.config._read_padding_row", lambda *_: None)
        set_padding(model, size)
        run = go(tmp_path, 1)
    go(tmp_path, 2, f"save.resume={run.path}")
    for pad in (size, -size - 1):
        set_padding(model, pad)
        with pytest.raises(
            UserError, match=rf"config\.json: pad_token_id {pad} is outside of the vocabulary of {size} "
        ):
            go(tmp_path, 1)
    planned = tools.invoke("plan", "--config", str(tmp_path / "run.toml"), "--json")
    (refused,) = json.loads(planned.stdout)["refusals"]
    assert refused["key"] == "model.path" and f"pad_token_id {pad} is outside" in refused["message"]


def set_padding(model: Path, pad: int) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pad_token_id": pad}))
