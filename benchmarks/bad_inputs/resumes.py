"""Runs that are resumed although their folder or their checkpoints are not as they were written."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.bad_inputs.case import TRAIN, Case, Edit, Outcome
from benchmarks.bad_inputs.edits import (
    changed,
    copied,
    cut,
    deleted,
    directory,
    dumped,
    fifo,
    link,
    moved,
    rehashed,
    replaced,
    text,
    values,
)

AREA = "resumes"
RESUME = (
    *TRAIN,
    "log.run_name=x",
    "train.max_steps=7",
    "save.save_steps=2",
    "eval.questions=0",
    "engine.devices=cpu:2",
)
RUN = "runs/x"
LAST = "runs/x/checkpoints/checkpoint-6"
STATE, MANIFEST, UNIT = (
    f"{LAST}/trainer_state.json",
    f"{LAST}/complete.json",
    f"{LAST}/units/00001-layers.0.safetensors",
)
UNITS = "units/00001-layers.0.safetensors"
Change = Callable[[Any], object]


def state(change: Change) -> tuple[Edit, ...]:
    """Changes the last checkpoint's state, and its hash too."""
    return changed(STATE, change), rehashed(LAST)


def meta(**given: object) -> tuple[Edit, ...]:
    return state(lambda content: content["meta"].update(given))


def unit(key: str, value: object) -> tuple[Edit, ...]:
    """Sets a field of a tensor's description in the state."""
    return state(lambda content: content["units"][UNITS]["param"].update({key: value}))


def manifest(change: Change) -> tuple[Edit, ...]:
    return (changed(MANIFEST, change),)


def renamed_unit(content: Any) -> None:
    content["units"]["units/../../x"] = content["units"].pop(UNITS)


def named(name: str) -> Change:
    """A manifest with one file more."""
    return lambda content: content["files"].update({name: {"size": 1, "sha256": "0"}})


def linked_outside(*names: str) -> tuple[Edit, ...]:
    """Moves files of the run outside, and links to them."""
    edits: list[Edit] = []
    for name in names:
        up = "../" * (name.count("/") + 1)
        edits += [
            moved(name, f"../outside/moved/{Path(name).name}"),
            link(name, f"{up}outside/moved/{Path(name).name}"),
        ]
    return tuple(edits)


def timings(change: Change) -> tuple[Edit, ...]:
    """Times that could be of this run, changed."""
    content: dict[str, Any] = {
        "conditions": {"devices": ["cpu"], "tokens": 64, "length": 64, "dtype": "float32", "layers": 5},
        "measured": {"forward": [0.1] * 5, "backward": [0.1] * 5, "update": 0.1, "upload": 1e9, "download": 1e9},
    }
    change(content)
    return (dumped(f"{RUN}/timings.json", content),)


SCALE = {"scale": 65536.0, "before": 0.0, "good": 0}
FROZEN = {"patterns": ["*"], "drawn": False, "seed": 0, "sha256": {"../../../outside/secret.txt": "0"}}
EDITS: tuple[tuple[int, str, tuple[Edit, ...], Outcome], ...] = (
    (381, "unchanged", (), "taken"),
    (382, "config of the run is broken", (text(f"{RUN}/config.toml", "[model"),), "either"),
    (
        383,
        "config of the run without a model",
        (replaced(f"{RUN}/config.toml", 'path = "model"', "path = 5"),),
        "either",
    ),
    (384, "config of the run is a pipe", (fifo(f"{RUN}/config.toml"),), "either"),
    (385, "config of the run is a folder", (directory(f"{RUN}/config.toml"),), "either"),
    (386, "config of a later version", (replaced(f"{RUN}/config.toml", "[train]", "[train]\nlater = 1"),), "either"),
    (387, "events are a pipe", (fifo(f"{RUN}/events.jsonl"),), "either"),
    (388, "events are a folder", (directory(f"{RUN}/events.jsonl"),), "either"),
    (389, "events of bytes", (text(f"{RUN}/events.jsonl", bytes(range(256)) * 9),), "either"),
    (390, "events link outside", linked_outside(f"{RUN}/events.jsonl"), "either"),
    (391, "manifest without files", (text(MANIFEST, "{}"),), "either"),
    (392, "manifest is broken", (text(MANIFEST, "{]"),), "either"),
    (393, "manifest names a file outside", manifest(named("../../../../outside/secret.txt")), "either"),
    (394, "manifest is a list", (text(MANIFEST, "[]"),), "either"),
    (395, "manifest of another format", (values(MANIFEST, {"format": 2}),), "either"),
    (396, "manifest names a null character", manifest(named("a\0b")), "either"),
    (397, "size that is a list", manifest(lambda content: content["files"][UNITS].update(size=[1])), "either"),
    (398, "entry that is a list", manifest(lambda content: content["files"].update({UNITS: [1]})), "either"),
    (399, "state of null", (text(STATE, "null"), rehashed(LAST)), "either"),
    (400, "state without meta", state(lambda content: content.update(meta={})), "either"),
    (401, "state without units", state(lambda content: content.update(units={})), "either"),
    (402, "state of step 10**18", state(lambda content: content.update(step=10**18)), "either"),
    (403, "state of step 0", state(lambda content: content.update(step=0)), "taken"),
    (404, "state is a list", (text(STATE, "[]"), rehashed(LAST)), "either"),
    (405, "state with an unknown key", state(lambda content: content.update(extra=1)), "either"),
    (406, "step of text", state(lambda content: content.update(step="6")), "either"),
    (407, "unit of another name", state(renamed_unit), "either"),
    (408, "unit of another shape", unit("shape", [1]), "either"),
    (409, "unit of another dtype", unit("dtype", "BF16"), "either"),
    (410, "unit at other offsets", unit("data_offsets", [0, 10**15]), "either"),
    (411, "model that is not there", meta(model_dir="/no/such/model"), "either"),
    (412, "adapter in a list", meta(lora=[1]), "either"),
    (413, "frozen files outside", meta(frozen=FROZEN), "either"),
    (414, "10**15 steps applied", meta(applied=10**15), "taken"),
    (415, "loss scale of zero before", meta(loss_scale=SCALE), "taken"),
    (416, "unit of other bytes", (text(UNIT, b"\1" * 39232), rehashed(LAST)), "either"),
    (417, "unit cut short", (cut(UNIT, -100),), "either"),
    (418, "unit empty", (text(UNIT, b""), rehashed(LAST)), "either"),
    (419, "unit missing", (deleted(UNIT), rehashed(LAST)), "either"),
    (420, "base of another size", (values(f"{LAST}/base/config.json", {"hidden_size": 64}), rehashed(LAST)), "either"),
    (421, "checkpoint is a link outside", linked_outside(LAST), "either"),
    (422, "checkpoint is a link to itself", (link(LAST, "checkpoint-6"),), "either"),
    (423, "checkpoint of step 10**20", (copied(LAST, f"{RUN}/checkpoints/checkpoint-{10**20}"),), "either"),
    (424, "checkpoint of 200 digits", (copied(LAST, f"{RUN}/checkpoints/checkpoint-{'9' * 200}"),), "either"),
    (425, "checkpoint of Arabic digits", (copied(LAST, f"{RUN}/checkpoints/checkpoint-٩"),), "either"),
    (426, "checkpoint of a negative step", (copied(LAST, f"{RUN}/checkpoints/checkpoint--5"),), "either"),
    (427, "checkpoints are a file", (deleted(f"{RUN}/checkpoints"), text(f"{RUN}/checkpoints", "x")), "either"),
    (428, "checkpoints link outside", linked_outside(f"{RUN}/checkpoints"), "either"),
    (429, "timings are broken", (text(f"{RUN}/timings.json", "{]"),), "either"),
    (430, "timings of null", (text(f"{RUN}/timings.json", '{"conditions": null, "measured": null}'),), "either"),
    (431, "negative timings", timings(lambda content: content["measured"].update(update=-1.0)), "either"),
    (432, "timings of 1e300", timings(lambda content: content["measured"].update(forward=[1e300] * 5)), "either"),
    (433, "timings are a pipe", (fifo(f"{RUN}/timings.json"),), "either"),
    (434, "control is a file", (text(f"{RUN}/control", "x"),), "either"),
    (435, "control links outside", (link(f"{RUN}/control", "../../../outside/folder"),), "either"),
    (436, "control has an old command", (text(f"{RUN}/control/STOP", ""),), "either"),
    (437, "control has a folder", (text(f"{RUN}/control/STOP/x", "x"),), "either"),
    (438, "lanes are a pipe", (fifo(f"{RUN}/lanes.jsonl"),), "either"),
    (439, "lanes are a folder", (directory(f"{RUN}/lanes.jsonl"),), "either"),
)

DAMAGED = {403, 414, 415}  # the checkpoint before is used


def cases() -> Iterator[Case]:
    for number, name, edits, expected in EDITS:
        says = "checkpoint-6 is damaged" if number in DAMAGED else ""
        yield Case(number, AREA, name, RESUME, expected, edits, says=says, changes=(RUN,))
