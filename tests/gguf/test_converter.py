"""Exports by llama.cpp's own converter, from the checkout that LLAMA_CPP_DIR names: every tensor and token is there."""

import json
import os
import shutil
import subprocess
import sys
import time
from hashlib import sha256
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from rptrain.checkpoint.export import export
from rptrain.checkpoint.state import save_state
from rptrain.gguf import tools
from rptrain.gguf.export import export_gguf
from rptrain.models.families import registry
from rptrain.models.locate import PRESETS
from tests.checkpoint.conftest import make_units

pytestmark = pytest.mark.slow

TEXTS = "chktxt = "  # begins the line with the text by which the converter recognizes tokenizers
REFUSES = "        if res is None:\n            logger.warning"


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A copy of the converter that knows the tokenizer of tiny-tasks."""
    source, copy = Path(os.environ[tools.FOLDER]), tmp_path / "llama.cpp"
    for name in ("conversion", "gguf-py"):
        shutil.copytree(source / name, copy / name)
    for name in (tools.MODELS, tools.ADAPTERS):
        shutil.copy(source / name, copy)
    base = copy / "conversion/base.py"
    code = base.read_text()
    text = eval(next(line for line in code.splitlines() if TEXTS in line).partition(TEXTS)[2])
    ids = AutoTokenizer.from_pretrained(PRESETS / "tiny-tasks").encode(text)
    known = f'        if chkhsh == "{sha256(str(ids).encode()).hexdigest()}":\n            res = "gpt-2"\n'
    assert code.count(REFUSES) == 1
    base.write_text(code.replace(REFUSES, known + REFUSES))
    monkeypatch.setenv(tools.FOLDER, str(copy))
    return copy


@pytest.fixture
def run(tmp_path) -> Path:
    config = json.loads((PRESETS / "tiny-tasks/config.json").read_text())
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").touch()
    meta = {"model_dir": str(PRESETS / "tiny-tasks")}
    save_state(tmp_path / "run/checkpoints", make_units(registry.build(config)), step=2, meta=meta)
    return tmp_path / "run"


def read(file: Path):
    return import_module("gguf").GGUFReader(file)


def test_every_tensor_key_and_token_is_in_the_file(run, checkout, tmp_path):
    export_gguf(run, tmp_path / "model.gguf", "f32")
    exported = load_file(export(run, tmp_path / "model", "float32") / "model.safetensors")
    config = json.loads((tmp_path / "model/config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    reader = read(tmp_path / "model.gguf")
    stored = {tensor.name: tensor.data for tensor in reader.tensors}
    assert len(stored) == len(exported)
    for ours in exported.values():
        assert any(np.array_equal(ours.numpy(), theirs) for theirs in stored.values())
    facts = {name: field.contents() for name, field in reader.fields.items()}
    assert facts["general.architecture"] == "qwen3"
    assert facts["qwen3.block_count"] == config["num_hidden_layers"]
    assert facts["qwen3.attention.head_count_kv"] == config["num_key_value_heads"]
    assert facts["tokenizer.ggml.tokens"] == tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    assert facts["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id
    assert facts["tokenizer.chat_template"] == tokenizer.chat_template


@pytest.mark.parametrize(("kind", "error"), [("q8_0", 0.01), ("q4_0", 0.13), ("q5_1", 0.05), ("mxfp4", 0.2)])
def test_quantized_weights_are_near_the_weights(run, checkout, tmp_path, kind, error):
    export_gguf(run, tmp_path / "exact.gguf", "f32")
    export_gguf(run, tmp_path / "model.gguf", kind)
    quantization = import_module("gguf").quants
    exact = {tensor.name: tensor.data for tensor in read(tmp_path / "exact.gguf").tensors}
    quantized = read(tmp_path / "model.gguf").tensors
    assert {tensor.name for tensor in quantized} == exact.keys()
    assert {tensor.tensor_type.name for tensor in quantized} == {"F32", "Q8_0", kind.upper()}
    for tensor in quantized:
        values, wanted = quantization.dequantize(tensor.data, tensor.tensor_type), exact[tensor.name]
        assert np.linalg.norm(values - wanted) <= error * np.linalg.norm(wanted)


def test_a_program_ends_with_a_process_that_is_killed(tmp_path):
    (tmp_path / "hang.py").write_text("import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    line = "from pathlib import Path; from rptrain.gguf.convert import python, run; run(python(Path('{0}/hang.py')), "
    ours = subprocess.Popen(
        [sys.executable, "-c", line.format(tmp_path) + f"Path('{tmp_path}/made.gguf'), 'converting')"]
    )
    log, until = tmp_path / "made.log", time.monotonic() + 30
    while not (log.is_file() and log.read_text().strip()) and time.monotonic() < until:
        time.sleep(0.02)
    ours.kill()
    ours.wait()
    program = Path("/proc", log.read_text().strip(), "stat")
    while program.exists() and program.read_text().split()[2] != "Z" and time.monotonic() < until:
        time.sleep(0.02)
    assert time.monotonic() < until
