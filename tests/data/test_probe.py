"""A tokenizer.json is tried in a child process with limits before it is loaded."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rptrain.data import probe
from rptrain.data.loader import load_tokenizer
from rptrain.data.probe import Probe
from rptrain.utils.errors import UserError

PRESET = Path(__file__).parents[2] / "models/presets/tiny-tasks"
IMPORTED = """\
import sys
from pathlib import Path
from rptrain.data.probe import _try

list(_try(Path(sys.argv[1])))
print(*({"tokenizers", "numpy", "torch", "transformers"} & sys.modules.keys()))
"""


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(PRESET, tmp_path / "model")
    return tmp_path / "model"


def change(folder, **values):
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def prepend(count):
    return {"type": "Prepend", "prepend": "a" * count}


def test_an_id_that_takes_gigabytes(folder, monkeypatch):
    monkeypatch.setattr(probe, "SECONDS", 600)
    monkeypatch.setattr(probe, "MEMORY", 1 << 29)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    change(folder, model=model | {"vocab": model["vocab"] | {"b": 2**31}})
    message = r"tokenizer\.json: loading this tokenizer needs more than 512 MiB of memory: copy the model's own"
    with pytest.raises(UserError, match=message):
        load_tokenizer(folder)


def test_a_normalizer_that_takes_gigabytes(folder, monkeypatch):
    monkeypatch.setattr(probe, "SECONDS", 600)
    monkeypatch.setattr(probe, "MEMORY", 1 << 29)
    change(folder, normalizer=prepend(20_000_000))
    with pytest.raises(UserError, match=r"tokenizer\.json: loading this tokenizer needs more than 512 MiB"):
        load_tokenizer(folder)


def test_a_tokenizer_that_takes_too_long(folder, monkeypatch):
    monkeypatch.setattr(probe, "SECONDS", 0.01)
    change(folder, normalizer=prepend(1_000_000))
    with pytest.raises(UserError, match=r"tokenizer\.json: loading this tokenizer takes more than 0\.01 s: copy"):
        load_tokenizer(folder)


def test_each_version_of_a_file_is_tried_once(folder, monkeypatch):
    tried = []
    monkeypatch.setattr(probe, "stream", lambda function, path, **limits: tried.append(path) or iter([None]))
    for _ in range(2):
        Probe(folder).wait()
    assert tried == [folder / "tokenizer.json"]
    change(folder, version="1.0", more=1)
    Probe(folder).wait()
    assert len(tried) == 2


@pytest.mark.parametrize("content", ["{", "{}", None])
def test_what_else_is_wrong_is_left_to_loading(folder, content):
    (folder / "tokenizer.json").unlink()
    if content is not None:
        (folder / "tokenizer.json").write_text(content)
    Probe(folder).wait()


def test_the_trial_imports_no_large_library(folder):
    command = [sys.executable, "-P", "-c", IMPORTED, str(folder / "tokenizer.json")]
    assert subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout == "tokenizers\n"
