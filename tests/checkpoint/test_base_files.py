"""Which files of a model are copied to checkpoints and exports."""

from pathlib import Path

import pytest

from rptrain.checkpoint.base_files import SETTINGS, base_files, check_base_files, left_out
from rptrain.utils.errors import UserError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (tmp_path / "secret.txt").write_text("secret")
    return model


def test_files_are_copied_by_name(model):
    copied = {"config.json", "tokenizer.json", "LICENSE.txt", "NOTICE", "additional_chat_templates/tool.jinja"}
    (model / "additional_chat_templates").mkdir()
    for name in (*copied, "tokenizer_backup.txt", "model.safetensors", "notes.txt", "tokenization_x.py", "chat.txt"):
        (model / name).write_text("{}")
    assert base_files(model).keys() == copied and not left_out(model)


def test_a_license_that_leads_out_is_not_copied(model):
    (model / "LICENSE").symlink_to("../secret.txt")
    (model / "NOTICE").symlink_to("config.json")
    (model / "tokenizer.json").symlink_to("../secret.txt")  # it is read as a tokenizer before
    assert base_files(model).keys() == {"config.json", "NOTICE", "tokenizer.json"}
    assert left_out(model) == [model / "LICENSE"]


def test_links_of_the_hub_cache_are_followed(model, tmp_path):
    snapshot, blobs = tmp_path / "hub/models--a--b/snapshots/0f1", tmp_path / "hub/models--a--b/blobs"
    other = tmp_path / "hub/models--c--d/blobs/5e6"
    for folder in (snapshot, blobs, other.parent):
        folder.mkdir(parents=True)
    other.write_text("of another model")
    for name in ("config.json", "LICENSE"):
        (blobs / name[:3]).write_text("{}")
        (snapshot / name).symlink_to(f"../../blobs/{name[:3]}")
    (snapshot / "NOTICE").symlink_to(other)
    (tmp_path / "link").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "link"):
        assert base_files(folder).keys() == {"config.json", "LICENSE"} and left_out(folder) == [folder / "NOTICE"]


@pytest.mark.parametrize("name", SETTINGS)
def test_duplicate_keys_in_settings_are_refused(model, name):
    check_base_files(model)
    (model / name).write_text('{"a": 1, "a": 2}')
    with pytest.raises(UserError, match=f"{name}: an object has the key 'a' twice"):
        check_base_files(model)
