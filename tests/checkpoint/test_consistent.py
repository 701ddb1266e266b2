"""Checkpoints whose files have the right hashes and contradict each other: export, generate and resume refuse them."""

import json
import shutil
from hashlib import sha256
from itertools import product

import pytest
import torch

from rptrain.checkpoint.atomic_dir import MANIFEST, STATE, Damaged
from rptrain.checkpoint.consistent import read_model
from rptrain.checkpoint.export import export
from rptrain.checkpoint.state import save_state
from rptrain.models.transforms.freeze import freeze
from rptrain.runs.records import events
from tests import run_tools as tools

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MOMENTS = ("fp32", "bf16", "int8")
UNIT = "units/00001-layers.0.safetensors"


def rehash(checkpoint) -> None:
    """Writes the sizes and hashes of the files as they are into the manifest."""
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    for name in manifest["files"]:
        data = (checkpoint / name).read_bytes()
        manifest["files"][name] = {"size": len(data), "sha256": sha256(data).hexdigest()}
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))


def change_state(checkpoint, change) -> None:
    state = json.loads((checkpoint / STATE).read_text())
    change(state)
    (checkpoint / STATE).write_text(json.dumps(state))


@pytest.mark.sample(12)
@pytest.mark.parametrize(("dtype", "moments"), [pair for pair in product(DTYPES, MOMENTS)])
@pytest.mark.parametrize("generations", [1, 2], ids=["sync", "async"])
def test_what_is_saved_is_consistent(spec, states, model_dir, tmp_path, dtype, moments, generations) -> None:
    if moments != "fp32" and dtype == torch.float64:
        pytest.skip("float64 has moments of its own type")
    units = states.make(spec, dtype, generations, moments=moments)
    checkpoint = save_state(tmp_path / "checkpoints", units, step=3, meta={"model_dir": str(model_dir)})
    state, found = read_model(checkpoint)
    assert state["step"] == 3 and found.units == spec.units


@pytest.fixture
def checkpoint(spec, states, model_dir, tmp_path):
    """Of a run in float16, with frozen weights."""
    made = freeze(spec, ["model.layers.1.*"])
    frozen = {"patterns": ["model.layers.1.*"], "drawn": False, "seed": 0, "sha256": {}}
    scale = {"scale": 2.0, "before": 2.0, "good": 0}
    meta = {"model_dir": str(model_dir), "data": "0", "applied": 3, "loss_scale": scale, "frozen": frozen}
    return save_state(tmp_path / "checkpoints", states.make(made, torch.float16, 2), step=3, meta=meta)


def other_dtype(state):
    for tensors in state["units"].values():
        tensors["param"]["dtype"] = "BF16"


def other_header(data):
    return data.replace(b'"F16"', b'"F32"', 1)


LORA = {"base": "x", "settings": {"r": 2, "alpha": 2, "target_modules": "all-linear"}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state["meta"].pop("applied"), "meta.applied is missing"),
        (lambda state: state["meta"].pop("loss_scale"), "meta.loss_scale is missing"),
        (lambda state: state["meta"].pop("model_dir"), "trainer_state.json is damaged: meta.model_dir is missing"),
        (lambda state: state["meta"].update(applied=10**15), "step 3 and 1000000000000000 updates"),
        (lambda state: state["meta"]["loss_scale"].update(before=0.0), "meta.loss_scale.before"),
        (lambda state: state["meta"]["loss_scale"].update(scale=float("inf")), "meta.loss_scale.scale"),
        (lambda state: state["meta"].update(dtype="bfloat16"), "does not belong to the model of"),
        (lambda state: state["meta"].update(dtype="int8"), "meta.dtype"),
        (lambda state: state["meta"].update(narrow=[0]), "meta.narrow.0"),
        (lambda state: state["meta"].update(lora=LORA), "does not belong to the model of"),
        (lambda state: state["meta"].update(lora=LORA | {"settings": {"r": -1}}), "meta.lora.settings.r"),
        (lambda state: state["meta"].update(lora=LORA | {"settings": {"alpha": float("nan")}}), "lora.settings.alpha"),
        (
            lambda state: state["meta"].update(lora=LORA | {"settings": {"target_modules": "q_proj"}}),
            "does not fit the model of base/config.json: lora.target_modules: q_proj is a pattern",
        ),
        (
            lambda state: state["meta"].update(lora=LORA, frozen=None) or state["meta"].pop("frozen"),
            "meta.lora needs meta.frozen",
        ),
        (lambda state: state["meta"]["frozen"].update(patterns=["x"]), "train.freeze: 'x' matches no tensor"),
        (lambda state: state["meta"]["frozen"].update(patterns=["lm_head*"]), "does not belong to the model of"),
        (lambda state: state["units"].pop(UNIT), "layers.0.safetensors does not belong to the model of"),
        (lambda state: state["units"][UNIT]["param"].update(shape=[1]), "layers.0.safetensors does not belong to"),
        (lambda state: state["units"][UNIT]["exp_avg_sq"].update(dtype="F16"), "does not belong to the model of"),
        (lambda state: state["units"][UNIT]["param"].update(data_offsets=[0, 8]), "does not belong to the model of"),
        (other_dtype, "does not belong to the model of"),
    ],
)
def test_a_state_that_contradicts_the_model(checkpoint, change, message) -> None:
    change_state(checkpoint, change)
    rehash(checkpoint)
    with pytest.raises(Damaged) as caught:
        read_model(checkpoint)
    assert message in str(caught.value)


def test_a_state_with_a_key_twice(checkpoint) -> None:
    text = (checkpoint / STATE).read_text()
    (checkpoint / STATE).write_text(text.replace('"applied"', '"applied": 0, "applied"'))
    rehash(checkpoint)
    with pytest.raises(Damaged, match=r"trainer_state.json is damaged: an object has the key 'applied' twice"):
        read_model(checkpoint)


def test_a_loss_scale_of_a_run_that_needs_none(spec, states, model_dir, tmp_path) -> None:
    meta = {"model_dir": str(model_dir), "loss_scale": {"scale": 2.0, "before": 2.0, "good": 0}}
    checkpoint = save_state(tmp_path / "checkpoints", states.make(spec), step=3, meta=meta)
    with pytest.raises(Damaged, match="it has a loss scale, but its parameters are BF16"):
        read_model(checkpoint)


@pytest.mark.parametrize("change", [lambda data: b"\1" * len(data), lambda data: b"", other_header])
def test_a_unit_whose_header_is_not_what_the_state_says(checkpoint, change) -> None:
    file = checkpoint / UNIT
    file.write_bytes(change(file.read_bytes()))
    rehash(checkpoint)
    with pytest.raises(Damaged, match=r"layers.0.safetensors is damaged: its header is not what"):
        read_model(checkpoint)


MORE = ("lora.r=2", "save.save_steps=2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """An unfinished run of adapters with the checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("run")
    tools.write_model(folder / "model")
    run = tools.train_here(folder, *MORE, "train.max_steps=4")
    *records, finished = run.events_path.read_text().splitlines(keepends=True)
    assert '"finished"' in finished
    run.events_path.write_text("".join(records))
    shutil.rmtree(run.model_path)
    return run


@pytest.fixture
def run(trained, tmp_path):
    """The run, which is afterwards as it was before."""
    shutil.copytree(trained.path, tmp_path / "backup")
    yield trained
    shutil.rmtree(trained.path)
    shutil.move(tmp_path / "backup", trained.path)


def resumed_from(run) -> list[int]:
    again = tools.train_here(run.path.parent.parent, *MORE, "train.max_steps=5")
    assert again.path == run.path
    return [event.step for event in tools.events(again, events.Resumed)]


@pytest.mark.long
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.update(step=0) or state["meta"].update(applied=0),
        lambda state: state["meta"]["lora"]["settings"].update(r=3),
        lambda state: state["meta"]["lora"]["settings"].update(target_modules=["q_proj"]),
    ],
    ids=["step", "rank", "modules"],
)
def test_export_generate_and_resume_refuse_it(run, tmp_path, change) -> None:
    last = run.checkpoint_path(4)
    change_state(last, change)
    manifest = json.loads((last / MANIFEST).read_text())
    del manifest["step"]
    (last / MANIFEST).write_text(json.dumps(manifest))
    rehash(last)
    with pytest.raises(Damaged):
        export(run.path, tmp_path / "out")
    with pytest.raises(Damaged):
        tools.generated(last, ["a"], 1, 0.0, 0, True)
    assert resumed_from(run) == [2]


@pytest.mark.long
def test_resume_refuses_other_settings_of_adapters_than_those_of_the_run(run) -> None:
    """Their scale changes no shape."""
    last = run.checkpoint_path(4)
    change_state(last, lambda state: state["meta"]["lora"]["settings"].update(alpha=3))
    rehash(last)
    assert resumed_from(run) == [2]
    (damaged,) = tools.events(run, events.CheckpointDamaged)
    assert damaged.message.endswith("its settings of lora are not those of the run")
