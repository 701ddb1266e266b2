import json
import os
import shutil
from hashlib import sha256
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rptrain.checkpoint.atomic_dir import MANIFEST
from rptrain.checkpoint.export import ModelInMemory, export, export_store
from rptrain.checkpoint.export_progress import loading_code
from rptrain.checkpoint.state import save_state
from rptrain.checkpoint.verify import verify
from rptrain.engine.optim.adam import join
from rptrain.models.weights import pretrained
from rptrain.utils.errors import UserError


@pytest.fixture
def run(tmp_path, model_dir, spec, states):
    """A run of two checkpoints, of which step 10 is the newest, and the units of the newest."""
    units = states.make(spec, generations=2)
    meta = {"model_dir": str(model_dir)}
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").touch()
    save_state(tmp_path / "run/checkpoints", states.make(spec, generations=2, seed=9), step=9, meta=meta)
    save_state(tmp_path / "run/checkpoints", units, step=10, meta=meta)
    shutil.rmtree(model_dir)  # the checkpoint is enough
    return tmp_path / "run", units


def named(units, flats):
    """Checkpoint tensors by name, cut from the units' flat buffers."""
    return {
        part.key: rows
        for unit, flat in zip(units, flats, strict=True)
        for param in unit.unit.params
        for part, rows in zip(
            param.parts,
            unit.unit.views(flat)[param.name].split([part.rows for part in param.parts]),
            strict=True,
        )
    }


def test_the_bytes_written_are_reported(run, tmp_path):
    told: list[tuple[str, int, int]] = []
    to = export(run[0], tmp_path / "model", report=lambda *given: told.append(given))
    size = sum(tensor.numel() * tensor.element_size() for tensor in load_file(to / "model.safetensors").values())
    phases = list(dict.fromkeys(phase for phase, _, _ in told))
    assert phases == ["checking", "writing", "reading back"] and told[0] == ("checking", 0, 0)
    written = [done for phase, done, _ in told if phase == "writing"]
    assert len(written) > 5 and written == sorted(written) and written[-1] == size
    assert {total for phase, _, total in told if phase != "checking"} == {size}


def test_transformers_loads_the_newest_generation(run, tmp_path):
    from transformers import AutoModelForCausalLM

    directory, units = run
    to = export(directory, tmp_path / "model")
    assert to == tmp_path / "model"
    loaded: dict = {}
    exec(loading_code(to), loaded)  # the code that users are told
    model, info = AutoModelForCausalLM.from_pretrained(to, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.dtype == torch.bfloat16
    state = model.state_dict()
    expected = named(units, [unit.params[1] for unit in units])
    assert state.keys() == expected.keys() == loaded["model"].state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    assert (to / "tokenizer.json").is_file()
    assert (to / "chat_template.jinja").read_text() == "{{ messages }}"
    assert not (to / "pytorch_model.bin").exists()
    generation = json.loads((to / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (1, 2)


def test_another_dtype_is_made_from_the_master_weights(run, tmp_path):
    from safetensors.torch import load_file

    directory, units = run
    masters = named(units, [join(unit.params[1], unit.remainder) for unit in units])
    for name, dtype in (("float32", torch.float32), ("float16", torch.float16)):
        to = export(directory / "checkpoints/checkpoint-10", tmp_path / name, name)
        stored = load_file(to / "model.safetensors")
        assert all(torch.equal(stored[key], tensor.to(dtype)) for key, tensor in masters.items())
        assert json.loads((to / "config.json").read_text())["dtype"] == name


def test_another_dtype_of_a_float16_run_is_made_from_its_masters(spec, states, model_dir, tmp_path):
    from safetensors.torch import load_file

    units = states.make(spec, torch.float16, generations=2)
    run = tmp_path / "run"
    run.mkdir()
    save_state(run / "checkpoints", units, step=10, meta={"model_dir": str(model_dir)})
    masters = named(units, [unit.masters for unit in units])
    for name, dtype in ((None, torch.float16), ("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        stored = load_file(export(run, tmp_path / f"to-{name}", name) / "model.safetensors")
        assert all(torch.equal(stored[key], tensor.to(dtype)) for key, tensor in masters.items())


def test_a_model_in_memory_is_exported_with_its_base_models_files(spec, states, model_dir, tmp_path):
    from safetensors.torch import load_file

    units = states.make(spec, torch.float32)
    (model_dir / "generation_config.json").write_text('{"temperature": 0.5}')
    to = export_store(ModelInMemory(lambda unit, name: units[unit].views[0][name], spec), model_dir, tmp_path / "m")
    stored = load_file(to / "model.safetensors")
    expected = named(units, [unit.params[0] for unit in units])
    assert all(torch.equal(stored[name], tensor) for name, tensor in expected.items())
    assert (to / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (to / "generation_config.json").read_text() == '{"temperature": 0.5}'


def test_a_template_of_the_config_replaces_the_models_in_exports_of_earlier_checkpoints(
    spec, states, model_dir, tmp_path, monkeypatch
):
    """Those had the model's own in tokenizer_config.json, which other readers prefer."""
    (model_dir / "tokenizer_config.json").write_text('{"chat_template": "old"}')
    (tmp_path / "run").mkdir()
    meta = {"model_dir": str(model_dir), "chat_template": "new"}
    monkeypatch.setattr("rptrain.checkpoint.state.with_replaced", lambda files, *_: files)
    save_state(tmp_path / "run/checkpoints", states.make(spec), step=1, meta=meta)
    to = export(tmp_path / "run", tmp_path / "model")
    assert (to / "chat_template.jinja").read_text() == "new"
    assert json.loads((to / "tokenizer_config.json").read_text()) == {"chat_template": "new"}


def test_copies_are_readable_to_nobody_else(spec, states, model_dir, tmp_path):
    private = {"config.json", "generation_config.json", "tokenizer.json"}
    (model_dir / "generation_config.json").write_text("{}")
    for file in model_dir.iterdir():
        file.chmod(0o600 if file.name in private else 0o644)
    (tmp_path / "run").mkdir()
    meta = {"model_dir": str(model_dir), "chat_template": "new", "config": spec.config, "ends": [3]}
    mask = os.umask(0o022)
    try:
        checkpoint = save_state(tmp_path / "run/checkpoints", states.make(spec), step=1, meta=meta)
        exported = export(tmp_path / "run", tmp_path / "model")
    finally:
        os.umask(mask)
    for folder in (checkpoint / "base", exported):
        closed = {file.name for file in folder.iterdir() if file.stat().st_mode & 0o077 == 0}
        assert closed == private and (folder / "chat_template.jinja").stat().st_mode & 0o777 == 0o644


def test_a_link_in_a_checkpoint_is_not_followed(run, tmp_path):
    directory, _ = run
    (tmp_path / "secret.txt").write_text("secret")
    (directory / "checkpoints/checkpoint-10/base/x.tiktoken").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(UserError, match=r"x.tiktoken leads to .*secret.txt, outside of its folder: put the file there"):
        export(directory, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def stopped(directory):
    """What stock transformers generates from an exported model: greedily, until an EOS id."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    prompt = torch.tensor([[5, 6, 7]])
    made = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
    return made[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("generation", [None, '{"eos_token_id": 2, "_from_model_config": true, "pad_token_id": 0}'])
def test_generate_of_transformers_stops_on_the_ends_of_replies(spec, states, model_dir, tmp_path, generation):
    units, meta = states.make(spec, torch.float32), {"model_dir": str(model_dir)}
    if generation is not None:
        (model_dir / "generation_config.json").write_text(generation)
    (tmp_path / "run").mkdir()
    save_state(tmp_path / "run/checkpoints", units, step=1, meta=meta)
    endless = stopped(export(tmp_path / "run", tmp_path / "endless"))
    end = endless[3]
    until = endless.index(end) + 1
    assert len(endless) == 12 and 2 not in endless
    save_state(tmp_path / "run/checkpoints", units, step=2, meta=meta | {"ends": [end]})
    exported = export(tmp_path / "run", tmp_path / "exported")
    view = lambda unit, name: units[unit].views[0][name]  # noqa: E731
    stored = export_store(ModelInMemory(view, spec, ends=[end]), model_dir, tmp_path / "stored")
    for directory in (exported, stored):
        assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == [2, end]
        assert stopped(directory) == endless[:until]


def test_only_an_earlier_export_is_replaced(run, tmp_path):
    directory, _ = run
    to = tmp_path / "new/model"
    to.mkdir(parents=True)
    export(directory, to)
    export(directory, to)
    (to / "notes.txt").write_text("mine")
    with pytest.raises(
        UserError, match=r"it holds notes.txt, .*: move it away, choose another directory, or add --force"
    ):
        export(directory, to)
    assert (to / "notes.txt").read_text() == "mine"
    (to / MANIFEST).unlink()
    with pytest.raises(UserError, match="not empty: it holds chat_template"):
        export(directory, to)
    for file in (tmp_path / "file", tmp_path / "link"):
        file.symlink_to("nowhere") if file.name == "link" else file.touch()
        with pytest.raises(UserError, match="is a file"):
            export(directory, file)
        assert file.is_symlink() or file.is_file()
    with pytest.raises(UserError, match="is too long: choose one of at most"):
        export(directory, tmp_path / ("x" * 255))


def test_what_a_person_changed_in_an_export_is_not_replaced(run, tmp_path):
    """Nor a file that is only listed, with its size."""
    directory, _ = run
    to = export(directory, tmp_path / "model")
    size = len((to / "tokenizer.json").read_bytes())
    (to / "tokenizer.json").write_text("x" * size)
    with pytest.raises(
        UserError,
        match=r"tokenizer.json is damaged: its content .* since it was exported: move it away, choose another",
    ):
        export(directory, to)
    assert (to / "tokenizer.json").read_text() == "x" * size
    (to / "tokenizer.json").write_text("longer " * size)
    with pytest.raises(UserError, match=r"tokenizer.json is damaged: .* bytes expected"):
        export(directory, to)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    files = {"notes.txt": {"size": 4, "sha256": "0" * 64}}
    (mine / MANIFEST).write_text(json.dumps({"format": 1, "kind": "export", "files": files}))
    with pytest.raises(UserError, match=r"notes.txt is damaged"):
        export(directory, mine)
    assert (mine / "notes.txt").read_text() == "mine"


def test_the_advice_holds_for_the_model_in_a_runs_folder(run, spec):
    """--force does not replace that one."""
    directory, units = run
    (directory / "model").mkdir()
    (directory / "model/notes.txt").write_text("mine")
    base = directory / "checkpoints/checkpoint-10/base"
    with pytest.raises(UserError, match=r"it holds notes.txt, which was not exported: move it away$"):
        export_store(ModelInMemory(lambda unit, name: units[unit].views[0][name], spec), base, directory / "model")
    with pytest.raises(UserError, match="overlaps the run"):
        export(directory, directory / "model", force=True)
    assert (directory / "model/notes.txt").read_text() == "mine"


def test_force_replaces_what_is_there(run, tmp_path):
    directory, _ = run
    (tmp_path / "folder/inner").mkdir(parents=True)
    (tmp_path / "folder/inner/notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/notes.txt").write_text("mine")
    for name in ("folder", "file", "link", "new"):
        verify(export(directory, tmp_path / name, force=True))
        assert not (tmp_path / name).is_symlink() and not (tmp_path / name / "inner").exists()
    assert (tmp_path / "elsewhere/notes.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "file", "folder", "link", "new", "run"]


def test_an_input_is_not_written_over(run, tmp_path, model_dir):
    """The run of a checkpoint that was named, what a link leads to, and what holds an input are inputs, too."""
    directory, _ = run
    model_dir.mkdir()
    (tmp_path / "to-run").symlink_to("run")
    (tmp_path / "run/link").symlink_to(tmp_path / "new")
    (tmp_path / "checkpoint").symlink_to("run/checkpoints/checkpoint-10")
    (tmp_path / "to-checkpoint").symlink_to("checkpoint")
    before = sorted(tmp_path.rglob("*"))
    places = (
        *("run", "run/new", "run/checkpoints", "run/checkpoints/checkpoint-9", "run/checkpoints/checkpoint-10/base"),
        *(".", "run/checkpoints/..", "to-run", "to-run/new", "run/link", "checkpoint", "to-checkpoint"),
        *("base model", "base model/new"),
    )
    for place, source, force in product(places, (directory, tmp_path / "checkpoint"), (False, True)):
        with pytest.raises(UserError, match=r"overlaps the .*, which the export reads: choose a directory outside"):
            export(source, tmp_path / place, force=force)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "place",
    ["other", "other/checkpoints", "other/checkpoints/checkpoint-9", "other/control/x", "other/model", "link/new"],
)
def test_another_run_is_no_place_for_an_export(run, tmp_path, place):
    directory, _ = run
    for folder in ("checkpoints", "control", "model"):
        (tmp_path / "runs/other" / folder).mkdir(parents=True)
    for file in ("config.toml", "events.jsonl"):
        (tmp_path / "runs/other" / file).touch()
    (tmp_path / "runs/link").symlink_to("other/checkpoints")
    before = sorted(tmp_path.rglob("*"))
    for force in (False, True):
        with pytest.raises(UserError, match=r"is in the folder of a run, .*/runs/other: choose another directory"):
            export(directory, tmp_path / "runs" / place, force=force)
    (tmp_path / "far/x/y/z").mkdir(parents=True)
    shutil.copytree(tmp_path / "runs/other", tmp_path / "far/x/y/z/other")
    before = sorted(tmp_path.rglob("*"))
    for above in ("runs", ".", "far"):
        with pytest.raises(UserError, match=r"(holds the folder of a run|overlaps the )"):
            export(directory, tmp_path / above, force=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_is_like_a_run_is_not_taken_for_one(run, tmp_path):
    directory, _ = run
    (tmp_path / "other/checkpoints").mkdir(parents=True)
    (tmp_path / "other/config.toml").touch()
    assert export(directory, tmp_path / "other/checkpoints/new") == tmp_path / "other/checkpoints/new"


def test_a_large_folder_is_not_walked(run, tmp_path, monkeypatch):
    """The first entry in order of names is named, whatever is below it."""
    directory, _ = run
    for name in ("b/deep", "a/deep", "c"):
        (tmp_path / "large" / name).mkdir(parents=True)
    scanned, scan = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (scanned.append(Path(path)), scan(path))[1])
    with pytest.raises(UserError, match="large is not empty: it holds a, which was not exported"):
        export(directory, tmp_path / "large")
    assert [path for path in scanned if path.is_relative_to(tmp_path / "large")] == [tmp_path / "large"]


def test_what_an_input_links_to_is_not_written_over(run, tmp_path, model_dir):
    directory, _ = run
    model_dir.mkdir()
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/model.safetensors").write_text("mine")
    (model_dir / "model.safetensors").symlink_to(tmp_path / "weights/model.safetensors")
    with pytest.raises(UserError, match="overlaps the base model"):
        export(directory, tmp_path / "weights", force=True)
    assert (tmp_path / "weights/model.safetensors").read_text() == "mine"


@pytest.mark.parametrize("name", ["", ".", "..", "/"])
def test_the_current_directory_is_not_replaced(run, tmp_path, monkeypatch, name):
    (tmp_path / "new/inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "new/inner")
    with pytest.raises(UserError, match="is or holds the current directory"):
        export(run[0], Path(name), force=True)
    assert (tmp_path / "new/inner").is_dir()


def test_what_appears_in_the_target_meanwhile_is_not_deleted(run, tmp_path, monkeypatch):
    directory, _ = run
    to = tmp_path / "new"

    def verified(*_: object) -> None:
        to.mkdir(exist_ok=True)
        (to / "mine.txt").write_text("mine")

    monkeypatch.setattr("rptrain.checkpoint.export.verify", verified)
    for _ in range(2):
        with pytest.raises(UserError, match=r"it holds mine\.txt"):
            export(directory, to)
    assert (to / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("force", [False, True], ids=["plain", "force"])
def test_what_a_killed_export_was_replacing_is_not_deleted_once_changed(run, tmp_path, force):
    directory, _ = run
    export(directory, tmp_path / "new")
    left = (tmp_path / "new").rename(tmp_path / ".new.rptrain-replaced")
    (left / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"is in the way: .* it holds notes.txt"):
        export(directory, tmp_path / "new", force=force)
    assert (left / "notes.txt").read_text() == "mine"


def test_sources_and_dtypes_that_cannot_be(run, tmp_path):
    directory, _ = run
    with pytest.raises(UserError, match="is not a directory"):
        export(tmp_path / "gone", tmp_path / "model")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="a run with a complete checkpoint"):
        export(tmp_path / "empty", tmp_path / "model")
    with pytest.raises(UserError, match="use one of bfloat16"):
        export(directory, tmp_path / "model", "int8")
    with pytest.raises(UserError, match="has no adapters to merge"):
        export(directory, tmp_path / "folders/model", merge=True)
    assert not (tmp_path / "folders").exists()
    exported = export(directory, tmp_path / "model")
    with pytest.raises(UserError, match="is an export already"):
        export(exported, tmp_path / "other")


def test_a_damaged_checkpoint_is_not_exported(run, damage, tmp_path):
    directory, _ = run
    damage(next((directory / "checkpoints/checkpoint-10/units").iterdir()))
    with pytest.raises(UserError, match="is damaged"):
        export(directory, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def rehash(checkpoint):
    """Writes the hashes of the files as they are into the manifest."""
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    for name in manifest["files"]:
        data = (checkpoint / name).read_bytes()
        manifest["files"][name] = {"size": len(data), "sha256": sha256(data).hexdigest()}
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("units/00001-layers.0.safetensors", lambda data: b"\1" * 99, "layers.0.safetensors is damaged: "),
        ("base/config.json", lambda data: edited(data, num_hidden_layers=9), "does not belong to the model of"),
        ("base/config.json", lambda data: edited(data, intermediate_size=8), "does not belong to the model of"),
        (
            "trainer_state.json",
            lambda data: data.replace(b" 896\n", b" 897\n"),
            "does not belong",
        ),
    ],
    ids=["unit", "layers", "size", "state"],
)
def test_a_checkpoint_that_was_changed_with_its_hashes(run, tmp_path, name, change, message):
    checkpoint = run[0] / "checkpoints/checkpoint-10"
    before = (checkpoint / name).read_bytes()
    (checkpoint / name).write_bytes(change(before))
    assert (checkpoint / name).read_bytes() != before
    rehash(checkpoint)
    with pytest.raises(UserError, match=message):
        export(run[0], tmp_path / "model")
    assert not (tmp_path / "model").exists()


def edited(config, **changes):
    return json.dumps(json.loads(config) | changes).encode()


def test_targets_that_cannot_be_written(run, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file is not a directory: choose another one"):
        export(run[0], tmp_path / "file/model")
    with pytest.raises(UserError, match="is not UTF-8 text: choose another one"):
        export(run[0], tmp_path / "a\udcff/model")


def test_a_model_with_nan_is_not_exported(spec, states, model_dir, tmp_path):
    units = states.make(spec)
    units[1].views[0]["qkv"][3, 4] = float("nan")
    with pytest.raises(UserError, match=r"layers.0.self_attn.q_proj.weight holds values that are infinite or not"):
        export_store(ModelInMemory(lambda unit, name: units[unit].views[0][name], spec), model_dir, tmp_path / "m")
    assert not list(tmp_path.glob("m*"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {f"module.{name}": tensor for name, tensor in t.items()}, r"contain 'module\.'"),
        (lambda t: t | {"model.norm.weight": torch.ones(0)}, "model.norm.weight has shape"),
        (lambda t: t | {"model.norm.weight": torch.ones(16, dtype=torch.float64)}, "weights are"),
    ],
    ids=["wrapper", "empty", "dtype"],
)
def test_what_was_written_wrong_is_no_export(run, tmp_path, change, message, monkeypatch):
    from safetensors.torch import load_file, save_file

    directory, _ = run
    write = pretrained.write

    def planted(file, *rest):
        write(file, *rest)
        save_file(change(load_file(file)), file)

    monkeypatch.setattr(pretrained, "write", planted)
    with pytest.raises(UserError, match=message):
        export(directory, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_verify_reads_an_export_back(run, damage, tmp_path):
    directory, _ = run
    to = export(directory, tmp_path / "model")
    verify(to)
    damage(to / "model.safetensors", 0.9)
    with pytest.raises(UserError, match=r"model.safetensors is damaged"):
        verify(to)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda t: t.update({"x": torch.ones(1)}), "x is not part of the model"),
        (lambda t: t.update({"model.norm.weight": torch.ones(0)}), "model.norm.weight has shape"),
        (lambda t: t.update({"model.norm.weight": torch.ones(16)}), "weights are bfloat16, float32"),
    ],
)
def test_verify_finds_what_is_wrong(run, tmp_path, change, message):
    from safetensors.torch import load_file, save_file

    directory, _ = run
    to = export(directory, tmp_path / "model")
    (to / "complete.json").unlink()
    tensors = load_file(to / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors")
    with pytest.raises(UserError, match=message):
        verify(to)
