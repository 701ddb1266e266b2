"""What a person gets wrong ends with 2 and a message that says what to do, before weights are loaded."""

import json
import os
import re
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rptrain.checkpoint.atomic_dir import read_manifest
from rptrain.engine.memory.step_layout import StepLayout
from rptrain.models.families import registry
from rptrain.models.locate import read_config
from rptrain.planner import timings
from rptrain.planner.choose import LIBRARIES, Limits, make_plan
from rptrain.runs.folder.event_log import EventLog
from rptrain.runs.folder.run_dir import RunDir
from rptrain.runs.records import events
from rptrain.runs.records.line_file import LineFile
from rptrain.runs.records.tail import end_of
from rptrain.schedule.machine import CPU, Machine
from rptrain.utils.errors import UserError

from . import run_tools as tools
from .cases import long


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tools.write_model(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture
def folder(model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a `model`. It has the same path in all tests, for the runs below, which are trained once."""
    return anew(model, monkeypatch)


def anew(model: Path, patch: pytest.MonkeyPatch) -> Path:
    place = model.with_name("place")
    place.mkdir(exist_ok=True)
    for path in place.iterdir():  # not the folder itself: child processes that work on are in it
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    shutil.copytree(model, place / "model")
    patch.chdir(place)
    return place


@pytest.fixture(scope="module")
def saved(model: Path) -> Path:
    """The `runs` of a run with checkpoints of steps 3 and 6."""
    with pytest.MonkeyPatch.context() as patch:
        place = anew(model, patch)
        tools.train_here(place, "save.save_steps=3")
    return (place / "runs").rename(model.with_name("saved"))


@pytest.fixture
def trained(saved: Path, folder: Path) -> RunDir:
    tools.write_config(folder)
    shutil.copytree(saved, folder / "runs", symlinks=True)
    return RunDir(folder / "runs/run")


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(*arguments: object, **named: object) -> None:
        raise AssertionError("memory was taken for a run that cannot be")

    monkeypatch.setattr("rptrain.train.session.ModelStore", taken)


@pytest.fixture
def refused(folder: Path, nothing_loads: None) -> Callable[..., str]:
    """Runs the command with overrides and gives what it says."""

    def message(*overrides: str) -> str:
        tools.write_config(folder)
        result = tools.invoke("--config", "run.toml", *overrides)
        assert (result.exit_code, result.stdout) == (2, ""), result.output
        assert "Traceback" not in result.stderr and "Error(" not in result.stderr
        return result.stderr

    return message


@pytest.mark.long
def test_the_command(folder):
    tools.write_config(folder)
    command = tools.command("--config", folder / "run.toml", "data.train.0.path=none.jsonl")
    stdout, stderr = command.communicate(timeout=tools.PATIENCE)
    assert (stdout, stderr) == ("", "command line, data.train.0.path: none.jsonl: no such data file or folder\n")
    assert command.returncode == 2
    assert not (folder / "runs").exists()


# The plan


@pytest.mark.long
def test_sequences_that_no_memory_holds(refused, monkeypatch):
    """They are shortened, after everything that costs less."""
    monkeypatch.setattr("rptrain.machine.hardware.available_bytes", lambda: 16 << 30)
    fits = r"is free on this machine\nwhat makes it fit:\n- train\.micro_batch_size=1 [^(\n]*data\.max_length=\d+ \("
    few = ("train.micro_batch_size=2", "train.global_batch_size=2", "engine.devices=cpu:1")  # few plans to try
    assert re.search(fits, refused("data.max_length=1000000000", *few))


def test_a_pattern_that_takes_too_long(refused, monkeypatch):
    monkeypatch.setattr("rptrain.utils.patterns.SECONDS", 0.2)
    said = refused("lora.r=2", "lora.target_modules=(([a-z0-9_.]+)+)+!")
    assert said.startswith("command line, lora.target_modules: '(([a-z0-9_.]+)+)+!' takes more than 0.2 s to match; ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("devices", ["cuda", "cuda:7"])
def test_a_gpu_that_is_not_there(refused, devices):
    said = refused(f"engine.devices={devices}")
    assert f'engine.devices = "{devices}", but this machine has no CUDA GPU; "cpu:2" is two workers' in said


def test_a_limit_too_small_for_the_largest_layer(model):
    spec = registry.build(read_config(model))
    for limit in (LIBRARIES // 2, LIBRARIES + 1000):
        with pytest.raises(UserError) as caught:
            make_plan(spec, Machine(CPU, 1), StepLayout(16, 16, 4, 4, torch.float32, True), Limits(limit))
        said = str(caught.value)
        assert f"leaves {max(limit - LIBRARIES, 0)} B for tensors, but layer 'layers.0', the largest, needs" in said
        assert said.endswith("KiB even as its own stage, with 256 tokens per micro-batch")


def test_more_devices_than_micro_batches_is_a_warning(folder, caplog):
    run = tools.train_here(folder, "engine.devices=cpu:6")
    assert "4 micro-batches per round keep only 4 of 6 devices busy: using 4" in caplog.text
    assert len(tools.events(run, events.RunStarted)[0].devices) == 4


def test_a_run_that_is_refused_does_not_warn_of_its_plan(refused, caplog):
    assert "64.0 MiB" in refused("engine.host_limit=64MiB", "optim.warmup_steps=1000", "train.max_steps=2")
    assert "warm-up" not in caplog.text


# The model


def spoil_json(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_config(folder: Path, **changes: object) -> None:
    spoil_json(folder / "model/config.json", **changes)


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def test_weights_that_are_no_numbers(folder):
    """Reading them takes memory, so this alone comes once it was taken; no step is trained."""
    file = folder / "model/model.safetensors"
    name = "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(file)
    tensors[name][3, 4] = torch.nan
    save_file(tensors, file)
    tools.write_config(folder)
    result = tools.invoke("--config", "run.toml")
    assert result.exit_code == 2 and f"{folder / 'model'}: {name} holds values that are infinite or" in result.stderr
    (run,) = (folder / "runs").iterdir()
    assert not any(isinstance(event, events.Step) for event in events.read(run / "events.jsonl"))


def test_a_tokenizer_whose_pattern_takes_too_long(folder, refused):
    """Its library gives up after some seconds."""
    steps = json.loads((folder / "model/tokenizer.json").read_text())["pre_tokenizer"]
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    spoil_json(folder / "model/tokenizer.json", pre_tokenizer={"type": "Sequence", "pretokenizers": [split, steps]})
    (folder / "chats.jsonl").write_text(chat("x" * 40))
    message = "model: the tokenizer fails: Onig: Regex search error: retry-limit-in-match over; copy the model's own"
    assert message in refused("data.train.0.path=chats.jsonl", "data.max_length=64")
    said = tools.invoke("generate", "model", "--prompt", "x" * 40)
    assert said.exit_code == 2 and message in said.stderr and "--raw" not in said.stderr


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('two') if messages | length < 2 }}{{ messages[1].content }}", "two"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages + 1 }}", "can only concatenate list"),
        ("{{ '\\ud800' }}", "surrogates not allowed"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
    ids=["two-messages", "syntax", "type", "surrogate", "division"],
)
def test_a_template_that_rejects_a_question(folder, refused, template, reason):
    """The same words for questions, before anything is loaded, and for prompts."""
    (folder / "model/chat_template.jinja").write_text(template)
    words = "the chat template refuses the conversation: "
    said = refused("eval.questions=3")
    assert f"eval.questions: {words}" in said and reason in said and "single message of the user" in said
    said = tools.invoke("generate", "model", "--prompt", "a")
    assert said.exit_code == 2 and f"model: {words}" in said.stderr and reason in said.stderr, said.output
    assert "--raw" in said.stderr


def test_files_that_do_not_belong_to_the_model_do_no_harm(folder):
    """Code is not run, pickles and other weights are not read, and neither goes into the export."""
    for name in ("modeling_x.py", "pytorch_model.bin", "other.safetensors", "optimizer.pt"):
        (folder / "model" / name).write_text("raise SystemExit")
    (folder / "model/original").mkdir()
    (folder / "model/LICENSE").write_text("free")
    change_config(folder, auto_map={"AutoModelForCausalLM": "modeling_x.X", "AutoTokenizer": ["modeling_x.X", None]})
    (folder / "chats.jsonl").write_text(CHAT * 10)
    run = tools.train_here(folder, "data.train.0.path=chats.jsonl", "data.max_length=64")
    written = {path.name for path in run.model_path.iterdir()}
    assert "LICENSE" in written and not written & {"modeling_x.py", "pytorch_model.bin", "original"}


# The data


def chat(question: str = "Spell backwards: ab", answer: str = "ba") -> str:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages}, ensure_ascii=False) + "\n"


CHAT = chat()
LONE_SURROGATE = '{"messages": [{"role": "user", "content": "\\ud83d"}]}\n'


def test_few_bad_rows_are_left_out_with_a_warning(folder, caplog):
    (folder / "few.jsonl").write_text(CHAT * 50 + "{\n" + CHAT * 148 + LONE_SURROGATE)
    run = tools.train_here(folder, "data.train.0.path=few.jsonl", "data.max_length=64")
    assert run.finished
    assert "2 of 200 rows are bad:\n  few.jsonl:51: " in caplog.text and "These rows are left out." in caplog.text


# Runs that cannot be resumed


@pytest.fixture
def unfinished(trained: RunDir) -> RunDir:
    """Without the record of its end."""
    lines = trained.events_path.read_text().splitlines(keepends=True)
    trained.events_path.write_text("".join(lines[:-1]))
    return trained


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.seed=1", "train.seed was 0, is 1"),
        ("optim.update=sync", 'optim.update was "async", is "sync"'),
        ("model.dtype=bfloat16", 'model.dtype was "float32", is "bfloat16"'),
        ("train.micro_batch_size=8", "train.micro_batch_size was 16, is 8"),
        (
            "train.max_steps=5",
            "was saved after step 6, but the config ends training at step 5: increase train.max_steps",
        ),
    ],
)
def test_changed_numbers(unfinished, refused, override, message):
    before = unfinished.config_path.read_bytes()
    said = refused(override)
    assert message in said and "save.resume=never" in said
    assert unfinished.config_path.read_bytes() == before


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def forget(checkpoint: Path, begin: str) -> None:
    """The manifest names no file whose name begins so."""
    manifest = json.loads((checkpoint / "complete.json").read_text())
    manifest["files"] = {name: entry for name, entry in manifest["files"].items() if not name.startswith(begin)}
    (checkpoint / "complete.json").write_text(json.dumps(manifest))


def deepen(checkpoint: Path) -> None:
    """Brackets without end in the state, with a hash that fits."""
    content, manifest = b"[" * 100_000, json.loads((checkpoint / "complete.json").read_text())
    (checkpoint / "trainer_state.json").write_bytes(content)
    manifest["files"]["trainer_state.json"] = {"size": len(content), "sha256": sha256(content).hexdigest()}
    (checkpoint / "complete.json").write_text(json.dumps(manifest))


DAMAGES = [
    (lambda c: cut(c / "units/00000-embed.safetensors", -1), "00000-embed.safetensors is damaged: "),
    (lambda c: (c / "units/00000-embed.safetensors").unlink(), "00000-embed.safetensors is missing"),
    (lambda c: flip(c / "trainer_state.json"), "trainer_state.json is damaged"),
    (lambda c: (c / "complete.json").write_text("{"), "complete.json is damaged"),
    (lambda c: flip(c / "base/config.json"), "config.json"),
    (lambda c: shutil.rmtree(c / "base"), "is missing"),
    (lambda c: forget(c, ""), "complete.json is damaged: it does not name trainer_state.json"),
    (lambda c: forget(c, "units/00000"), "complete.json is damaged: it does not name units/00000-embed.safetensors"),
    (deepen, "trainer_state.json is damaged"),
]
DAMAGE_IDS = [
    "cut",
    "deleted",
    "flipped",
    "manifest-cut",
    "base-flipped",
    "base-deleted",
    "no-state",
    "no-unit",
    "deep",
]


@pytest.mark.parametrize(("spoil", "message"), DAMAGES, ids=DAMAGE_IDS)
def test_no_checkpoint_that_is_whole(unfinished, refused, spoil, message):
    for step in (3, 6):
        spoil(unfinished.checkpoint_path(step))
    said = refused()
    assert message in said and "checkpoint-6" in said and "start a new run with save.resume=never" in said
    assert message in refused(f"save.resume={unfinished.checkpoint_path(3)}")


@pytest.mark.parametrize(
    "spoil", [spoil if number < 3 else long(spoil) for number, (spoil, _) in enumerate(DAMAGES)], ids=DAMAGE_IDS
)
def test_the_checkpoint_before_a_damaged_one_is_taken(unfinished, folder, caplog, spoil):
    expected = tools.state(unfinished)
    spoil(unfinished.checkpoint_path(6))
    run = tools.train_here(folder, "save.save_steps=3", "save.save_total_limit=1")
    assert f"{unfinished.checkpoint_path(6)} is damaged: using the checkpoint before it" in caplog.text
    assert run.finished and [event.step for event in tools.events(run, events.Resumed)] == [3]
    assert sorted(path.name for path in run.checkpoints_path.iterdir()) == ["checkpoint-6", "checkpoint-6.damaged"]
    assert tools.state(run) == expected


def test_a_flipped_bit_is_found_while_weights_are_read(unfinished, folder):
    """Hashing takes as long as reading, so this alone comes once memory was taken."""
    expected = tools.state(unfinished)
    flip(unfinished.checkpoint_path(6) / "units/00001-layers.0.safetensors")
    named = tools.invoke("--config", "run.toml", f"save.resume={unfinished.checkpoint_path(6)}")
    assert named.exit_code == 2 and "its content is not what was saved (sha256 differs)" in named.stderr
    assert "Set save.resume to another checkpoint" in named.stderr
    assert isinstance(list(events.read(unfinished.events_path))[-1], events.Failed)
    run = tools.train_here(folder)
    (damaged,) = tools.events(run, events.CheckpointDamaged)
    assert damaged.path.endswith("checkpoint-6") and "00001-layers.0.safetensors" in damaged.message
    assert run.finished and [event.step for event in tools.events(run, events.Resumed)] == [3]
    assert sorted(path.name for path in run.checkpoints_path.iterdir()) == [
        *("checkpoint-3", "checkpoint-6", "checkpoint-6.damaged")
    ]
    assert tools.state(run) == expected


def test_a_flipped_bit_in_every_checkpoint(unfinished, folder):
    for step in (3, 6):
        flip(unfinished.checkpoint_path(step) / "units/00001-layers.0.safetensors")
    result = tools.invoke("--config", "run.toml")
    assert result.exit_code == 2 and result.stderr.count("00001-layers.0.safetensors is damaged") == 2, result.stderr
    assert "start a new run with save.resume=never" in result.stderr
    assert unfinished.checkpoint_path(3).exists() and unfinished.checkpoint_path(6).exists()


@pytest.mark.parametrize("more", [[], ["--dry-run"]], ids=["trained", "dry-run"])
def test_a_damaged_checkpoint_is_told_once(unfinished, caplog, more):
    cut(unfinished.checkpoint_path(6) / "units/00000-embed.safetensors", -1)
    assert tools.invoke("--config", "run.toml", *more).exit_code == 0
    assert caplog.text.count("is damaged: using the checkpoint before it") == 1


def test_a_model_or_data_that_changed(unfinished, folder, refused):
    change_config(folder, rms_norm_eps=0.5)
    assert "model/config.json differs from the one that" in refused()
    change_config(folder, rms_norm_eps=1e-6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rptrain.data.loader.RANDOM_ROWS", 100)
        assert "the data differs from what" in refused()


def test_a_model_that_was_moved(unfinished, folder, refused, monkeypatch):
    monkeypatch.setattr("rptrain.train.begin.prepare_job", None)
    (folder / "model").rename(folder / "moved")
    assert f"without its model: put it back to {folder / 'model'}, or a link to it" in refused()
    monkeypatch.undo()
    (folder / "model").symlink_to("moved")
    assert tools.invoke("--config", folder / "run.toml").exit_code == 0


def test_a_run_that_another_process_trains(unfinished, refused, monkeypatch):
    """Found out before anything is read that takes long, and nothing of the run is touched."""
    monkeypatch.setattr("rptrain.train.begin.prepare_job", None)
    before = unfinished.config_path.read_text()
    with EventLog(unfinished.events_path):
        assert "another process is training this run" in refused("save.save_steps=2")
    assert unfinished.config_path.read_text() == before


# Models that are asked


@pytest.mark.parametrize(
    ("spoil", "arguments", "message"),
    [
        (lambda r: None, ("--raw", "--prompt", ""), "prompt 1 is empty"),
        (lambda r: None, ("--prompt", "a", "--prompt", "\udcff"), "prompt 2 is not UTF-8 text"),
        (lambda r: None, ("--prompt", "a", "--max-new-tokens", 10**12), "lower --max-new-tokens"),
        (lambda r: None, ("--prompt", "a" * 9000), "more than 8 times the model"),
        (lambda r: shutil.rmtree(r.path), ("--prompt", "a"), "does not exist"),
        (lambda r: (r.model_path / "tokenizer.json").unlink(), ("--prompt", "a"), "there is no tokenizer"),
        (lambda r: change_config(r.path, dtype="int3"), ("--prompt", "a"), "unknown dtype 'int3'; use one of bfloat16"),
        (lambda r: damage_checkpoint(r), ("--prompt", "a"), "00000-embed.safetensors is damaged: "),
    ],
)
def test_generate(trained, spoil, arguments, message):
    spoil(trained)
    result = tools.invoke("generate", trained.path, *arguments)
    assert result.exit_code == 2 and message in result.stderr, result.output


def damage_checkpoint(run: RunDir) -> None:
    shutil.rmtree(run.model_path)
    for checkpoint in run.checkpoints():
        cut(checkpoint / "units/00000-embed.safetensors", -1)


@pytest.mark.parametrize("temperature", ["1e-300", "1e-40", "1e30"])
def test_any_temperature_will_do(folder, temperature):
    result = tools.invoke("generate", "model", "--prompt", "a", "--max-new-tokens", 4, "--temperature", temperature)
    assert result.exit_code == 0, result.output


def test_exports_that_cannot_be_written(trained, folder):
    (folder / "mine").mkdir()
    (folder / "mine/notes.txt").touch()
    for target, message in (
        ("mine", "mine is not empty: it holds notes.txt"),
        ("run.toml", "is a file"),
        ("model", "overlaps the base model"),
        (trained.path, "overlaps the run"),
    ):
        result = tools.invoke("export", trained.path, "--to", target)
        assert result.exit_code == 2 and message in result.stderr
    result = tools.invoke("export", trained.path, "--to", "merged", "--merge")
    assert result.exit_code == 2 and "adapters" in result.stderr
    result = tools.invoke("export", trained.path, "--to", "run.toml/inside")
    assert result.exit_code == 2 and "run.toml is not a directory: choose another one" in result.stderr
    (folder / "loop").symlink_to("loop")
    result = tools.invoke("export", trained.path, "--to", "loop/inside")
    assert result.exit_code == 2 and "loop is not a directory: choose another one" in result.stderr


# Files that are something else


def pipe(file: Path) -> None:
    os.mkfifo(file)


def sparse(file: Path) -> None:
    """12 GiB that take no space on the disk."""
    file.touch()
    os.truncate(file, 12 << 30)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("make", [pipe, sparse])
def test_files_of_a_run(folder, make):
    """A run is listed without them; only the record that they cannot be read is an error."""
    run = RunDir(folder / "runs/run")
    run.path.mkdir(parents=True)
    tools.write_config(folder)
    (folder / "run.toml").rename(run.config_path)
    for name in ("events.jsonl", "lanes.jsonl", "timings.json", "complete.json"):
        make(run.path / name)
    assert tools.invoke("runs", "--runs", "runs").exit_code == 0
    assert end_of(run.events_path, 10).strip("\0") == ""
    with pytest.raises(UserError, match=r"is not a regular file|is too large"):
        timings.read(run.path)
    with pytest.raises(UserError, match=r"is not complete|is too large"):
        read_manifest(run.path)
    if make is pipe:
        for kind in (EventLog, LineFile):
            with pytest.raises(UserError, match="is not a regular file"):
                kind(run.events_path)
