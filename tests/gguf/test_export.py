"""GGUF exports with a converter that the tests write: what is checked, what it is asked for, and what remains."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rptrain.checkpoint.adapter import Adapter
from rptrain.checkpoint.state import read_state, save_state
from rptrain.cli import argv
from rptrain.cli.commands import app
from rptrain.gguf import export as exporting
from rptrain.gguf import kinds, tools
from rptrain.gguf.export import Written, export_gguf, modelfile_of
from rptrain.models.families import registry
from rptrain.models.locate import PRESETS
from rptrain.models.transforms.lora import LoRA, with_lora
from rptrain.utils.errors import UserError
from tests.checkpoint.conftest import CONFIG, make_units

CONVERTER = """
import json, sys
from pathlib import Path
arguments = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(json.dumps(arguments) + "\\n")
made = Path(arguments[arguments.index("--outfile") + 1])
model = Path(arguments[-1])
{behavior}
"""
WRITES = """
settings = json.loads((model / "tokenizer_config.json").read_text())
made.write_text("GGUF of " + str(settings["eos_token"]) + str(len(list(model.glob("*.safetensors")))))
"""
QUANTIZER = '#!/bin/sh\ncat "$1" > "$2"\necho "$3" >> "$2"\n'


class Checkout:
    """A folder in the place of a checkout of llama.cpp, whose programs behave as tests set and log their arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._log = folder, folder / "log"
        folder.mkdir()
        self.behaves(WRITES)

    def behaves(self, how: str) -> None:
        for name in (tools.MODELS, tools.ADAPTERS):
            (self.folder / name).write_text(CONVERTER.format(log=str(self._log), behavior=how))

    def quantizer(self) -> None:
        program = self.folder / "build/bin/llama-quantize"
        program.parent.mkdir(parents=True)
        program.write_text(QUANTIZER)
        program.chmod(0o755)

    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in self._log.read_text().splitlines()] if self._log.exists() else []


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    made = Checkout(tmp_path / "llama.cpp")
    monkeypatch.setenv(tools.FOLDER, str(made.folder))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages/gguf.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "packages")
    return made


@pytest.fixture
def run(tmp_path):
    """A run whose data ended replies with a token that is not an EOS token of the model."""
    model_dir = tmp_path / "base"
    shutil.copytree(PRESETS / "tiny-tasks", model_dir, ignore=shutil.ignore_patterns("generation_config.json"))
    config = CONFIG | {"vocab_size": 50}
    (model_dir / "config.json").write_text(json.dumps(config))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").touch()
    meta = {"model_dir": str(model_dir), "ends": [3]}
    save_state(tmp_path / "run/checkpoints", make_units(registry.build(config)), step=2, meta=meta)
    return tmp_path / "run"


@pytest.fixture
def to(tmp_path):
    folder = tmp_path / "the models"
    folder.mkdir()
    return folder / "my model.gguf"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_paths_may_be_relative(run, checkout, to, monkeypatch):
    """The programs run in another folder."""
    monkeypatch.chdir(run.parent)
    monkeypatch.setenv(tools.FOLDER, checkout.folder.name)
    checkout.quantizer()
    written = export_gguf(Path(run.name), to.relative_to(run.parent), "q4_k_m")
    assert (
        written.file.samefile(to)
        and to.read_text().startswith("GGUF")
        and names(to.parent)
        == [
            "my model.Modelfile",
            "my model.gguf",
        ]
    )


def test_a_file_and_a_modelfile_are_written(run, checkout, to):
    told: list[str] = []
    written = export_gguf(run, to, tell=told.append)
    assert names(to.parent) == ["my model.Modelfile", "my model.gguf"] and (written.file, written.kind) == (
        to,
        kinds.MODEL,
    )
    assert to.read_text() == "GGUF of <|system|>1", "the token that ends replies in the data is the EOS token"
    (vocabulary, base), (*options, model) = ([call[0], call[-1]] for call in checkout.calls())
    assert vocabulary == "--vocab-only" and Path(base) == run / "checkpoints/checkpoint-2/base" and not options[1:]
    assert checkout.calls()[1][2:4] == ["--outtype", "q8_0"] and not Path(model).exists()
    described = modelfile_of(to).read_text().splitlines()
    assert described == [
        'FROM "./my model.gguf"',
        'TEMPLATE """{{ if .System }}<|system|>{{ .System }}<|end|>{{ end }}<|user|>{{ .Prompt }}<|end|><|assistant|>'
        '{{ .Response }}<|end|>"""',
        'PARAMETER stop "<|end|>"',
        'PARAMETER stop "<|system|>"',
    ]
    assert len(told) == 1 and "step 2" in told[0] and f"-m '{to}'" in written.commands()


def test_a_program_quantizes_to_other_types(run, checkout, to):
    checkout.quantizer()
    modelfile_of(to).write_text("an earlier one")
    export_gguf(run, to, "Q4_K_M", force=True)
    assert to.read_text().endswith("Q4_K_M\n") and checkout.calls()[1][2:4] == ["--outtype", kinds.BETWEEN]
    assert names(to.parent) == ["my model.Modelfile", "my model.gguf"] and "FROM" in modelfile_of(to).read_text()


def test_a_checkpoint_that_a_run_saves_meanwhile_is_not_mixed_in(run, checkout, to):
    newer = run / "checkpoints/checkpoint-3"
    checkout.behaves(
        f"import shutil\nif '--vocab-only' in arguments: shutil.copytree(model.parent, {str(newer)!r})\n" + WRITES
    )
    told: list[str] = []
    export_gguf(run, to, tell=told.append)
    assert newer.is_dir() and len(told) == 1 and "checkpoint-2: step 2, the newest state" in told[0]


FAILURES = {
    "fails": ("if '--outtype' in arguments: raise SystemExit('out of' + ' luck')\nmade.touch()", "out of luck"),
    "half": ("made.write_text('GGUF')\nif '--outtype' in arguments: raise SystemExit(3)", "status 3"),
    "no-gguf": ("made.write_text('<html>')", "not a GGUF file"),
    "tokenizer": ("raise SystemExit('BPE pre-tokenizer was not recognized')", "recognizes a tokenizer by"),
    "nothing": ("pass", "wrote no file"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_nothing_remains_of_a_failure(run, checkout, to, failure):
    behavior, said = FAILURES[failure]
    checkout.behaves(behavior)
    to.write_text("earlier")
    with pytest.raises(UserError, match=said):
        export_gguf(run, to, force=True)
    assert names(to.parent) == ["my model.gguf"] and to.read_text() == "earlier"
    assert len(checkout.calls()) == (1 if failure in ("tokenizer", "nothing") else 2)


def no_converter(checkout, to, monkeypatch):
    monkeypatch.delenv(tools.FOLDER)


def another_folder(checkout, to, monkeypatch):
    monkeypatch.setenv(tools.FOLDER, str(to.parent))


def no_package(checkout, to, monkeypatch):
    (checkout.folder.parent / "packages/a_folder").mkdir()
    monkeypatch.setattr(tools, "PACKAGE", "a_folder")


def in_the_way(checkout, to, monkeypatch):
    modelfile_of(to).write_text("mine")


def folder_in_the_way(checkout, to, monkeypatch):
    to.mkdir()


def link_in_the_way(checkout, to, monkeypatch):
    to.symlink_to(checkout.folder / "log")


def full_disk(checkout, to, monkeypatch):
    monkeypatch.setattr(kinds, "needed_bytes", lambda kind, weights: 1 << 62)


def nothing(checkout, to, monkeypatch): ...


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        (no_converter, {}, f"git clone .*{tools.FOLDER}"),
        (another_folder, {}, f"{tools.FOLDER} is set to .* has no {tools.MODELS}"),
        (no_package, {}, "pip install"),
        (in_the_way, {}, "model.Modelfile exists: .* --force"),
        (folder_in_the_way, {"force": True}, "is a folder or a link"),
        (link_in_the_way, {"force": True}, "is a folder or a link"),
        (full_disk, {}, "make room"),
        (nothing, {"kind": "q4_k_m"}, "llama-quantize"),
        (nothing, {"kind": "int4"}, "unknown type 'int4'"),
        (nothing, {"merge": True}, "no adapters to merge"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_it_is_refused_before_anything_runs(run, checkout, to, monkeypatch, change, options, said):
    change(checkout, to, monkeypatch)
    before = names(to.parent)
    with pytest.raises((UserError, OSError), match=said):
        export_gguf(run, to, **options)
    assert names(to.parent) == before and checkout.calls() == []


def test_the_folder_of_a_run_is_no_target(run, checkout):
    with pytest.raises(UserError, match="choose a"):
        export_gguf(run, run / "model.gguf")


@pytest.mark.parametrize(
    ("settings", "kind", "said"),
    [
        (LoRA(), "f16", None),
        (LoRA(), "q4_0", "an adapter cannot be written as q4_0"),
        (LoRA(use_dora=True), None, "DoRA.*--merge"),
        (LoRA(modules_to_save=("model.norm",)), None, r"model\.norm.*--merge"),
    ],
    ids=["plain", "type", "dora", "whole"],
)
def test_adapters_that_llama_cpp_cannot_load(run, checkout, to, settings, kind, said):
    checkpoint = run / "checkpoints/checkpoint-2"
    state = {**read_state(checkpoint), "meta": {"lora": Adapter(settings, "org/base").to_dict()}}
    spec = with_lora(registry.build(CONFIG), settings)
    if said is not None:
        with pytest.raises(UserError, match=said):
            exporting._job(checkpoint, state, spec, to, kind, False, tools.find())
        assert exporting._job(checkpoint, state, spec, to, "q4_0", True, tools.find()).lora is None
        return
    job = exporting._job(checkpoint, state, spec, to, kind, False, tools.find())
    assert job.converter == checkout.folder / tools.ADAPTERS and job.kind == "f16"
    weights = exporting._needed(job, "float32")
    assert weights < exporting._needed(replace(job, lora=None, merge=True), "float32")


def test_the_scale_of_rslora_is_in_alpha(run, checkout, to, tmp_path):
    checkpoint, settings = run / "checkpoints/checkpoint-2", LoRA(r=16, lora_alpha=8, use_rslora=True)
    state = {**read_state(checkpoint), "meta": {"lora": Adapter(settings, "org/base").to_dict()}}
    job = exporting._job(checkpoint, state, with_lora(registry.build(CONFIG), settings), to, None, False, tools.find())
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 16, "lora_alpha": 8, "use_rslora": True}))
    exporting._prepare(tmp_path, job)
    changed = json.loads((tmp_path / "adapter_config.json").read_text())
    assert changed["lora_alpha"] / changed["r"] == pytest.approx(settings.scale) and not changed["use_rslora"]


def test_draft_layers_are_left_out_by_converters_that_would_keep_them(run, checkout, to):
    checkpoint, spec = run / "checkpoints/checkpoint-2", registry.build(CONFIG)
    job = exporting._job(checkpoint, read_state(checkpoint), spec, to, None, False, tools.find())
    drafting = replace(job, spec=replace(spec, architecture="Qwen3NextForCausalLM"))
    assert exporting._without_drafts(drafting) == []
    checkout.behaves("'--no-mtp'")
    assert exporting._without_drafts(drafting) == ["--no-mtp"] and exporting._without_drafts(job) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [(("--to", "out", "--quantize", "q8_0"), "out.gguf"), (("--to", "out.gguf", "--dtype", "float32"), "--quantize")],
    ids=["folder", "dtype"],
)
def test_options_of_the_other_kind_of_export(run, options, said):
    result = CliRunner().invoke(app, argv.arguments(["export", str(run), *options]))
    assert result.exit_code == 2 and said in result.stderr


@pytest.mark.parametrize("answer", ["n\n", "y\n"], ids=["no", "yes"])
def test_on_a_terminal_it_asks_before_a_file_is_replaced(run, checkout, to, monkeypatch, answer):
    calls = []
    written = Written(to, modelfile_of(to), "q8_0", "org/base", "a note")
    monkeypatch.setattr(exporting, "export_gguf", lambda *given, force, **named: calls.append(force) or written)
    monkeypatch.setattr("rptrain.cli.models.is_terminal", lambda stream: True)
    to.touch()
    result = CliRunner().invoke(app, argv.arguments(["export", str(run), "--to", str(to)]), input=answer)
    assert (result.exit_code, calls) == (0, [True] if answer == "y\n" else [])
    if calls:
        assert f"{to}\n" in result.stdout and "--lora" in result.stderr and "a note" in result.stderr


def test_programs_are_found_in_the_path_and_beside_it(checkout, monkeypatch):
    checkout.quantizer()
    monkeypatch.delenv(tools.FOLDER)
    monkeypatch.setenv("PATH", f"{checkout.folder}/build/bin{os.pathsep}/usr/bin")
    found = tools.find()
    assert found.models == checkout.folder / tools.MODELS and found.quantize is not None
    assert tools.misplaced(found) is None
