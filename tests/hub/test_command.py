"""`rptrain download` as a command, against a hub on loopback."""

import pytest
from typer.testing import CliRunner

from rptrain.cli.commands import app
from rptrain.hub import model
from rptrain.models.locate import PRESETS, locate
from tests.hub.fake_hub import Fault

CONFIG = (PRESETS / "tiny-tasks" / "config.json").read_bytes()
MODEL = {"config.json": CONFIG, "model.safetensors": bytes(9000), "README.md": b""}


def rptrain(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_download(hub):
    hub.add("org/name", MODEL)
    done = rptrain("download", "org/name")
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{locate('org/name')}\n"
    assert 'model.path = "org/name"' in done.stderr


def test_download_of_an_adapter(hub):
    files = {"adapter_config.json": b'{"base_model_name_or_path": "org/base"}', "adapter_model.safetensors": b"weights"}
    hub.add("org/adapter", files)
    done = rptrain("download", "org/adapter")
    assert done.exit_code == 0, done.output
    assert f'lora.adapter = "{done.stdout.strip()}"' in done.stderr and "rptrain download org/base" in done.stderr


def test_exit_codes(hub):
    done = rptrain("download", "org/name")
    assert (done.exit_code, done.stdout) == (2, "") and "no model org/name" in done.stderr
    hub.add("org/name", {**MODEL, "config.json": b'{"architectures": ["OtherForCausalLM"]}'})
    done = rptrain("download", "org/name")
    assert done.exit_code == 2 and "OtherForCausalLM" in done.stderr
    hub.faults = [Fault("/api/", status=500)]
    assert rptrain("download", "org/name").exit_code == 1


def test_an_interrupt_says_how_to_continue(hub, monkeypatch):
    hub.add("org/name", MODEL)

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(model.snapshot, "link", interrupt)
    done = rptrain("download", "org/name")
    assert done.exit_code == 130 and "the same command continues" in done.stderr


@pytest.mark.parametrize("wrong", ["name", "a/b/c", "--name", "../name", "https://huggingface.co/org/name"])
def test_names_that_are_not_those_of_repositories(hub, wrong):
    done = rptrain("download", "--", wrong)
    assert done.exit_code == 2 and "owner/name" in done.stderr
    assert not hub.requests
