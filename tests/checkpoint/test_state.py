import json
import shutil
from hashlib import sha256

import pytest
import torch
from safetensors.torch import load_file

from rptrain.checkpoint.atomic_dir import MANIFEST, MARK, STATE, Damaged, complete_checkpoints
from rptrain.checkpoint.state import load_state, prune, read_state, save_state
from rptrain.models.families import registry
from rptrain.utils.errors import UserError
from tests.checkpoints import verify_checkpoint

MOMENTS = pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
KINDS = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])


@pytest.fixture
def save(tmp_path, model_dir):
    def save(units, step=7, **meta):
        return save_state(tmp_path / "checkpoints", units, step=step, meta={"model_dir": str(model_dir)} | meta)

    return save


@pytest.mark.sample(9)
@KINDS
@MOMENTS
@pytest.mark.parametrize("generations", [1, 2], ids=["sync", "async"])
def test_everything_comes_back_to_the_bit(save, spec, states, dtype, moments, generations):
    saved = states.make(spec, dtype, generations, moments=moments)
    directory = save(saved, cursor=[3, 4], applied=6)
    assert directory.name == "checkpoint-7"
    fresh = states.make(spec, dtype, generations, seed=1, moments=moments)
    assert not states.same_bits(states.kept(saved), states.kept(fresh))
    addresses = [unit.params[0].data_ptr() for unit in fresh]
    state = load_state(directory, fresh)
    assert states.same_bits(states.kept(saved), states.kept(fresh))
    assert [unit.params[0].data_ptr() for unit in fresh] == addresses
    assert (state["step"], state["meta"]["cursor"], state["meta"]["applied"]) == (7, [3, 4], 6)
    assert read_state(directory) == verify_checkpoint(directory) == state


def test_the_files_are_safetensors_without_gradients(save, spec, states):
    (unit, *_) = units = states.make(spec, generations=2)
    directory = save(units)
    files = sorted((directory / "units").iterdir())
    assert len(files) == len(spec.units)
    tensors = load_file(files[0])
    assert set(tensors) == {"param", "previous", "remainder", "exp_avg", "exp_avg_sq"}
    assert torch.equal(tensors["param"], unit.params[1])
    assert torch.equal(tensors["previous"], unit.params[0])
    assert sorted(path.name for path in (directory / "base").iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "tokenizer.json",
    ]


@pytest.mark.parametrize("at", [0.0, 0.01, 0.5, 1.0])
def test_a_flipped_bit_anywhere_is_found(save, spec, states, damage, at):
    directory = save(states.make(spec))
    names = [name for name in json.loads((directory / MANIFEST).read_text())["files"] if name[:4] != "base"]
    for name in names:
        original = (directory / name).read_bytes()
        damage(directory / name, at)
        with pytest.raises(UserError, match=f"{name} is damaged"):
            load_state(directory, states.make(spec, seed=1))
        (directory / name).write_bytes(original)
    load_state(directory, states.make(spec, seed=1))


def test_what_is_cut_short_or_missing_is_named_before_a_buffer_is_touched(save, spec, states):
    directory = save(states.make(spec))
    fresh, untouched = states.make(spec, seed=1), states.make(spec, seed=1)
    last = sorted((directory / "units").iterdir())[-1]
    last.write_bytes(last.read_bytes()[:-1])
    with pytest.raises(UserError, match=rf"{last.name} is damaged: \d+ bytes expected, \d+ there"):
        load_state(directory, fresh)
    last.unlink()
    with pytest.raises(UserError, match=f"{last.name} is missing"):
        load_state(directory, fresh)
    (directory / MANIFEST).unlink()
    with pytest.raises(UserError, match="not complete"):
        load_state(directory, fresh)
    assert states.same_bits(states.kept(fresh), states.kept(untouched))


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_the_kind_of_update_cannot_change(save, spec, states, before, after):
    directory = save(states.make(spec, generations=before))
    name = {1: "sync", 2: "async"}[before]
    with pytest.raises(UserError, match=f'set optim.update = "{name}"'):
        load_state(directory, states.make(spec, generations=after))


def test_the_dtype_cannot_change(save, spec, states):
    directory = save(states.make(spec))
    with pytest.raises(UserError, match=r'model.dtype = "bfloat16" and cannot be resumed with "float32"'):
        load_state(directory, states.make(spec, torch.float32))


@pytest.mark.parametrize(("before", "after"), [("fp32", "int8"), ("bf16", "fp32"), ("int8", "bf16")])
def test_the_moments_cannot_change(save, spec, states, before, after):
    directory = save(states.make(spec, moments=before))
    with pytest.raises(UserError, match=f'optim.moments = "{before}" and cannot be resumed with "{after}": set optim'):
        load_state(directory, states.make(spec, moments=after))


def test_small_moments_are_plain_tensors_of_the_file(save, spec, states):
    (unit, *_) = units = states.make(spec, moments="int8")
    tensors = load_file(min((save(units) / "units").iterdir()))
    assert set(tensors) == {"param", "remainder", *unit.moments}
    assert all(torch.equal(tensors[name], tensor) for name, tensor in unit.moments.items())
    assert (tensors["exp_avg"].dtype, tensors["exp_avg_sq"].dtype) == (torch.int8, torch.uint8)
    assert len(tensors["exp_avg_scale"]) == len(tensors["exp_avg_sq_scale"]) == unit.unit.numel // 128


@pytest.mark.parametrize("change", [{"num_hidden_layers": 3}, {"num_hidden_layers": 1}, {"vocab_size": 99}])
def test_another_model_is_told(save, spec, states, change):
    directory = save(states.make(spec))
    other = registry.build({**spec.config, **change})
    with pytest.raises(UserError, match="belongs to another model"):
        load_state(directory, states.make(other))


def test_the_newest_complete_checkpoint_by_number(save, spec, states, tmp_path):
    checkpoints = tmp_path / "checkpoints"
    assert complete_checkpoints(checkpoints) == []
    units = states.make(spec)
    for step in (9, 10, 100):
        save(units, step)
    assert complete_checkpoints(checkpoints)[-1] == checkpoints / "checkpoint-100"
    (checkpoints / "checkpoint-100" / MANIFEST).unlink()
    assert complete_checkpoints(checkpoints)[-1] == checkpoints / "checkpoint-10"
    (checkpoints / "checkpoint-10").rename(checkpoints / ".checkpoint-10.rptrain-partial")
    assert complete_checkpoints(checkpoints)[-1] == checkpoints / "checkpoint-9"
    # What a kill in the middle of replacing a checkpoint leaves, and left in older versions.
    for name in (".checkpoint-9.rptrain-replaced", "checkpoint-9.replaced"):
        complete_checkpoints(checkpoints)[-1].rename(checkpoints / name)
        assert complete_checkpoints(checkpoints)[-1] == checkpoints / name
    save(units, 9)
    assert complete_checkpoints(checkpoints)[-1] == checkpoints / "checkpoint-9"


def test_prune_keeps_the_newest_and_clears_leftovers(save, spec, states, tmp_path):
    checkpoints = tmp_path / "checkpoints"
    units = states.make(spec)
    for step in (1, 2, 3, 10):
        save(units, step)
    shutil.copytree(checkpoints / "checkpoint-3", checkpoints / ".checkpoint-3.rptrain-replaced")
    (checkpoints / ".checkpoint-11.rptrain-partial").mkdir()
    (checkpoints / ".checkpoint-11.rptrain-partial" / MARK).touch()
    (checkpoints / ".checkpoint-11.rptrain-partial" / "new").mkdir()
    others = [".checkpoint-1.rptrain-replaced", ".checkpoint-12.rptrain-partial", "checkpoint-3.partial", "notes"]
    for name in others:
        (checkpoints / name).mkdir()
        (checkpoints / name / "mine").touch()
    prune(checkpoints, None)
    names = ["checkpoint-1", "checkpoint-10", "checkpoint-2", "checkpoint-3", *others]
    assert sorted(path.name for path in checkpoints.iterdir()) == sorted(names)
    prune(checkpoints, 2)
    assert sorted(path.name for path in checkpoints.iterdir()) == sorted(["checkpoint-10", "checkpoint-3", *others])
    load_state(complete_checkpoints(checkpoints)[-1], units)


def test_a_checkpoint_that_counts_by_the_name_it_had_while_it_was_replaced_is_pruned(save, spec, states, tmp_path):
    checkpoints, units = tmp_path / "checkpoints", states.make(spec)
    save(units, 9).rename(checkpoints / ".checkpoint-9.rptrain-replaced")
    save(units, 10)
    prune(checkpoints, 1)
    assert [path.name for path in checkpoints.iterdir()] == ["checkpoint-10"]


def test_no_folder_is_made_for_the_checkpoints_of_a_run_that_is_gone(spec, states, model_dir, tmp_path):
    with pytest.raises(FileNotFoundError):
        save_state(tmp_path / "run/checkpoints", states.make(spec), step=1, meta={"model_dir": str(model_dir)})
    assert not (tmp_path / "run").exists()


def test_saving_a_step_again_replaces_it(save, spec, states):
    save(states.make(spec))
    again = states.make(spec, seed=2)
    directory = save(again)
    fresh = states.make(spec, seed=3)
    load_state(directory, fresh)
    assert states.same_bits(states.kept(again), states.kept(fresh))
    assert [path.name for path in directory.parent.iterdir()] == ["checkpoint-7"]


def test_what_is_not_whole_is_kept_under_another_name(save, spec, states):
    path = save(states.make(spec), step=7)
    (path / "complete.json").unlink()
    (path / "notes.txt").write_text("mine")
    assert load_state(save(states.make(spec), step=7), states.make(spec))["step"] == 7
    assert (path.with_name("checkpoint-7.damaged") / "notes.txt").read_text() == "mine"


def rewrite(directory, change):
    """Changes trainer_state.json, and the manifest with it."""
    file, manifest = directory / STATE, directory / MANIFEST
    state, facts = json.loads(file.read_bytes()), json.loads(manifest.read_bytes())
    change(state)
    file.write_text(json.dumps(state))
    facts["files"][STATE] = {"size": file.stat().st_size, "sha256": sha256(file.read_bytes()).hexdigest()}
    manifest.write_text(json.dumps(facts))


def first_unit(state):
    return next(iter(state["units"].values()))


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda state: state.pop("step"), "step"),
        (lambda state: state.update(step="7"), "step"),
        (lambda state: state.update(meta=[]), "meta"),
        (lambda state: state["meta"].update(applied=None), "meta.applied"),
        (lambda state: state["meta"].update(validation={"loss": "low"}), "meta.validation.data"),
        (lambda state: state["meta"].update(frozen={}), "meta.frozen.patterns"),
        (lambda state: state["meta"].update(lora={"settings": {"r": "8"}, "base": "m"}), "meta.lora.settings.r"),
        (lambda state: state["meta"].update(lora=None), "meta.lora"),
        (lambda state: state["meta"].update(loss_scale={"scale": 0, "before": 1, "good": 0}), "meta.loss_scale.scale"),
        (
            lambda state: state["meta"].update(loss_scale={"scale": 1, "before": -1, "good": 0}),
            "meta.loss_scale.before",
        ),
        (lambda state: state["meta"].update(lora={"settings": {"rank": 8}, "base": "m"}), "meta.lora.settings.rank"),
        (lambda state: first_unit(state).pop("param"), "units.*.param"),
        (lambda state: first_unit(state)["exp_avg"].update(dtype="F31"), "units.*.exp_avg.dtype"),
        (lambda state: first_unit(state)["param"].pop("shape"), "units.*.param.shape"),
        (lambda state: first_unit(state)["param"].update(data_offsets=[-1, 0]), "units.*.param.data_offsets.0"),
    ],
)
def test_a_state_that_no_run_wrote(save, spec, states, change, place):
    directory = save(states.make(spec))
    rewrite(directory, change)
    with pytest.raises(Damaged, match=rf"{STATE} is damaged: {place}: "):
        read_state(directory)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.update(step=6), "step 6 and 0 updates are not of this checkpoint"),
        (lambda state: state["meta"].update(applied=8), "step 7 and 8 updates are not of this checkpoint"),
    ],
    ids=["step", "applied"],
)
def test_a_state_of_another_step(save, spec, states, change, message):
    directory = save(states.make(spec), step=7)
    rewrite(directory, change)
    with pytest.raises(Damaged, match=message):
        read_state(directory)


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "units/../../outside"])
def test_a_manifest_cannot_name_what_is_outside(save, spec, states, monkeypatch, name):
    directory = save(states.make(spec))
    (directory.parent / "outside").write_bytes(b"x")
    facts = json.loads((directory / MANIFEST).read_bytes())
    facts["files"][name] = {"size": 1, "sha256": sha256(b"x").hexdigest()}
    (directory / MANIFEST).write_text(json.dumps(facts))
    with pytest.raises(Damaged, match="is outside of its directory"):
        read_state(directory)


def test_a_base_model_that_is_gone_is_told(spec, states, tmp_path):
    with pytest.raises(UserError, match=r"config.json is no longer in"):
        save_state(tmp_path / "c", states.make(spec), step=1, meta={"model_dir": str(tmp_path / "gone")})
