"""Pushes of models and adapters, to a hub on loopback, and their cards."""

import json
import time

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.utils import logging
from typer.testing import CliRunner

from rptrain.checkpoint.atomic_dir import MANIFEST
from rptrain.cli.commands import app
from rptrain.hub.card import base_of
from rptrain.hub.push import prepare
from rptrain.utils.errors import UserError
from tests.hub.fake_hub import TOKEN, Fault

WEIGHTS = bytes(range(256)) * 64
CONFIG = """\
[model]
path = "{model}"
dtype = "float32"
[data]
max_length = 64
cache_dir = "/home/me/secret-cache"
[[data.train]]
path = "/home/me/secret-place/chats.jsonl"
[[data.train]]
path = "/home/me/hub/datasets--org--chats/snapshots/abc/train.jsonl"
[lora]
r = 4
base = "nf4"
[train]
max_steps = 3
[save]
output_dir = "/home/me/secret-runs"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def model(folder, **files):
    folder.mkdir(parents=True)
    contents = {"config.json": b"{}", "model.safetensors": WEIGHTS, MANIFEST: b"{}", ".hidden": b"", **files}
    for name, content in contents.items():
        (folder / name.replace("__", ".")).write_bytes(content)
    return folder


def adapter(folder, base):
    config = json.dumps({"base_model_name_or_path": str(base), "r": 4}).encode()
    made = model(folder, adapter_config__json=config, adapter_model__safetensors=WEIGHTS)
    for name in ("config.json", "model.safetensors"):
        (made / name).unlink()
    return made


def trained(folder, base, exported=adapter):
    """A run with an exported adapter, and the folder of its base."""
    run = folder / "runs" / "my"
    run.mkdir(parents=True)
    (run / "config.toml").write_text(CONFIG.format(model=base))
    exported(run / "model", base)
    return run


def cached_base(hub_cache):
    snapshot = hub_cache / "models--org--base" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "README.md").write_text("---\nlicense: other\nlicense_name: own\n---\n# Base\n")
    return snapshot


def rptrain(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_card_says_what_was_trained_and_names_no_local_path(hub, folder):
    run = trained(folder, cached_base(folder / "hub"))
    pushed = prepare(run / "model", "me/mine", run, None)
    data = ModelCard(pushed.card).data.to_dict()
    assert data["base_model"] == "org/base" and data["base_model_relation"] == "adapter"
    assert (data["license"], data["license_name"]) == ("other", "own")
    assert data["library_name"] == "peft" and data["datasets"] == ["org/chats"] and "qlora" in data["tags"]
    assert "| lora.r | 4 |" in pushed.card and "`chats.jsonl`" in pushed.card
    assert 'base = "org/base"' in pushed.card and 'path = "me/mine"' in pushed.card
    sent = [pushed.card, *(file.decode() for file in pushed.files.values() if isinstance(file, bytes))]
    assert not any(word in text for text in sent for word in ("secret", "/home", str(folder)))
    config = pushed.files["adapter_config.json"]
    assert isinstance(config, bytes) and json.loads(config) == {"base_model_name_or_path": "org/base", "r": 4}
    assert pushed.files.keys() == {"adapter_config.json", "adapter_model.safetensors"}


def test_an_adapter_of_a_local_base_needs_its_name(hub, folder):
    run = trained(folder, model(folder / "local"))
    with pytest.raises(UserError, match=r"--base owner/name"):
        prepare(run / "model", "me/mine", run, None)
    pushed = prepare(run / "model", "me/mine", run, "org/base")
    assert ModelCard(pushed.card).data.to_dict()["base_model"] == "org/base"
    unnamed = trained(folder / "unnamed", "org/base", lambda made, base: adapter(made, "")) / "model"
    with pytest.raises(UserError, match=r"--base owner/name"):
        prepare(unnamed, "me/mine", None, None)
    config = prepare(unnamed, "me/mine", None, "org/base").files["adapter_config.json"]
    assert isinstance(config, bytes) and json.loads(config)["base_model_name_or_path"] == "org/base"
    whole = prepare(model(folder / "whole"), "me/mine", run, None).card
    assert "base_model" not in whole and "from `local`" in whole and str(folder) not in whole


@pytest.mark.parametrize(
    ("path", "hub_id", "named"),
    [
        ("org/gone", "org/gone", "org/gone"),
        ("runs/gone", None, "gone"),
        ("/home/me/gone", None, "gone"),
        ("/home/me/hub/models--org--gone/snapshots/abc", "org/gone", "org/gone"),
        ("tiny-tasks", None, "tiny-tasks"),
    ],
    ids=["hub", "relative", "absolute", "cache", "preset"],
)
def test_the_name_of_a_base_that_is_not_here(hub, folder, path, hub_id, named):
    (folder / "runs").mkdir()
    base = base_of(path)
    assert (base.hub_id, base.named) == (hub_id, named)


@pytest.mark.parametrize(("name", "key"), [("config", "_name_or_path"), ("tokenizer_config", "name_or_path")])
def test_the_path_in_a_config_is_not_pushed(hub, folder, name, key):
    local = {key: str(folder / "x"), "tokenizer_file": "/home/me/x", "a": 1}
    made = model(folder / "made", **{f"{name}__json": json.dumps(local).encode()})
    content = prepare(made, "me/mine", None, None).files[f"{name}.json"]
    assert isinstance(content, bytes) and json.loads(content) == {key: "", "a": 1}


def test_of_a_folder_with_gguf_files_nothing_else_is_pushed(hub, folder):
    """It may be the current directory. A Modelfile for an adapter names the folder of its base."""
    own, local = b'FROM "./model.gguf"\n', f'FROM "{folder}"\nADAPTER "./a.gguf"\n'.encode()
    more = {"model.Modelfile": own, "a.gguf": WEIGHTS, "a.Modelfile": local, "LICENSE": b"", "chats.jsonl": b"secret"}
    made = model(folder / "made", model__gguf=WEIGHTS, **more)
    model(made / "runs")
    (made / "config.json").unlink()
    (made / "venv").symlink_to("/usr")
    pushed = prepare(made, "me/mine", None, "org/base")
    assert pushed.files.keys() == {"LICENSE", "a.gguf", "model.Modelfile", "model.gguf"}
    assert ModelCard(pushed.card).data.to_dict()["base_model_relation"] == "quantized"
    assert "ollama run hf.co/me/mine" in pushed.card and "transformers" not in pushed.card
    with pytest.raises(UserError, match="name the folder"):
        prepare(made / "model.gguf", "me/mine", None, "org/base")


def test_a_dry_run_makes_no_connection(hub, folder):
    trained(folder, "org/base")
    done = rptrain("push", "my", "me/mine", "--dry-run")
    assert done.exit_code == 0, done.output
    assert "base_model: org/base" in done.stdout
    assert "16.0 KiB  adapter_model.safetensors" in done.stderr and MANIFEST not in done.stderr
    assert not hub.requests


def test_push(hub, folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    trained(folder, "org/base")
    done = rptrain("push", "my", "me/mine", "--private")
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{hub.url}/me/mine\n"
    repo = hub.repos["models/me/mine"]
    assert repo.private and repo.files["adapter_model.safetensors"] == WEIGHTS
    assert repo.files.keys() == {".gitattributes", "README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert TOKEN not in "".join(map(str, repo.files.values()))
    assert {request.authorization for request in hub.asked("/upload/")} <= {None}


def test_a_card_that_is_there_stays(hub, folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    run = trained(folder, "org/base")
    repo = hub.add("me/mine", {"README.md": b"of the repository", "other.txt": b"other"})
    done = rptrain("push", "my", "me/mine")
    assert done.exit_code == 0 and "--force" in done.stderr, done.output
    assert repo.files["README.md"] == b"of the repository" and repo.files["other.txt"] == b"other"
    (run / "model" / "README.md").write_text("of the folder")
    assert rptrain("push", "my", "me/mine").exit_code == 0
    assert repo.files["README.md"] == b"of the folder"
    assert rptrain("push", "my", "me/mine", "--force").exit_code == 0
    assert b"base_model: org/base" in repo.files["README.md"]
    assert (run / "model" / "README.md").read_text() == "of the folder"


def test_nothing_private_is_pushed_to_a_public_repository(hub, folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    trained(folder, "org/base")
    hub.add("me/mine", {})
    done = rptrain("push", "my", "me/mine", "--private")
    assert done.exit_code == 2 and "is public" in done.stderr
    assert hub.repos["models/me/mine"].files == {}


def test_errors(hub, folder, monkeypatch):
    trained(folder, "org/base")
    done = rptrain("push", "my", "me/mine")
    assert done.exit_code == 2 and "needs a token" in done.stderr
    assert not hub.requests
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.read_only = True
    done = rptrain("push", "my", "me/mine")
    assert done.exit_code == 2 and "write to it to push" in done.stderr and "the token in HF_TOKEN" in done.stderr
    assert "models/me/mine" not in hub.repos
    hub.add("me/mine", {})
    done = rptrain("push", "my", "me/mine")
    assert done.exit_code == 2 and "no write access" in done.stderr
    hub.read_only = False
    hub.faults = [Fault("/upload/", status=400, times=9)]
    done = rptrain("push", "my", "me/mine")
    assert done.exit_code == 1 and "HTTP 400" in done.stderr
    hub.faults = [Fault("/validate-yaml", status=400)]
    done = rptrain("push", "my", "me/mine")
    assert done.exit_code == 2 and "not pushed" in done.stderr
    hub.faults = [Fault("/api/models/", page=b"<html>")]
    done = rptrain("push", "my", "me/mine")
    assert done.exit_code == 1 and "the network needs a log-in" in done.stderr
    assert TOKEN not in done.output


def test_addresses_with_signatures_are_not_logged(hub, folder, monkeypatch, caplog):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(logging.get_logger("huggingface_hub"), "propagate", True)
    trained(folder, "org/base")
    hub.faults = [Fault("/upload/", status=500, times=1)]
    assert rptrain("push", "my", "me/mine").exit_code == 0
    assert len(hub.asked("/upload/")) == 2
    assert "/upload/" not in caplog.text


@pytest.mark.parametrize("case", ["empty", "link", "checkpoint", "UTF-8", "name"])
def test_what_is_not_pushed(hub, folder, case):
    made, name = model(folder / "made"), "me/mine"
    if case == "empty":
        (made / "config.json").unlink()
    elif case == "link":
        (made / "secret").symlink_to("/etc/hostname")
    elif case == "checkpoint":
        (made / "trainer_state.json").write_text("{}")
    elif case == "UTF-8":
        (made / "README.md").write_text("# Mine", encoding="utf-16")
    else:
        name = "mine"
    with pytest.raises(UserError, match={"empty": "not an export", "name": "owner/name"}.get(case, case)):
        prepare(made, name, None, None)
