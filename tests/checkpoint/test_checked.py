"""Weights of exports, adapters and checkpoints that are not what was written are refused by what loads them."""

import json
import shutil
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from rptrain.checkpoint import adapter, checked
from rptrain.checkpoint.atomic_dir import MANIFEST
from rptrain.checkpoint.export import export
from rptrain.inference.free_memory import free_memory
from rptrain.inference.load import LoadedChat
from rptrain.models.weights import pretrained
from rptrain.runs.folder.run_dir import RunDir
from rptrain.utils import file_digests
from rptrain.utils.errors import UserError

from .. import run_tools as tools

Damage = Callable[[Path], None]
NEWEST = "checkpoints/checkpoint-2"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a run that trained all of it, and one that trained adapters."""
    folder = tmp_path_factory.mktemp("made")
    tools.write_model(folder / "model")
    settings = ("train.max_steps=2", "save.save_steps=1")
    tools.train_here(folder, *settings, "log.run_name=full")
    tools.train_here(folder, *settings, "log.run_name=lora", "lora.r=2")
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy, in which the base of adapters is the model in it."""
    copy = shutil.copytree(made, tmp_path / "folder")
    for file in (
        *copy.glob("runs/lora/checkpoints/*/trainer_state.json"),
        copy / "runs/lora/model/adapter_config.json",
    ):
        text, before = file.read_text().replace(str(made), str(copy)), file.read_text()
        file.write_text(text)
        rewrite(file.parent, lambda manifest, name=file.name, at=file: note(manifest, name, at))
        assert text != before
    return copy


def note(manifest: dict, name: str, file: Path) -> None:
    content = file.read_bytes()
    manifest["files"][name] = {"size": len(content), "sha256": sha256(content).hexdigest()}


def rewrite(directory: Path, change: Callable[[dict], object]) -> None:
    manifest = json.loads((directory / MANIFEST).read_text())
    change(manifest)
    (directory / MANIFEST).write_text(json.dumps(manifest))


def flip(file: Path, at: float = 0.6) -> None:
    content = bytearray(file.read_bytes())
    content[int(at * len(content))] ^= 1
    file.write_bytes(content)


def answer(source: Path) -> list[str]:
    return tools.generated(source, ["2+2="], 3, 0.0, 0, raw=False)


def refused(source: Path, match: str) -> None:
    with pytest.raises(UserError, match=match):
        answer(source)
    with pytest.raises(UserError, match=match):
        LoadedChat(source, free_memory())


def forget_weights(directory: Path) -> None:
    """As an earlier version wrote it."""
    rewrite(directory, lambda manifest: [manifest.pop(key, None) for key in (checked.WEIGHTS, checked.BASE_WEIGHTS)])


@pytest.mark.parametrize("earlier", [False, True])
def test_a_damaged_unit_of_the_newest_checkpoint(folder: Path, tmp_path: Path, earlier: bool) -> None:
    run = folder / "runs/full"
    shutil.rmtree(run / "model")
    if earlier:
        rewrite(
            run / NEWEST, lambda manifest: [entry.pop("param_sha256", None) for entry in manifest["files"].values()]
        )
    assert answer(run)
    flip(run / NEWEST / "units/00001-layers.0.safetensors", 0.1)
    match = r"layers\.0\.safetensors is damaged: .*: use another checkpoint, such as .*checkpoint-1$"
    refused(run, match)
    with pytest.raises(UserError, match=match):
        export(run, tmp_path / "to")
    assert answer(run / "checkpoints/checkpoint-1")


def test_optimizer_state_does_not_answer(folder: Path, tmp_path: Path) -> None:
    """Only what is read for an answer is hashed for it; an export hashes everything."""
    run = folder / "runs/full"
    shutil.rmtree(run / "model")
    expected = answer(run)
    flip(run / NEWEST / "units/00001-layers.0.safetensors", 0.9)
    assert answer(run) == expected
    with pytest.raises(UserError, match=r"layers\.0\.safetensors is damaged"):
        export(run, tmp_path / "to")


def resave(file: Path) -> None:
    tensors = load_file(file)
    tensors["model.norm.weight"] += 1
    save_file(tensors, file)


def replace_by_shards(file: Path) -> None:
    tensors = load_file(file)
    tensors["model.norm.weight"] += 1
    names = dict.fromkeys(tensors, "weights.safetensors")
    save_file(tensors, file.with_name("weights.safetensors"))
    file.with_name("model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    file.unlink()


@pytest.mark.sample(3, gate=6)
@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("change", [flip, resave, replace_by_shards])
def test_changed_weights_of_an_export(folder: Path, change: Damage, earlier: bool) -> None:
    model = folder / "runs/full/model"
    if earlier:
        forget_weights(model)
    assert answer(model)
    change(model / "model.safetensors")
    refused(model, rf"safetensors.* delete {model}/complete\.json, and it is used unchecked")
    with pytest.raises(UserError, match=r"safetensors.* delete .*/complete\.json"):
        tools.train_here(folder, f"model.path={model}", "log.run_name=next", "train.max_steps=1")
    (model / MANIFEST).unlink()
    assert answer(model)


def test_other_files_of_an_export_may_be_edited(folder: Path) -> None:
    model = folder / "runs/full/model"
    expected = answer(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 77}))
    (model / "chat_template.jinja").write_text((model / "chat_template.jinja").read_text() + " ")
    tensors = load_file(model / "model.safetensors")
    save_file(dict(sorted(tensors.items(), reverse=True)), model / "model.safetensors")  # the same, in another order
    assert len(answer(model)) == len(expected)


@pytest.mark.parametrize(
    "text", ["", "{", '{"kind": "export", "format": 1}', '{"kind": "export", "format": 1, "files": 1}']
)
def test_a_damaged_manifest(folder: Path, text: str) -> None:
    (folder / "runs/full/model" / MANIFEST).write_text(text)
    refused(folder / "runs/full/model", r"complete\.json is damaged .*: restore the file or export the model again")


def test_a_manifest_of_another_program_says_nothing(folder: Path) -> None:
    (folder / "model" / MANIFEST).write_text('{"files": 12}')
    assert answer(folder / "model")


def test_a_changed_base_of_adapters(folder: Path) -> None:
    run = folder / "runs/lora"
    exported = export(run, folder / "exported")
    expected = answer(run)
    assert answer(run / NEWEST) == answer(exported) == expected
    flip(folder / "model/model.safetensors")
    for source in (run, run / "model", exported):
        match = r"model\.safetensors: the weights of .* differ from those that the adapter .* was trained on: .*"
        place = (run / "model" if source == run else source) / MANIFEST
        refused(source, f"{match}, delete {place}$")  # long messages are shortened in the middle
    refused(run / NEWEST, "the frozen weights of .* changed since the run started: restore the files in")
    with pytest.raises(UserError, match=r"the frozen weights of .* changed since the run started"):
        export(run, folder / "merged", merge=True)
    started = f"lora.adapter={exported}", "lora.r=2", "train.max_steps=1", "log.run_name=next"
    advice = rf", delete {exported / MANIFEST}$"
    with pytest.raises(UserError, match=rf"differ from those that the adapter .* was trained on: .*{advice}"):
        tools.train_here(folder, *started)
    (folder / "model").rename(folder / "another")
    tools.train_here(folder, *started, f"model.path={folder / 'another'}")  # on purpose, with a warning


def test_a_base_that_was_stored_anew(folder: Path) -> None:
    """Other files with the same tensors."""
    expected = answer(folder / "runs/lora")
    file = folder / "model/model.safetensors"
    save_file(dict(sorted(load_file(file).items(), reverse=True)), file)
    assert answer(folder / "runs/lora") == answer(folder / "runs/lora" / NEWEST) == expected


def test_a_damaged_adapter(folder: Path) -> None:
    model = folder / "runs/lora/model"
    flip(model / "adapter_model.safetensors", 0.9)
    match = r"adapter_model\.safetensors is damaged: .* delete .*/complete\.json"
    refused(model, match)
    with pytest.raises(UserError, match=match):
        tools.train_here(folder, f"lora.adapter={model}", "lora.r=2", "train.max_steps=1", "log.run_name=next")
    forget_weights(model)  # an earlier version has no digests of the base, but a hash of this file
    refused(model, match)
    (model / MANIFEST).unlink()
    assert answer(model)


@pytest.mark.parametrize("source", ["adapter", "earlier export"])
@pytest.mark.parametrize("command", ["generate", "train"])
def test_a_file_that_is_replaced_after_it_was_checked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, source: str, command: str
) -> None:
    name, module = ("lora", "adapter_model") if source == "adapter" else ("full", "model")
    model = folder / f"runs/{name}/model"
    key = f"lora.adapter={model}" if source == "adapter" else f"model.path={model}"
    if source == "earlier export":
        forget_weights(model)
    file, loader = model / f"{module}.safetensors", adapter if source == "adapter" else pretrained
    load = loader.load

    def replaced(*arguments: Any) -> None:
        content = file.with_name("other")
        shutil.copy2(file, content)
        flip(content, 0.9)
        content.replace(file)
        load(*arguments)

    monkeypatch.setattr(loader, "load", replaced)
    with pytest.raises(UserError, match=rf"{module}\.safetensors was changed while it was read"):
        if command == "generate":
            answer(model)
        else:
            lora = ("lora.r=2",) if source == "adapter" else ()
            tools.train_here(folder, key, *lora, "train.max_steps=1", "log.run_name=next")


def test_what_was_verified_is_not_hashed_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_digests, "RECENT", 0.0)
    time.sleep(0.02)
    sources = [folder / "runs/full" / NEWEST, folder / "runs/full/model", folder / "runs/lora"]
    expected = [answer(source) for source in sources]

    def hashed(*_: object) -> None:
        raise AssertionError("hashed")

    with monkeypatch.context() as patch:
        patch.setattr("rptrain.models.weights.safetensors_io.sha256", hashed)
        patch.setattr("rptrain.checkpoint.unchanged.read_into", hashed)
        assert [answer(source) for source in sources] == expected
    flip(folder / "runs/full/model/model.safetensors")
    refused(folder / "runs/full/model", "differ from those that were exported")


def test_a_resumed_run_records_the_same_base(folder: Path) -> None:
    run = RunDir.open(folder / "runs/lora")
    first = json.loads((run.model_path / MANIFEST).read_text())[checked.BASE_WEIGHTS]
    tools.train_here(
        folder, "train.max_steps=3", "save.save_steps=1", "log.run_name=lora", "lora.r=2", "save.resume=auto"
    )
    assert json.loads((run.model_path / MANIFEST).read_text())[checked.BASE_WEIGHTS] == first != {}
