"""From the hub and back: a download that is cut and resumed, training on it, a push, and a fresh download."""

import shutil

import pytest
from typer.testing import CliRunner

from rptrain.checkpoint.atomic_dir import MANIFEST
from rptrain.cli.commands import app
from rptrain.hub import transfer
from rptrain.models.locate import locate
from tests import run_tools
from tests.hub.fake_hub import TOKEN, Fault, sha256

NOT_COMPARED = (MANIFEST, "README.md")


def hashes(folder):
    return {file.name: sha256(file.read_bytes()) for file in folder.iterdir() if file.name not in NOT_COMPARED}


@pytest.mark.long
def test_a_model_comes_from_the_hub_and_goes_back(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    base = run_tools.write_model(tmp_path / "base")
    files = {file.name: file.read_bytes() for file in base.iterdir()}
    hub.add("org/base", {**files, "README.md": b"---\nlicense: mit\n---\n"})
    monkeypatch.setattr(transfer, "ATTEMPTS", 0)
    hub.faults = [Fault("/cdn/", cut=10_000)]
    assert CliRunner().invoke(app, ["download", "org/base"]).exit_code == 1
    assert run_tools.invoke("download", "org/base").exit_code == 0
    ranges = [request.range for request in hub.asked(f"/cdn/{sha256(files['model.safetensors'])}")]
    assert ranges == [None, "bytes=10000-"]
    assert hashes(locate("org/base")) == hashes(base)

    run = run_tools.train_here(tmp_path, "model.path=org/base", "train.max_steps=3")
    pushed = run_tools.invoke("push", run.path, "me/mine")
    assert pushed.exit_code == 0, pushed.output
    assert b"base_model: org/base" in hub.repos["models/me/mine"].files["README.md"]
    assert b"license: mit" in hub.repos["models/me/mine"].files["README.md"]

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "other"))
    assert run_tools.invoke("download", "me/mine").exit_code == 0
    fresh = locate("me/mine")
    assert fresh.is_relative_to(tmp_path / "other")
    assert hashes(fresh) == hashes(run.path / "model")
    assert hashes(fresh)["model.safetensors"] != hashes(base)["model.safetensors"]

    shutil.rmtree(run.path / "model")
    assert run_tools.invoke("push", run.path, "me/again").exit_code == 0
    sent = hub.repos["models/me/again"].files
    assert hashes(fresh).items() <= {name: sha256(content) for name, content in sent.items()}.items()
    assert MANIFEST not in sent

    exported = run.path.with_name(f"{run.path.name}-export")
    (exported / "README.md").write_text("my card")
    monkeypatch.setattr("rptrain.cli.hub.recorded", lambda folder: (None, None))  # as if the run had gone on
    assert run_tools.invoke("push", run.path, "me/third").exit_code == 0
    assert hub.repos["models/me/third"].files["README.md"] == b"my card"
