"""Which files of a model are copied to checkpoints and exports, and with which template and permissions."""

import json
import os
from pathlib import Path

import pytest

from rptrain.models import base_files as module
from rptrain.models.base_files import (
    COPIED,
    SETTINGS,
    BaseFile,
    base_files,
    check_base_files,
    check_links,
    left_out,
    with_replaced,
)
from rptrain.utils.errors import UserError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    (model / "additional_chat_templates").mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (tmp_path / "secret.txt").write_text("secret")
    return model


def test_files_are_copied_by_name(model):
    copied = {"config.json", "tokenizer.json", "LICENSE.txt", "NOTICE", "additional_chat_templates/tool.jinja"}
    for name in (*copied, "tokenizer_backup.txt", "model.safetensors", "notes.txt", "tokenization_x.py", "chat.txt"):
        (model / name).write_text("{}")
    assert base_files(model).keys() == copied and not left_out(model)


@pytest.mark.parametrize("name", [name.replace("*", "x") for name in COPIED if name != "config.json"])
def test_a_file_outside_is_not_copied(model, name):
    """Whatever the link is: relative, absolute, of a chain, or to a folder on the way."""
    (model / "inner").symlink_to("..")
    (model / "chain").symlink_to("inner/secret.txt")
    for target in (model.parent / "secret.txt", "../" * (1 + name.count("/")) + "secret.txt", model / "chain"):
        (model / name).unlink(missing_ok=True)
        (model / name).symlink_to(target)
        with pytest.raises(UserError, match=rf"{name} -> .*secret.txt; put the files there .* model.follow_links=true"):
            check_links(model)
        with pytest.raises(UserError, match=rf"{name} leads to .*secret.txt, outside of its folder"):
            base_files(model)
        assert base_files(model, follow_links=True)[name].content == b"secret"


def test_a_folder_of_templates_outside_is_not_copied(model):
    (model / "additional_chat_templates").rmdir()
    (model.parent / "mine").mkdir()
    (model.parent / "mine/tool.jinja").touch()
    (model / "additional_chat_templates").symlink_to("../mine")
    with pytest.raises(UserError, match=r"tool.jinja -> .*mine/tool.jinja"):
        check_links(model)


def test_a_hidden_file_is_not_copied(model):
    """The address of a cloned repository may contain a password."""
    (model / ".git").mkdir()
    (model / ".git/config").touch()
    (model / "vocab.txt").symlink_to(".git/config")
    with pytest.raises(UserError, match=r"vocab.txt -> .*\.git/config"):
        check_links(model)


def test_links_inside_are_followed(model, tmp_path):
    (model / "v1").mkdir()
    (model / "v1/tokenizer.model").write_text("tokens")
    (model / "tokenizer.model").symlink_to("v1/tokenizer.model")
    (model / "config.json").rename(tmp_path / "config.json")
    (model / "config.json").symlink_to("../config.json")  # it was read as the config of a model
    (model / "merges.txt").symlink_to("../nothing")
    (tmp_path / ".link").symlink_to(model)
    for folder in (model, tmp_path / ".link"):
        check_links(folder)
        assert base_files(folder).keys() == {"config.json", "tokenizer.model"}


def test_a_link_that_changes_while_it_is_read(model, monkeypatch):
    (model / "tokenizer.model").write_text("tokens")
    check_links(model)
    opened = module.open_regular

    def swapped(path):
        if path.name != "tokenizer.model":
            return opened(path)
        path.unlink()
        path.symlink_to("../secret.txt")
        file = opened(path)
        path.unlink()
        path.write_text("tokens")
        return file

    monkeypatch.setattr(module, "open_regular", swapped)
    with pytest.raises(UserError, match=r"tokenizer.model leads to .*secret.txt"):
        base_files(model)


def test_a_pipe_or_a_device_is_not_waited_for(model):
    os.mkfifo(model / "tokenizer.model")
    for link in (model / "vocab.txt", model / "merges.txt"):
        link.symlink_to("tokenizer.model" if link.name == "vocab.txt" else "/dev/zero")
        with pytest.raises(UserError, match=r"is not a regular file"):
            check_base_files(model)
        with pytest.raises(UserError, match=r"is not a regular file"):
            base_files(model, follow_links=True)


def test_a_license_that_leads_out_is_not_copied(model):
    (model / "LICENSE").symlink_to("../secret.txt")
    (model / "NOTICE").symlink_to("config.json")
    check_links(model)
    assert base_files(model).keys() == {"config.json", "NOTICE"}
    assert left_out(model) == [model / "LICENSE"]


def test_links_of_the_hub_cache_are_followed(model, tmp_path):
    snapshot, blobs = tmp_path / "hub/models--a--b/snapshots/0f1", tmp_path / "hub/models--a--b/blobs"
    other = tmp_path / "hub/models--c--d/blobs/5e6"
    for folder in (snapshot, blobs, other.parent):
        folder.mkdir(parents=True)
    other.write_text("of another model")
    for name in ("config.json", "LICENSE", "vocab.txt"):
        (blobs / name[:3]).write_text("{}")
        (snapshot / name).symlink_to(f"../../blobs/{name[:3]}")
    (snapshot / "NOTICE").symlink_to(other)
    (tmp_path / "link").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "link"):
        check_links(folder)
        assert base_files(folder).keys() == {"config.json", "LICENSE", "vocab.txt"}
        assert left_out(folder) == [folder / "NOTICE"]
    blobs.rename(tmp_path / "blobs")
    blobs.symlink_to(tmp_path / "blobs")  # as an archive might have it, to lead anywhere
    with pytest.raises(UserError, match=r"vocab.txt -> "):
        check_links(snapshot)


@pytest.mark.parametrize("name", SETTINGS)
def test_duplicate_keys_in_settings_are_refused(model, name):
    check_base_files(model)
    (model / name).write_text('{"a": 1, "a": 2}')
    with pytest.raises(UserError, match=f"{name}: an object has the key 'a' twice"):
        check_base_files(model)


def test_permissions_are_kept(model):
    (model / "vocab.txt").touch(0o600)
    (model / "merges.txt").touch()
    (model / "merges.txt").chmod(0o640)
    files = base_files(model)
    assert (files["vocab.txt"].mode, files["merges.txt"].mode) == (0o600, 0o640)


@pytest.mark.parametrize(
    "old", ["old", [{"name": "default", "template": "old"}, {"name": "tool_use"}], None], ids=["text", "named", "null"]
)
def test_a_template_of_the_config_replaces_all_others(old):
    files = {
        "chat_template.jinja": BaseFile(b"old", 0o640),
        "additional_chat_templates/tool_use.jinja": BaseFile(b"old"),
        "generation_config.json": BaseFile(b'{"chat_template": "not one"}'),
        "tekken.json": BaseFile(b"not JSON"),
    }
    names = ("tokenizer_config.json", "chat_template.json", "processor_config.json", "preprocessor_config.json")
    for name in names:
        files[name] = BaseFile(json.dumps({"a": 1e-5, "chat_template": old, "b": 10**30}).encode(), 0o600)
    found = with_replaced(files, "new")
    assert found.keys() == files.keys() - {"additional_chat_templates/tool_use.jinja"}
    assert found["chat_template.jinja"] == BaseFile(b"new", 0o640)
    for name in names:
        assert json.loads(found[name].content) == {"a": 1e-5, "chat_template": "new", "b": 10**30}
        assert found[name].mode == 0o600
    assert all(found[name] == files[name] for name in ("generation_config.json", "tekken.json"))
    assert with_replaced(found, "new") == found and with_replaced(files, None) == files


def test_a_template_is_not_added_where_there_was_none():
    files = {"tokenizer_config.json": BaseFile(b"{}"), "chat_template.json": BaseFile(b"not JSON")}
    assert with_replaced(files, "new") == files | {"chat_template.jinja": BaseFile(b"new")}
